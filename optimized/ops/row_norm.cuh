// SPDX-License-Identifier: Apache-2.0
// Block-wide pieces of the operations that normalise one row a block (rms_norm, update_score).
#pragma once

#include "optimized/ops/numeric.cuh"

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
  return __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(mean, epsilon)));
}

// The same of a row, for all threads of the block. `row` is complete and synchronised.
__device__ __forceinline__ float inverse_rms(const Bfloat16* row, int width, float epsilon) {
  __shared__ float inverse;
  if (threadIdx.x < kLanes) {
    float sum = 0.0f;
#pragma unroll 8
    for (int i = threadIdx.x; i < width; i += kLanes) {
      const float value = to_float(row[i]);
      sum = __fadd_rn(sum, __fmul_rn(value, value));
    }
    sum = reduce_lanes(sum, 0xFFFFu);
    if (threadIdx.x == 0) inverse = inverse_root_mean_square(sum, width, epsilon);
  }
  __syncthreads();
  return inverse;
}

__device__ __forceinline__ Bfloat16 normalized(Bfloat16 value, float inverse, Bfloat16 weight) {
  return to_bfloat16(__fmul_rn(to_float(weight), to_float(to_bfloat16(__fmul_rn(to_float(value), inverse)))));
}

#endif  // __CUDACC__

}  // namespace loopgauge::optimized
