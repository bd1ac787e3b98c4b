// SPDX-License-Identifier: Apache-2.0
#include "optimized/ops/kv_append.cuh"

#include "optimized/runtime/cuda_check.hpp"

namespace loopgauge::optimized {
namespace {

__global__ void kv_append_kernel(const Bfloat16* __restrict__ keys, const Bfloat16* __restrict__ values, std::int64_t row_stride,
                                 const QueryRow* __restrict__ rows, KvView view, int layer) {
  const QueryRow row = rows[blockIdx.x];
  if (row.request < 0) return;
  auto* page = reinterpret_cast<Bfloat16*>(view.requests[row.request].pages[row.position / kPageTokens].bf16[row.loop - 1]);
  const int head_chunks = view.shape.head_dim / 8;
  const int chunks = view.shape.heads * head_chunks;
  const auto* key_row = reinterpret_cast<const uint4*>(keys + blockIdx.x * row_stride);
  const auto* value_row = reinterpret_cast<const uint4*>(values + blockIdx.x * row_stride);
  for (int i = threadIdx.x; i < chunks; i += blockDim.x) {
    const int head = i / head_chunks;
    const int within = i % head_chunks;
    const int row_in_page = row.position % kPageTokens;
    reinterpret_cast<uint4*>(page + page_row_offset(view.shape, layer, KvTensor::k, head, row_in_page))[within] = key_row[i];
    reinterpret_cast<uint4*>(page + page_row_offset(view.shape, layer, KvTensor::v, head, row_in_page))[within] = value_row[i];
  }
}

}  // namespace

void kv_append(const Bfloat16* keys, const Bfloat16* values, std::int64_t row_stride, const QueryRow* rows, const KvView& view, int layer,
               int count, cudaStream_t stream) {
  if (view.shape.head_dim % 8 != 0) throw UnsupportedError("kv_append: head_dim is not a multiple of 8");
  if (count == 0) return;
  kv_append_kernel<<<count, 128, 0, stream>>>(keys, values, row_stride, rows, view, layer);
  LOOPGAUGE_CUDA_CHECK_LAUNCH("kv_append");
}

}  // namespace loopgauge::optimized
