// SPDX-License-Identifier: Apache-2.0
// Rounding to IEEE binary16, for the codec's stored parameters.
#pragma once

#include <cmath>
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

}  // namespace loopgauge::reference
