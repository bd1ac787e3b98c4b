// SPDX-License-Identifier: Apache-2.0
#include "optimized/ops/reference_statistics.cuh"

#include "optimized/ops/selected_attention.cuh"
#include "optimized/ops/split_launch.cuh"

namespace loopgauge::optimized {
namespace {

dense::Arguments reader_arguments(const ReferenceStatisticsArguments& a) {
  return {a.kv,     a.layer,        a.q,             a.q_row_stride, a.rows,                           a.reference, a.logits,
          a.logit_stride, a.numeric_fault, a.output,       static_cast<float*>(a.workspace), a.arrivals,  a.fault};
}

template <int kHeadDim>
void launch_statistics(const ReferenceStatisticsArguments& a, cudaStream_t stream) {
  if (a.encoded_history) {
    dense::launch<kHeadDim, true, true>(reader_arguments(a), a.row_count, a.max_length, stream);
  } else {
    dense::launch<kHeadDim, false, true>(reader_arguments(a), a.row_count, a.max_length, stream);
  }
}

template <int kHeadDim>
void launch_contribution(const ReferenceStatisticsArguments& a, cudaStream_t stream) {
  if (a.encoded_history) {
    selected::launch<kHeadDim, true, selected::Purpose::contribution>(reader_arguments(a), a.row_count, a.max_length, stream);
  } else {
    selected::launch<kHeadDim, false, selected::Purpose::contribution>(reader_arguments(a), a.row_count, a.max_length, stream);
  }
}

}  // namespace

std::size_t reference_statistics_workspace_bytes(const KvShape& shape, int row_count) {
  return std::max(dense::chain_bytes(shape, row_count), selected::selected_chain_bytes(shape, row_count));
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
