// SPDX-License-Identifier: Apache-2.0
// Rounding to IEEE binary16, for the codec's stored parameters.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

namespace loopgauge::reference {

// The binary16 value nearest to x, ties to even, subnormals kept; |x| >= 65520 gives infinity (S-NUM-2). Every step is exact but the
// one rint, so the argument may be a float (widened exactly) or a double without double rounding.
inline double round_to_float16(double x) {
  if (!std::isfinite(x) || x == 0.0) return x;
  constexpr int kMinExponent = -14, kFractionBits = 10;
  const int exponent = std::ilogb(x) < kMinExponent ? kMinExponent : std::ilogb(x);
  const double quantum = std::ldexp(1.0, exponent - kFractionBits);  // spacing of binary16 values around x
  const double rounded = std::rint(x / quantum) * quantum;
  return std::fabs(rounded) > 65504.0 ? std::copysign(std::numeric_limits<double>::infinity(), x) : rounded;
}

// The 16 bits of a value that FP16 holds exactly, and the value of 16 bits. Neither NaN nor an infinity is among them.
inline std::uint16_t float16_bits(double x) {
  const std::uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  const double magnitude = std::fabs(x);
  if (magnitude == 0) return sign;
  const int exponent = std::max(std::ilogb(magnitude), -14);  // subnormals share the least exponent
  const auto fraction = static_cast<int>(std::ldexp(magnitude, 10 - exponent));  // 1024..2047, below for subnormals
  return static_cast<std::uint16_t>(sign + ((exponent + 14) << 10) + fraction);
}
inline float float16_value(std::uint16_t bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const float magnitude = exponent == 0 ? std::ldexp(static_cast<float>(fraction), -24) : std::ldexp(static_cast<float>(fraction + 1024), exponent - 25);
  return (bits & 0x8000) != 0 ? -magnitude : magnitude;
}

}  // namespace loopgauge::reference
