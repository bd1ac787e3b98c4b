// SPDX-License-Identifier: Apache-2.0
// Numbers with an error bound: what any executor that follows the rounding points may hold, whatever its order of additions.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

namespace loopgauge::harness {

inline constexpr double kFloatUnit = 0x1p-24;      // unit roundoff of FP32
inline constexpr double kBfloat16Unit = 0x1p-8;    // of BF16
inline constexpr double kHalfUnit = 0x1p-11;       // of FP16
inline constexpr double kHalfSubnormal = 0x1p-25;  // half the spacing of FP16 subnormals

// Bound of n accumulated FP32 roundings in any order, relative to the sum of magnitudes: n u' / (1 - n u'), with u' = 2 u because tensor
// cores truncate aligned partial sums.
inline double sum_bound(double n) {
  const double nu = n * 2 * kFloatUnit;
  return nu / (1 - nu);
}

inline float bfloat16_from_bits(std::uint16_t bits) { return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16); }

// Round to FP32, then to BF16, each to nearest even: two roundings, as bf16() of an FP32 operation is. Monotone.
inline double round_to_bfloat16(double value) {
  const auto bits = std::bit_cast<std::uint32_t>(static_cast<float>(value));
  if (!std::isfinite(value)) return value;
  const std::uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  return static_cast<double>(std::bit_cast<float>(rounded & 0xffff0000u));
}

inline bool is_float16(float value) {
  if (value == 0.0f) return true;
  if (!(std::fabs(value) <= 65504.0f)) return false;
  int exponent = 0;
  std::frexp(value, &exponent);  // |value| in [2^(exponent-1), 2^exponent)
  const int least_bit = std::max(exponent - 11, -24);
  const double scaled = std::ldexp(static_cast<double>(value), -least_bit);
  return scaled == std::nearbyint(scaled);
}

struct Bounded {
  double value = 0.0;
  double error = 0.0;  // |what an executor holds - value| <= error
};

// The BF16 rounding of a number known to `error`: exact unless a rounding boundary lies within reach.
inline Bounded round_to_bfloat16(const Bounded& x) {
  const double rounded = round_to_bfloat16(x.value);
  if (x.error == 0.0) return {rounded, 0.0};
  const double low = round_to_bfloat16(x.value - x.error);
  const double high = round_to_bfloat16(x.value + x.error);
  return {rounded, std::max(high - rounded, rounded - low)};
}

}  // namespace loopgauge::harness
