// SPDX-License-Identifier: Apache-2.0
// exp, sigmoid and silu as explicit sequences of IEEE operations in binary64, rounded to binary32 once: the same bits as the
// specification's sequence on any device. Contraction must be off.
#pragma once

#include <cstdint>

namespace loopgauge::optimized {

#ifdef __CUDACC__

// e^t for |t| <= 700, unrounded binary64.
__device__ __forceinline__ double exp_binary64(double t) {
  constexpr double kLog2E = 1.4426950408889634;
  constexpr double kLn2High = 6.93147180369123816490e-01;
  constexpr double kLn2Low = 1.90821492927058770002e-10;
  constexpr double kRoundToInteger = 6755399441055744.0;  // 1.5 * 2^52
  const double shifted = __dadd_rn(__dmul_rn(t, kLog2E), kRoundToInteger);
  const double n = __dsub_rn(shifted, kRoundToInteger);
  const double r = __dsub_rn(__dsub_rn(t, __dmul_rn(n, kLn2High)), __dmul_rn(n, kLn2Low));
  double p = 1.0 / 39916800.0;
  const double coefficients[] = {1.0 / 3628800.0, 1.0 / 362880.0, 1.0 / 40320.0, 1.0 / 5040.0, 1.0 / 720.0, 1.0 / 120.0,
                                 1.0 / 24.0,      1.0 / 6.0,      0.5,           1.0,          1.0};
#pragma unroll
  for (double coefficient : coefficients) p = __dadd_rn(__dmul_rn(p, r), coefficient);
  const long long exponent = __double_as_longlong(shifted) - __double_as_longlong(kRoundToInteger);
  return __dmul_rn(p, __longlong_as_double((exponent + 1023) << 52));
}

__device__ __forceinline__ double clamp_exp_argument(double t) { return t < -700.0 ? -700.0 : t > 700.0 ? 700.0 : t; }  // keeps NaN

__device__ __forceinline__ float exp_binary32(float x) { return __double2float_rn(exp_binary64(clamp_exp_argument(x))); }

__device__ __forceinline__ float sigmoid_binary32(float x) {
  return __double2float_rn(__ddiv_rn(1.0, __dadd_rn(1.0, exp_binary64(clamp_exp_argument(-static_cast<double>(x))))));
}

__device__ __forceinline__ float silu_binary32(float x) {
  return __double2float_rn(__ddiv_rn(static_cast<double>(x), __dadd_rn(1.0, exp_binary64(clamp_exp_argument(-static_cast<double>(x))))));
}

#endif  // __CUDACC__

}  // namespace loopgauge::optimized
