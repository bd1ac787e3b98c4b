// SPDX-License-Identifier: Apache-2.0
// exp, sigmoid and silu as explicit sequences of IEEE operations (S-ELEM-1..3): evaluated in binary64, rounded to binary32 once, so each
// result is within 0.5 + 2^-20 ulp of the true value. No call into the C library, whose bits differ between versions.
#pragma once

#include <bit>
#include <cstdint>

namespace loopgauge::reference {

// e^t for |t| <= 700 with relative error below 2^-46, unrounded binary64.
[[gnu::always_inline]] inline double exp_binary64(double t) {
  constexpr double kLog2E = 1.4426950408889634;
  constexpr double kLn2High = 6.93147180369123816490e-01;  // low 21 bits zero: n * kLn2High is exact
  constexpr double kLn2Low = 1.90821492927058770002e-10;
  constexpr double kRoundToInteger = 6755399441055744.0;   // 1.5 * 2^52: adding it leaves rint(t * log2 e) in the low bits
  const double shifted = t * kLog2E + kRoundToInteger;
  const double n = shifted - kRoundToInteger;
  const double r = (t - n * kLn2High) - n * kLn2Low;       // |r| <= ln(2) / 2
  double p = 1.0 / 39916800.0;                             // Taylor polynomial of degree 11, coefficients RN(1/k!)
  p = p * r + 1.0 / 3628800.0;
  p = p * r + 1.0 / 362880.0;
  p = p * r + 1.0 / 40320.0;
  p = p * r + 1.0 / 5040.0;
  p = p * r + 1.0 / 720.0;
  p = p * r + 1.0 / 120.0;
  p = p * r + 1.0 / 24.0;
  p = p * r + 1.0 / 6.0;
  p = p * r + 0.5;
  p = p * r + 1.0;
  p = p * r + 1.0;
  const std::int64_t exponent = std::bit_cast<std::int64_t>(shifted) - std::bit_cast<std::int64_t>(kRoundToInteger);
  return p * std::bit_cast<double>((exponent + 1023) << 52);
}

[[gnu::always_inline]] inline double clamp_exp_argument(double t) { return t < -700.0 ? -700.0 : t > 700.0 ? 700.0 : t; }  // keeps NaN

[[gnu::always_inline]] inline float exp_binary32(float x) { return static_cast<float>(exp_binary64(clamp_exp_argument(x))); }

[[gnu::always_inline]] inline float sigmoid_binary32(float x) {
  return static_cast<float>(1.0 / (1.0 + exp_binary64(clamp_exp_argument(-static_cast<double>(x)))));
}

[[gnu::always_inline]] inline float silu_binary32(float x) {
  return static_cast<float>(static_cast<double>(x) / (1.0 + exp_binary64(clamp_exp_argument(-static_cast<double>(x)))));
}

}  // namespace loopgauge::reference
