// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string_view>

namespace loopgauge {

// How the reference rounds and sums (SPEC.md, "Profiles").
enum class Profile {
  declared,    // the bit-explicit contract
  reordered,   // the same rounding points, a second declared order of additions: the yardstick for other executors
  double_precision,  // no rounding but the codec's FP16 parameters: the noise floor. Spelled "double" in files and flags
};
std::string_view to_string(Profile profile);
Profile parse_profile(std::string_view text);  // throws ConfigError listing the words

}  // namespace loopgauge
