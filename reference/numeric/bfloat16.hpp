// SPDX-License-Identifier: Apache-2.0
// bfloat16 <-> binary32. A bfloat16 is the upper half of a binary32, so widening is exact and narrowing is one rounding.
#pragma once

#include <bit>
#include <cstdint>

namespace loopgauge::reference {

inline float bfloat16_to_float(std::uint16_t bits) { return std::bit_cast<float>(std::uint32_t{bits} << 16); }

// Round to nearest, ties to even (S-NUM-1). Overflow goes to infinity, a NaN stays a NaN.
inline float round_to_bfloat16(float x) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(x);
  const std::uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);  // carries into the exponent exactly when it should
  const std::uint32_t result = x != x ? bits | 0x00400000u : rounded;
  return std::bit_cast<float>(result & 0xffff0000u);
}

}  // namespace loopgauge::reference
