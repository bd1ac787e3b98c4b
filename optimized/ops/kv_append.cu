// SPDX-License-Identifier: Apache-2.0
#include "optimized/ops/kv_append.cuh"

#include "optimized/ops/rope.cuh"
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

__global__ void __launch_bounds__(128)
    rope_and_kv_append_kernel(Bfloat16* __restrict__ qkv, std::int64_t row_stride, const std::int32_t* __restrict__ positions, const Bfloat16* __restrict__ cosine,
                              const Bfloat16* __restrict__ sine, const QueryRow* __restrict__ rows, KvView view, int layer) {
  const int head_dim = view.shape.head_dim, half = head_dim / 2, head_pieces = half / 8;
  const std::int64_t width = static_cast<std::int64_t>(view.shape.heads) * head_dim;
  const QueryRow row = rows[blockIdx.x];
  const std::int64_t table = static_cast<std::int64_t>(positions[blockIdx.x]) * half;
  Bfloat16* page = nullptr;
  if (row.request >= 0) page = reinterpret_cast<Bfloat16*>(view.requests[row.request].pages[row.position / kPageTokens].bf16[row.loop - 1]);
  for (int i = threadIdx.x; i < view.shape.heads * head_pieces; i += blockDim.x) {
    const int head = i / head_pieces, channel = i % head_pieces * 8;
    auto* const q = reinterpret_cast<uint4*>(qkv + blockIdx.x * row_stride + head * head_dim + channel);
    const auto* const k = q + width / 8;
    const auto* const v = k + width / 8;
    const uint4 c = *reinterpret_cast<const uint4*>(cosine + table + channel), s = *reinterpret_cast<const uint4*>(sine + table + channel);
    uint4 q_low = q[0], q_high = q[head_pieces], k_low = k[0], k_high = k[head_pieces];
    const uint4 v_low = v[0], v_high = v[head_pieces];
    rotate_channels(q_low, q_high, c, s);
    q[0] = q_low;
    q[head_pieces] = q_high;
    if (page == nullptr) continue;
    rotate_channels(k_low, k_high, c, s);
    const int row_in_page = row.position % kPageTokens;
    auto* const key = reinterpret_cast<uint4*>(page + page_row_offset(view.shape, layer, KvTensor::k, head, row_in_page) + channel);
    auto* const value = reinterpret_cast<uint4*>(page + page_row_offset(view.shape, layer, KvTensor::v, head, row_in_page) + channel);
    key[0] = k_low;
    key[head_pieces] = k_high;
    value[0] = v_low;
    value[head_pieces] = v_high;
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

void rope_and_kv_append(Bfloat16* qkv, std::int64_t row_stride, const std::int32_t* positions, const Bfloat16* cosine, const Bfloat16* sine,
                        const QueryRow* rows, const KvView& view, int layer, int count, cudaStream_t stream) {
  if (view.shape.head_dim % 16 != 0) throw UnsupportedError("rope_and_kv_append: head_dim is not a multiple of 16");
  if (count == 0) return;
  rope_and_kv_append_kernel<<<count, 128, 0, stream>>>(qkv, row_stride, positions, cosine, sine, rows, view, layer);
  LOOPGAUGE_CUDA_CHECK_LAUNCH("rope_and_kv_append");
}

}  // namespace loopgauge::optimized
