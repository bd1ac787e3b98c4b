// SPDX-License-Identifier: Apache-2.0
// Checks of numeric options, for CLI11's `check`. Its own ranges of floating point let NaN through, and a whole number that does not fit 64
// bits is clamped without a word.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <limits>

namespace loopgauge::harness {

// A whole number within least..most, decimal digits without leading zeros.
CLI::Validator whole_number(std::uint64_t least = 0, std::uint64_t most = std::numeric_limits<std::uint64_t>::max());
// A finite number within least..most.
CLI::Validator real_number(double least, double most);

}  // namespace loopgauge::harness
