// SPDX-License-Identifier: Apache-2.0
// Block-wide pieces of the operations that normalise one row a block (rms_norm, update_score).
#pragma once

#include <cstdint>

#include "optimized/ops/numeric.cuh"
#include "optimized/ops/tensor_core.cuh"

namespace loopgauge::optimized {

inline constexpr int kRowThreads = 128;
inline constexpr int kMaxNormWidth = 16384;  // bounds the shared-memory copy of a row: 32 KiB

#ifdef __CUDACC__

// Copies one row of `width` BF16 values, width % 8 == 0, in 16-byte pieces. The caller synchronises.
__device__ __forceinline__ void load_row(const Bfloat16* __restrict__ source, Bfloat16* row, int width) {
  for (int i = threadIdx.x; i < width / 8; i += kRowThreads) {
    reinterpret_cast<uint4*>(row)[i] = reinterpret_cast<const uint4*>(source)[i];
  }
}

// 1 / sqrt(mean of squares + epsilon) in the declared order, from the sum of squares.
__device__ __forceinline__ float inverse_root_mean_square(float sum_of_squares, int width, float epsilon) {
  // Times a power of two is the same rounded quotient, sooner.
  const float mean = (width & (width - 1)) == 0 ? __fmul_rn(sum_of_squares, 1.0f / static_cast<float>(width)) : __fdiv_rn(sum_of_squares, static_cast<float>(width));
  return __frcp_rn(__fsqrt_rn(__fadd_rn(mean, epsilon)));
}

// The same of a row, for all threads of the block. `row` is complete and synchronised.
__device__ __forceinline__ float inverse_rms(const Bfloat16* row, int width, float epsilon) {
  __shared__ float inverse;
  if (threadIdx.x < kLanes) {
    // A square is exact in FP32, so that one rounding is that of the addition. (Squares below FP32's range do not reach the sum with an
    // epsilon of 2^-100 or more; with the smallest that a model may have, 2^-126, seven rows of 200,000 that were made to find out differed in a bit.)
    // Words of two values, since a 16-bit load is followed by moves that wait for it.
    const auto* const pairs = reinterpret_cast<const std::uint32_t*>(row) + threadIdx.x / 2;
    const std::uint32_t half = threadIdx.x % 2 == 0 ? 0x1044u : 0x3244u;  // to the upper half of a word
    const auto add = [&](float sum, int step) {
      const float value = __uint_as_float(__byte_perm(pairs[step * (kLanes / 2)], 0, half));
      return __fmaf_rn(value, value, sum);
    };
    const int steps = width / kLanes;
    float sum = 0.0f;
#pragma unroll 16
    for (int step = 0; step < steps; ++step) sum = add(sum, step);
    if (threadIdx.x < width % kLanes) sum = add(sum, steps);
    sum = reduce_lanes(sum, 0xFFFFu);
    if (threadIdx.x == 0) inverse = inverse_root_mean_square(sum, width, epsilon);
  }
  __syncthreads();
  return inverse;
}

__device__ __forceinline__ Bfloat16 normalized(Bfloat16 value, float inverse, Bfloat16 weight) {
  return to_bfloat16(__fmul_rn(to_float(weight), to_float(to_bfloat16(__fmul_rn(to_float(value), inverse)))));
}
// The same of a word of two: conversions by pairs run at four times the rate.
__device__ __forceinline__ std::uint32_t normalized_pair(std::uint32_t values, float inverse, std::uint32_t weights) {
  const std::uint32_t scaled = pack_bf16(__fmul_rn(low_value(values), inverse), __fmul_rn(high_value(values), inverse));
  return pack_bf16(__fmul_rn(low_value(weights), low_value(scaled)), __fmul_rn(high_value(weights), high_value(scaled)));
}
// Of two words, the sums of their values (S-RES-1).
__device__ __forceinline__ std::uint32_t added_pair(std::uint32_t a, std::uint32_t b) {
  return pack_bf16(__fadd_rn(low_value(a), low_value(b)), __fadd_rn(high_value(a), high_value(b)));
}

#endif  // __CUDACC__

}  // namespace loopgauge::optimized
