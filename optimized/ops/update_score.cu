// SPDX-License-Identifier: Apache-2.0
#include "optimized/ops/update_score.cuh"

#include <string>

#include "optimized/ops/row_norm.cuh"
#include "optimized/runtime/cuda_check.hpp"

namespace loopgauge::optimized {
namespace {

template <bool kScore>
__global__ void __launch_bounds__(kRowThreads) final_norm_kernel(const Bfloat16* __restrict__ stream_rows, const Bfloat16* __restrict__ weight,
                                                                 const Bfloat16* __restrict__ previous, Bfloat16* __restrict__ output,
                                                                 float* __restrict__ scores, int hidden, float epsilon) {
  extern __shared__ __align__(16) Bfloat16 rows[];  // the row, then with a score the previous row
  Bfloat16* row = rows;
  Bfloat16* before = rows + hidden;
  const std::size_t offset = static_cast<std::size_t>(blockIdx.x) * hidden;
  load_row(stream_rows + offset, row, hidden);
  if constexpr (kScore) load_row(previous + offset, before, hidden);
  __syncthreads();
  const float inverse = inverse_rms(row, hidden, epsilon);
  for (int chunk = threadIdx.x; chunk < hidden / 8; chunk += kRowThreads) {
    union {
      uint4 vector;
      Bfloat16 values[8];
    } w, r;
    w.vector = reinterpret_cast<const uint4*>(weight)[chunk];
#pragma unroll
    for (int i = 0; i < 8; ++i) r.values[i] = normalized(row[chunk * 8 + i], inverse, w.values[i]);
    reinterpret_cast<uint4*>(output + offset)[chunk] = r.vector;
    if constexpr (kScore) reinterpret_cast<uint4*>(row)[chunk] = r.vector;
  }
  if constexpr (kScore) {
    __shared__ float change;
    __shared__ float length;
    __syncthreads();
    const int lane = threadIdx.x % 32;
    if (threadIdx.x < 64 && lane < kLanes) {
      const bool first_warp = threadIdx.x < 32;
      float sum = 0.0f;
#pragma unroll 8
      for (int i = lane; i < hidden; i += kLanes) {
        const float now = to_float(row[i]);
        const float value = first_warp ? __fsub_rn(now, to_float(before[i])) : now;
        sum = __fadd_rn(sum, __fmul_rn(value, value));
      }
      const float norm = __fsqrt_rn(reduce_lanes(sum, 0xFFFFu));
      if (lane == 0) (first_warp ? change : length) = norm;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      constexpr float kSmallestLength = 1e-12f;
      // A NaN length must reach the score: the comparison keeps it, fmaxf would not.
      scores[blockIdx.x] = __fdiv_rn(change, length < kSmallestLength ? kSmallestLength : length);
    }
  }
}

}  // namespace

void final_norm_update_score(const Bfloat16* stream_rows, const Bfloat16* weight, const Bfloat16* previous, Bfloat16* output, float* scores,
                             int rows, int hidden, float epsilon, cudaStream_t stream) {
  if (hidden <= 0 || hidden % 8 != 0 || hidden > kMaxNormWidth / 2) {
    throw UnsupportedError("final_norm_update_score: hidden = " + std::to_string(hidden) + " is not a multiple of 8 of at most " +
                           std::to_string(kMaxNormWidth / 2));
  }
  if (rows == 0) return;
  const std::size_t row_bytes = hidden * sizeof(Bfloat16);
  if (scores != nullptr) {
    final_norm_kernel<true><<<rows, kRowThreads, 2 * row_bytes, stream>>>(stream_rows, weight, previous, output, scores, hidden, epsilon);
  } else {
    final_norm_kernel<false><<<rows, kRowThreads, row_bytes, stream>>>(stream_rows, weight, previous, output, scores, hidden, epsilon);
  }
  LOOPGAUGE_CUDA_CHECK_LAUNCH("final_norm_update_score");
}

}  // namespace loopgauge::optimized
