// SPDX-License-Identifier: Apache-2.0
#include "optimized/ops/sparse_correction.cuh"

#include "optimized/ops/split_attention.cuh"
#include "optimized/ops/split_launch.cuh"
#include "optimized/runtime/cuda_check.hpp"

namespace loopgauge::optimized {
namespace {

// grid (heads, rows), head_dim threads. O = (O_ref - C_ref) + m * L, each step rounded.
template <int kHeadDim>
__global__ void correction_combine_kernel(split::Partials partials, const QueryRow* rows, KvShape shape, int layer, ReferenceView reference,
                                          __nv_bfloat16* output) {
  extern __shared__ float weights[];
  const int head = blockIdx.x, row_index = blockIdx.y;
  const QueryRow row = rows[row_index];
  if (row.request < 0) return;
  const int splits = row.position / kCorrectionSplitTokens + 1;
  const std::size_t head_index = static_cast<std::size_t>(row_index) * shape.heads + head;
  float maximum, sum;
  const float value = split::combine_splits<kHeadDim>(partials, head_index * partials.splits, splits, weights, maximum, sum);
  const float local = __fdiv_rn(value, sum);
  const std::size_t state = reference_index(shape, row.reference, layer, head);
  const float unselected = __fsub_rn(reference.o_ref[state * kHeadDim + threadIdx.x], reference.c_ref[state * kHeadDim + threadIdx.x]);
  const float corrected = __fadd_rn(unselected, __fmul_rn(reference.mass[state], local));
  output[head_index * kHeadDim + threadIdx.x] = __float2bfloat16_rn(corrected);
}

template <int kHeadDim>
void launch(const SparseCorrectionArguments& a, cudaStream_t stream) {
  const int splits = split::split_count(a.max_length, kCorrectionSplitTokens);
  const split::Partials partials = split::partials_at(a.workspace, a.kv.shape, a.row_count, splits);
  const split::Arguments arguments{a.kv,    a.layer, a.q,     a.q_row_stride, a.rows,  a.reference,
                                   nullptr, 0,       nullptr, partials,       a.fault};
  const dim3 grid(splits, a.kv.shape.heads, a.row_count);
  split::split_attention_kernel<kHeadDim, kCorrectionSplitTokens / kPageTokens, split::Purpose::correction>
      <<<grid, split::kThreads, 0, stream>>>(arguments);
  LOOPGAUGE_CUDA_CHECK_LAUNCH("sparse_correction");
  correction_combine_kernel<kHeadDim><<<dim3(a.kv.shape.heads, a.row_count), kHeadDim, splits * sizeof(float), stream>>>(
      partials, a.rows, a.kv.shape, a.layer, a.reference, a.output);
  LOOPGAUGE_CUDA_CHECK_LAUNCH("correction_combine");
}

}  // namespace

std::size_t sparse_correction_workspace_bytes(const KvShape& shape, int row_count, int max_length) {
  return split::partial_bytes(shape, row_count, split::split_count(max_length, kCorrectionSplitTokens));
}

void sparse_correction(const SparseCorrectionArguments& arguments, cudaStream_t stream) {
  split::check_launch("sparse_correction", arguments.kv.shape, arguments.row_count, arguments.max_length);
  if (arguments.row_count == 0) return;
  if (arguments.kv.shape.head_dim == 128) {
    launch<128>(arguments, stream);
  } else {
    launch<64>(arguments, stream);
  }
}

}  // namespace loopgauge::optimized
