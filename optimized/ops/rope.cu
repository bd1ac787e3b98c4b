// SPDX-License-Identifier: Apache-2.0
#include "optimized/ops/rope.cuh"

#include <bit>
#include <cmath>

#include "optimized/runtime/cuda_check.hpp"

namespace loopgauge::optimized {
namespace {

std::uint16_t bfloat16_bits(float value) {  // round to nearest even; the table holds no NaN
  const auto bits = std::bit_cast<std::uint32_t>(value);
  return static_cast<std::uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

__global__ void rope_kernel(Bfloat16* values, std::int64_t row_stride, const std::int32_t* __restrict__ positions,
                            const Bfloat16* __restrict__ cosine, const Bfloat16* __restrict__ sine, int heads, int half) {
  Bfloat16* const row = values + blockIdx.x * row_stride;
  const std::int64_t table = static_cast<std::int64_t>(positions[blockIdx.x]) * half;
  const int head_pieces = half / 8;
  for (int i = threadIdx.x; i < heads * head_pieces; i += blockDim.x) {
    const int channel = i % head_pieces * 8;
    auto* const low = reinterpret_cast<uint4*>(row + i / head_pieces * 2 * half + channel);
    auto* const high = low + head_pieces;
    rotate_channels(*low, *high, *reinterpret_cast<const uint4*>(cosine + table + channel), *reinterpret_cast<const uint4*>(sine + table + channel));
  }
}

}  // namespace

RopeTable make_rope_table(int positions, int head_dim, double theta) {
  const int half = head_dim / 2;
  std::vector<float> inverse_frequency(half);
  for (int i = 0; i < half; ++i) inverse_frequency[i] = static_cast<float>(std::pow(theta, -2.0 * i / head_dim));
  RopeTable table;
  table.cosine.reserve(static_cast<std::size_t>(positions) * half);
  table.sine.reserve(static_cast<std::size_t>(positions) * half);
  for (int position = 0; position < positions; ++position) {
    for (int i = 0; i < half; ++i) {
      const float angle = static_cast<float>(position) * inverse_frequency[i];
      table.cosine.push_back(bfloat16_bits(static_cast<float>(std::cos(static_cast<double>(angle)))));
      table.sine.push_back(bfloat16_bits(static_cast<float>(std::sin(static_cast<double>(angle)))));
    }
  }
  return table;
}

void rope(Bfloat16* values, std::int64_t row_stride, const std::int32_t* positions, const Bfloat16* cosine, const Bfloat16* sine, int rows,
          int heads, int head_dim, cudaStream_t stream) {
  if (head_dim % 16 != 0) throw UnsupportedError("rope: head_dim is not a multiple of 16");
  if (rows == 0) return;
  rope_kernel<<<rows, 128, 0, stream>>>(values, row_stride, positions, cosine, sine, heads, head_dim / 2);
  LOOPGAUGE_CUDA_CHECK_LAUNCH("rope");
}

}  // namespace loopgauge::optimized
