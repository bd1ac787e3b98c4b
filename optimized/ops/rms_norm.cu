// SPDX-License-Identifier: Apache-2.0
#include "optimized/ops/rms_norm.cuh"

#include <string>

#include "optimized/ops/row_norm.cuh"
#include "optimized/runtime/cuda_check.hpp"

namespace loopgauge::optimized {
namespace {

template <bool kAddToResidual>
__global__ void __launch_bounds__(kRowThreads) rms_norm_kernel(const Bfloat16* input, const Bfloat16* __restrict__ weight,
                                                               Bfloat16* output, int hidden, float epsilon) {
  extern __shared__ __align__(16) Bfloat16 row[];
  const std::size_t offset = static_cast<std::size_t>(blockIdx.x) * hidden;
  load_row(input + offset, row, hidden);
  __syncthreads();
  const float inverse = inverse_rms(row, hidden, epsilon);
  for (int chunk = threadIdx.x; chunk < hidden / 8; chunk += kRowThreads) {
    union {
      uint4 vector;
      Bfloat16 values[8];
    } w, r;
    w.vector = reinterpret_cast<const uint4*>(weight)[chunk];
    if constexpr (kAddToResidual) r.vector = reinterpret_cast<const uint4*>(output + offset)[chunk];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const Bfloat16 value = normalized(row[chunk * 8 + i], inverse, w.values[i]);
      r.values[i] = kAddToResidual ? to_bfloat16(__fadd_rn(to_float(r.values[i]), to_float(value))) : value;
    }
    reinterpret_cast<uint4*>(output + offset)[chunk] = r.vector;
  }
}

void require_width(int hidden) {
  if (hidden <= 0 || hidden % 8 != 0 || hidden > kMaxNormWidth) {
    throw UnsupportedError("rms_norm: hidden = " + std::to_string(hidden) + " is not a multiple of 8 of at most " + std::to_string(kMaxNormWidth));
  }
}

}  // namespace

void rms_norm(const Bfloat16* input, const Bfloat16* weight, Bfloat16* output, int rows, int hidden, float epsilon, cudaStream_t stream) {
  require_width(hidden);
  if (rows == 0) return;
  rms_norm_kernel<false><<<rows, kRowThreads, hidden * sizeof(Bfloat16), stream>>>(input, weight, output, hidden, epsilon);
  LOOPGAUGE_CUDA_CHECK_LAUNCH("rms_norm");
}

void rms_norm_residual_add(const Bfloat16* input, const Bfloat16* weight, Bfloat16* residual, int rows, int hidden, float epsilon,
                           cudaStream_t stream) {
  require_width(hidden);
  if (rows == 0) return;
  rms_norm_kernel<true><<<rows, kRowThreads, hidden * sizeof(Bfloat16), stream>>>(input, weight, residual, hidden, epsilon);
  LOOPGAUGE_CUDA_CHECK_LAUNCH("rms_norm_residual_add");
}

}  // namespace loopgauge::optimized
