// SPDX-License-Identifier: Apache-2.0
#include "optimized/ops/attention_decode.cuh"

#include "optimized/ops/split_attention.cuh"
#include "optimized/ops/split_launch.cuh"
#include "optimized/runtime/cuda_check.hpp"

namespace loopgauge::optimized {
namespace {

// grid (heads, rows), head_dim threads.
template <int kHeadDim>
__global__ void attention_combine_kernel(split::Partials partials, const QueryRow* rows, int heads, __nv_bfloat16* output) {
  extern __shared__ float weights[];
  const int head = blockIdx.x, row_index = blockIdx.y;
  const QueryRow row = rows[row_index];
  if (row.request < 0) return;
  const int splits = row.position / kSplitTokens + 1;
  const std::size_t head_index = static_cast<std::size_t>(row_index) * heads + head;
  float maximum, sum;
  const float value = split::combine_splits<kHeadDim>(partials, head_index * partials.splits, splits, weights, maximum, sum);
  output[head_index * kHeadDim + threadIdx.x] = __float2bfloat16_rn(__fdiv_rn(value, sum));
}

template <int kHeadDim>
void launch(const AttentionDecodeArguments& a, cudaStream_t stream) {
  const int splits = split::split_count(a.max_length, kSplitTokens);
  const split::Partials partials = split::partials_at(a.workspace, a.kv.shape, a.row_count, splits);
  const split::Arguments arguments{a.kv, a.layer, a.q, a.q_row_stride, a.rows, {}, nullptr, 0, nullptr, partials, a.fault};
  const dim3 grid(splits, a.kv.shape.heads, a.row_count);
  split::split_attention_kernel<kHeadDim, kSplitTokens / kPageTokens, split::Purpose::attention>
      <<<grid, split::kThreads, 0, stream>>>(arguments);
  LOOPGAUGE_CUDA_CHECK_LAUNCH("attention_decode");
  attention_combine_kernel<kHeadDim>
      <<<dim3(a.kv.shape.heads, a.row_count), kHeadDim, splits * sizeof(float), stream>>>(partials, a.rows, a.kv.shape.heads, a.output);
  LOOPGAUGE_CUDA_CHECK_LAUNCH("attention_combine");
}

}  // namespace

std::size_t attention_decode_workspace_bytes(const KvShape& shape, int row_count, int max_length) {
  return split::partial_bytes(shape, row_count, split::split_count(max_length, kSplitTokens));
}

void attention_decode(const AttentionDecodeArguments& arguments, cudaStream_t stream) {
  split::check_launch("attention_decode", arguments.kv.shape, arguments.row_count, arguments.max_length);
  if (arguments.row_count == 0) return;
  if (arguments.kv.shape.head_dim == 128) {
    launch<128>(arguments, stream);
  } else {
    launch<64>(arguments, stream);
  }
}

}  // namespace loopgauge::optimized
