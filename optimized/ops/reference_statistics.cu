// SPDX-License-Identifier: Apache-2.0
#include "optimized/ops/reference_statistics.cuh"

#include <algorithm>

#include "optimized/ops/dense_attention.cuh"
#include "optimized/ops/split_attention.cuh"
#include "optimized/ops/split_launch.cuh"
#include "optimized/runtime/cuda_check.hpp"

namespace loopgauge::optimized {
namespace {

// grid (heads, rows), head_dim threads. The splits share one maximum, so their sums add directly.
template <int kHeadDim>
__global__ void contribution_combine_kernel(split::Partials partials, const QueryRow* rows, KvShape shape, int layer,
                                            ReferenceView reference) {
  const int head = blockIdx.x, row_index = blockIdx.y;
  const QueryRow row = rows[row_index];
  if (row.request < 0) return;
  const int splits = row.position / kCorrectionSplitTokens + 1;
  const std::size_t first = (static_cast<std::size_t>(row_index) * shape.heads + head) * partials.splits;
  float mass = 0.0f, contribution = 0.0f;
  for (int s = 0; s < splits; ++s) {
    mass = __fadd_rn(mass, partials.statistics[first + s].y);
    contribution = __fadd_rn(contribution, partials.output[(first + s) * kHeadDim + threadIdx.x]);
  }
  const std::size_t state = reference_index(shape, row.reference, layer, head);
  const float sum = reference.sum[state];
  reference.c_ref[state * kHeadDim + threadIdx.x] = __fdiv_rn(contribution, sum);
  if (threadIdx.x == 0) reference.mass[state] = __fdiv_rn(mass, sum);
}

split::Arguments split_arguments(const ReferenceStatisticsArguments& a, const split::Partials& partials) {
  return {a.kv,     a.layer,        a.q,             a.q_row_stride, a.rows, a.reference,
          a.logits, a.logit_stride, a.numeric_fault, partials,       a.fault};
}

template <int kHeadDim>
void launch_statistics(const ReferenceStatisticsArguments& a, cudaStream_t stream) {
  const dense::Arguments arguments{a.kv,     a.layer,        a.q,             a.q_row_stride, a.rows,                           a.reference,
                                   a.logits, a.logit_stride, a.numeric_fault, a.output,       static_cast<float*>(a.workspace), a.arrivals, a.fault};
  if (a.encoded_history) {
    dense::launch<kHeadDim, true, true>(arguments, a.row_count, a.max_length, stream);
  } else {
    dense::launch<kHeadDim, false, true>(arguments, a.row_count, a.max_length, stream);
  }
}

template <int kHeadDim>
void launch_contribution(const ReferenceStatisticsArguments& a, cudaStream_t stream) {
  const int splits = split::split_count(a.max_length, kCorrectionSplitTokens);
  const split::Partials partials = split::partials_at(a.workspace, a.kv.shape, a.row_count, splits);
  const dim3 grid(splits, a.kv.shape.heads, a.row_count);
  split::split_attention_kernel<kHeadDim, kCorrectionSplitTokens / kPageTokens, split::Purpose::contribution>
      <<<grid, split::kThreads, 0, stream>>>(split_arguments(a, partials));
  LOOPGAUGE_CUDA_CHECK_LAUNCH("reference_contribution");
  contribution_combine_kernel<kHeadDim>
      <<<dim3(a.kv.shape.heads, a.row_count), kHeadDim, 0, stream>>>(partials, a.rows, a.kv.shape, a.layer, a.reference);
  LOOPGAUGE_CUDA_CHECK_LAUNCH("contribution_combine");
}

}  // namespace

std::size_t reference_statistics_workspace_bytes(const KvShape& shape, int row_count, int max_length) {
  return std::max(dense::chain_bytes(shape, row_count),
                  split::partial_bytes(shape, row_count, split::split_count(max_length, kCorrectionSplitTokens)));
}

void reference_statistics(const ReferenceStatisticsArguments& arguments, cudaStream_t stream) {
  split::check_launch("reference_statistics", arguments.kv.shape, arguments.row_count, arguments.max_length);
  if (arguments.row_count == 0) return;
  if (arguments.kv.shape.head_dim == 128) {
    launch_statistics<128>(arguments, stream);
  } else {
    launch_statistics<64>(arguments, stream);
  }
}

void reference_contribution(const ReferenceStatisticsArguments& arguments, cudaStream_t stream) {
  split::check_launch("reference_contribution", arguments.kv.shape, arguments.row_count, arguments.max_length);
  if (arguments.row_count == 0) return;
  if (arguments.kv.shape.head_dim == 128) {
    launch_contribution<128>(arguments, stream);
  } else {
    launch_contribution<64>(arguments, stream);
  }
}

}  // namespace loopgauge::optimized
