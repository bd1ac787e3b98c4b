// SPDX-License-Identifier: Apache-2.0
// The INT4 group codec (S-KVQ-2..7, models/spec/quantize_int4_group.hpp).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>

#include "models/fault.hpp"
#include "reference/numeric/float16.hpp"

namespace loopgauge::reference {

template <class Real>
struct GroupCode {
  Real min16 = 0;     // stored minimum, an FP16 value
  Real scale16 = 0;   // stored scale, an FP16 value; 0: constant group
  bool valid = true;  // false: a value, the minimum or the scale is not finite in its format
};

// Encodes values[0], values[stride], ... (count >= 1) to codes with the same stride.
//   min, max exact; scale = (max - min) / 15, IEEE; code = clamp(rne((x - min) / scale), 0, 15) with the unrounded min and scale;
//   stored min and scale are FP16. max == min or fp16(scale) == 0: code 0, scale 0.
// `fault` may be scale_by_reciprocal or codes_from_stored_parameters.
template <class Real>
GroupCode<Real> encode_group(const Real* values, std::ptrdiff_t stride, int count, std::uint8_t* codes, Fault fault = Fault::none) {
  Real min = values[0], max = values[0];
  bool finite = true;
  for (int i = 0; i < count; ++i) {
    const Real x = values[i * stride];
    finite = finite && std::isfinite(x);
    min = std::min(min, x);
    max = std::max(max, x);
  }
  // -0 becomes +0: which of the two std::min and std::max keep depends on the order of the values (S-KVQ-6). Else -0 - 0 would be a scale of -0.
  min += Real{0};
  max += Real{0};
  const Real scale = fault == Fault::scale_by_reciprocal ? (max - min) * (Real{1} / Real{15}) : (max - min) / Real{15};
  GroupCode<Real> group{static_cast<Real>(round_to_float16(min)), static_cast<Real>(round_to_float16(scale)), true};
  group.valid = finite && std::isfinite(group.min16) && std::isfinite(group.scale16);
  if (!group.valid) return group;
  const bool stored = fault == Fault::codes_from_stored_parameters;
  const Real low = stored ? group.min16 : min, step = stored ? group.scale16 : scale;
  for (int i = 0; i < count; ++i) {
    const Real code = group.scale16 == 0 ? Real{0} : std::rint((values[i * stride] - low) / step);
    codes[i * stride] = static_cast<std::uint8_t>(std::clamp(code, Real{0}, Real{15}));
  }
  return group;
}

// The code of a value under stored parameters (S-SPEC-9). Not of a value that is not finite.
template <class Real>
std::uint8_t encode_stored(Real x, Real min16, Real scale16) {
  const Real code = scale16 == 0 ? Real{0} : std::rint((x - min16) / scale16);
  return static_cast<std::uint8_t>(std::clamp(code, Real{0}, Real{15}));
}

// fp32(code) * scale16 + min16. The product of a 4-bit code and an FP16 value is exact, so fusing the addition gives the same bits.
template <class Real>
Real decode_value(std::uint8_t code, Real min16, Real scale16) {
  return static_cast<Real>(code) * scale16 + min16;
}

}  // namespace loopgauge::reference
