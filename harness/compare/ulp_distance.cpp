// SPDX-License-Identifier: Apache-2.0
#include "harness/compare/ulp_distance.hpp"

#include <bit>
#include <cmath>

namespace loopgauge::harness {
namespace {

// Position on the ordered line of float32 values: sign-magnitude to two's complement, so that both zeros are 0.
std::int64_t line_position(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const auto magnitude = static_cast<std::int64_t>(bits & 0x7fffffffu);
  return bits >> 31 != 0 ? -magnitude : magnitude;
}

}  // namespace

std::uint64_t ulp_distance(float a, float b, UlpFormat format) {
  if (std::isnan(a) || std::isnan(b)) return std::isnan(a) && std::isnan(b) ? 0 : kNoUlpDistance;
  if (std::isinf(a) || std::isinf(b)) return a == b ? 0 : kNoUlpDistance;
  const std::int64_t steps = line_position(a) - line_position(b);
  const auto distance = static_cast<std::uint64_t>(steps < 0 ? -steps : steps);
  return format == UlpFormat::float32 ? distance : (distance + 0xffff) >> 16;
}

}  // namespace loopgauge::harness
