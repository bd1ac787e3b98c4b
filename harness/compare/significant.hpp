// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdio>
#include <string>

namespace loopgauge::harness {

// `value` in decimal with `digits` significant digits, trailing zeros left out: "0.0123", "1.5e-09", "nan".
inline std::string significant(double value, int digits) {
  char text[40];
  std::snprintf(text, sizeof text, "%.*g", digits, value);
  return text;
}

}  // namespace loopgauge::harness
