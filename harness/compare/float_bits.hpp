// SPDX-License-Identifier: Apache-2.0
// Questions about the bits of a float32.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace loopgauge::harness {

// The same bits; two NaNs are the same whatever their payload, -0 and +0 are not.
inline bool same_float(float a, float b) {
  return std::bit_cast<std::uint32_t>(a) == std::bit_cast<std::uint32_t>(b) || (std::isnan(a) && std::isnan(b));
}

// A BF16 number in a float32 container.
inline bool is_bfloat16(float value) { return (std::bit_cast<std::uint32_t>(value) & 0xffffu) == 0; }

}  // namespace loopgauge::harness
