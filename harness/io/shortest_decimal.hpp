// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <charconv>

namespace loopgauge::harness {

// The double whose shortest spelling is the shortest decimal that reads back as `value`: prints as 1e-06, not 9.99999997e-07.
inline double shortest_decimal(float value) {
  std::array<char, 32> text{};
  const auto written = std::to_chars(text.data(), text.data() + text.size(), value);
  double result = value;
  std::from_chars(text.data(), written.ptr, result);
  return result;
}

}  // namespace loopgauge::harness
