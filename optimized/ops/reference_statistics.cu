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
  dense::Arguments arguments = reader_arguments(a);
  arguments.written_rows = a.written_rows;
  arguments.written_count = a.written_count;
  if (a.encoded_history) {
    dense::launch<kHeadDim, true, true>(arguments, a.row_count, a.max_length, stream);
  } else {
    dense::launch<kHeadDim, false, true>(arguments, a.row_count, a.max_length, stream);
  }
}

template <int kHeadDim>
void launch_contribution(const ReferenceStatisticsArguments& a, cudaStream_t stream) {
  dense::Arguments arguments = reader_arguments(a);
  arguments.rows_of_layer = a.row_count;
  if (a.encoded_history) {
    selected::launch<kHeadDim, true, selected::Purpose::contribution>(arguments, a.row_count * a.layer_count, a.max_length, stream);
  } else {
    selected::launch<kHeadDim, false, selected::Purpose::contribution>(arguments, a.row_count * a.layer_count, a.max_length, stream);
  }
}

}  // namespace

std::size_t reference_statistics_workspace_bytes(const KvShape& shape, int row_count, int layer_count) {
  // Of all launches of so many layers and fewer, the one that needs most: beyond kMostSharedPairs none does.
  const int sharing_rows = std::min(row_count * layer_count, selected::kMostSharedPairs / std::max(shape.heads, 1));
  return std::max(dense::chain_bytes(shape, row_count), selected::selected_group_bytes(shape, sharing_rows));
}

int reference_group_layers(const KvShape& shape, int row_count, std::int64_t logit_stride) {
  const std::size_t layer_bytes =
      static_cast<std::size_t>(row_count) * static_cast<std::size_t>(shape.heads) * static_cast<std::size_t>(logit_stride) * sizeof(float);
  const int most = static_cast<int>(std::clamp<std::size_t>(kReferenceLogitsBytes / std::max<std::size_t>(layer_bytes, 1), 1,
                                                            static_cast<std::size_t>(std::max(shape.layers, 1))));
  const int groups = (shape.layers + most - 1) / most;
  return groups > 0 ? (shape.layers + groups - 1) / groups : 1;
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
  split::check_launch("reference_contribution", arguments.kv.shape, arguments.row_count * arguments.layer_count, arguments.max_length);
  if (arguments.row_count == 0 || arguments.layer_count == 0) return;
  if (arguments.kv.shape.head_dim == 128) {
    launch_contribution<128>(arguments, stream);
  } else {
    launch_contribution<64>(arguments, stream);
  }
}

}  // namespace loopgauge::optimized
