// SPDX-License-Identifier: Apache-2.0
// X_hat, bit for bit as the specification defines it: streams ascending, each dec() = code * scale + minimum with every step rounded.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "optimized/kv/kv_layout.hpp"

namespace loopgauge::optimized {

#ifdef __CUDACC__

// Of a group, as its word of parameters stores them.
__device__ __forceinline__ float2 minimum_and_scale(std::uint32_t parameters) {
  return __half22float2(*reinterpret_cast<const __half2*>(&parameters));
}

// One value of stream `stream`; `compact` is the row in the stream.
__device__ __forceinline__ float decode_value(const KvShape& shape, const StreamTile& tile, KvTensor tensor, int compact, int channel) {
  const std::uint8_t byte = tile.payload[static_cast<std::size_t>(compact) * (shape.head_dim / 2) + channel / 2];
  const auto code = static_cast<float>(channel % 2 == 0 ? byte & 0xFu : byte >> 4);
  const std::uint32_t word =
      tensor == KvTensor::k ? tile.parameters[static_cast<std::size_t>(compact / kGroupSize) * shape.head_dim + channel]
                            : tile.parameters[static_cast<std::size_t>(compact) * (shape.head_dim / kGroupSize) + channel / kGroupSize];
  const float2 group = minimum_and_scale(word);
  return __fadd_rn(__fmul_rn(code, group.y), group.x);
}

// X_hat[loop] of one value. Loads are ordinary (not read-only cached): the encoder reads what its own CTA wrote.
__device__ __forceinline__ float reconstruct(const KvShape& shape, const PageTableEntry& entry, const ActivityMap& map, int layer, int loop,
                                             KvTensor tensor, int head, int row_in_page, int channel) {
  float value = 0.0f;
  for (int stream = 1; stream <= loop; ++stream) {
    if (!((map.active[stream - 1] >> row_in_page) & 1u)) continue;
    const StreamTile tile = stream_tile(shape, entry, map, layer, stream, tensor, head);
    const int compact = static_cast<int>(map.rank[stream - 1]) + bits_below(map.active[stream - 1], row_in_page);
    const float decoded = decode_value(shape, tile, tensor, compact, channel);
    value = stream == 1 ? decoded : __fadd_rn(value, decoded);
  }
  return value;
}

#endif  // __CUDACC__

}  // namespace loopgauge::optimized
