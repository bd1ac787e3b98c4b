// SPDX-License-Identifier: Apache-2.0
#include "optimized/ops/sparse_correction.cuh"

#include "optimized/ops/selected_attention.cuh"
#include "optimized/ops/split_launch.cuh"

namespace loopgauge::optimized {
namespace {

template <int kHeadDim>
void launch(const SparseCorrectionArguments& a, cudaStream_t stream) {
  dense::Arguments arguments{
      a.kv, a.layer, a.q, a.q_row_stride, a.rows, a.reference, nullptr, 0, nullptr, a.output, static_cast<float*>(a.workspace), a.arrivals, a.fault};
  arguments.written_rows = a.written_rows;
  if (a.encoded_history) {
    selected::launch<kHeadDim, true, selected::Purpose::correction>(arguments, a.row_count, a.max_length, stream);
  } else {
    selected::launch<kHeadDim, false, selected::Purpose::correction>(arguments, a.row_count, a.max_length, stream);
  }
}

}  // namespace

std::size_t sparse_correction_workspace_bytes(const KvShape& shape, int row_count) { return selected::selected_group_bytes(shape, row_count); }

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
