// SPDX-License-Identifier: Apache-2.0
// Distance between two floating-point numbers, counted in representable values between them.
#pragma once

#include <cstdint>
#include <limits>

namespace loopgauge::harness {

// The format whose spacing is the unit. BF16 tensors live in float32 containers in records and dumps; one BF16 ulp is 2^16 FP32 ulps.
enum class UlpFormat { float32, bfloat16 };

// Distance where at least one side is NaN and not both are, or where an infinity meets a finite number.
inline constexpr std::uint64_t kNoUlpDistance = std::numeric_limits<std::uint64_t>::max();

// Number of steps on the ordered line of finite float32 values (-0 and +0 are one point, so the line has no double step at zero).
// Two NaNs and two equal infinities have distance 0. With UlpFormat::bfloat16 the FP32 steps are divided by 2^16 and rounded up, so a
// pair that is not exactly representable in BF16 never reads as closer than it is.
std::uint64_t ulp_distance(float a, float b, UlpFormat format = UlpFormat::float32);

}  // namespace loopgauge::harness
