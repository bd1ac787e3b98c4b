// SPDX-License-Identifier: Apache-2.0
#include "optimized/ops/attention_decode.cuh"

#include "optimized/ops/dense_attention.cuh"
#include "optimized/ops/split_launch.cuh"

namespace loopgauge::optimized {
namespace {

template <int kHeadDim>
void launch(const AttentionDecodeArguments& a, cudaStream_t stream) {
  dense::Arguments arguments{a.kv,    a.layer, a.q,     a.q_row_stride, a.rows, {}, nullptr, 0,
                             nullptr, a.output, static_cast<float*>(a.workspace), a.arrivals, a.fault};
  arguments.written_rows = a.written_rows;
  arguments.written_count = a.written_count;
  if (a.encoded_history) {
    dense::launch<kHeadDim, true, false>(arguments, a.row_count, a.max_length, stream);
  } else {
    dense::launch<kHeadDim, false, false>(arguments, a.row_count, a.max_length, stream);
  }
}

}  // namespace

std::size_t attention_decode_workspace_bytes(const KvShape& shape, int row_count) { return dense::chain_bytes(shape, row_count); }

void attention_decode(const AttentionDecodeArguments& arguments, cudaStream_t stream) {
  split::check_launch("attention_decode", arguments.kv.shape, arguments.row_count, arguments.max_length);
  if (arguments.written_count > 32) throw InternalError("attention_decode: " + std::to_string(arguments.written_count) + " written rows, at most 32");
  if (arguments.row_count == 0) return;
  if (arguments.kv.shape.head_dim == 128) {
    launch<128>(arguments, stream);
  } else {
    launch<64>(arguments, stream);
  }
}

}  // namespace loopgauge::optimized
