// SPDX-License-Identifier: Apache-2.0
// Device arithmetic that several operations share: bfloat16 conversions, the 16-lane reduction and the explicit exponential.
// Compiled with floating-point contraction off; every rounding is written.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace loopgauge::optimized {

using Bfloat16 = __nv_bfloat16;

inline constexpr int kLanes = 16;  // lanes of the declared summation order: element i goes to lane i mod 16

#ifdef __CUDACC__

__device__ __forceinline__ float to_float(Bfloat16 value) { return __bfloat162float(value); }
__device__ __forceinline__ Bfloat16 to_bfloat16(float value) { return __float2bfloat16_rn(value); }
// The two BF16 values of a word.
__device__ __forceinline__ float low_value(std::uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_value(std::uint32_t pair) { return __uint_as_float(pair & 0xFFFF0000u); }
// The eight of 16 bytes.
__device__ __forceinline__ void widen_eight(uint4 vector, float* values) {
  const std::uint32_t pairs[4] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    values[2 * i] = low_value(pairs[i]);
    values[2 * i + 1] = high_value(pairs[i]);
  }
}

// Unsigned order of the keys is numeric order of the values; -0 and +0 share a key (S-TSEL-4, S-SDA-2).
__device__ __forceinline__ std::uint32_t ordered_key(float value) {
  const std::uint32_t bits = value == 0.0f ? 0u : __float_as_uint(value);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The halving tree 8, 4, 2, 1 over 16 consecutive threads of a warp; every one of them gets the sum. FP32 addition commutes, so the
// exchange pattern adds the same pairs as "lane j += lane j + width".
__device__ __forceinline__ float reduce_lanes(float lane_sum, unsigned mask) {
#pragma unroll
  for (int width = kLanes / 2; width > 0; width /= 2) lane_sum = __fadd_rn(lane_sum, __shfl_xor_sync(mask, lane_sum, width));
  return lane_sum;
}

#endif  // __CUDACC__

}  // namespace loopgauge::optimized
