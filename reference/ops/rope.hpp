// SPDX-License-Identifier: Apache-2.0
// rope: rotary position embedding, half rotation (S-ROPE-1..3, models/spec/rope.hpp).
#pragma once

#include <span>

#include "reference/numeric/profile.hpp"
#include "reference/ops/matrix.hpp"

namespace loopgauge::reference {

// cos and sin of position * theta^(-2 i / head_dim), [positions, head_dim / 2]. The one use of the C library's pow, cos and sin in the
// reference; a digest of the table is checked by a test. FP32 profiles: inv_freq = RN32(pow), angle = RN32(position * inv_freq), cos and
// sin evaluated in binary64, RN32, bf16. `bfloat16_frequency`: inv_freq is rounded once more (Fault::rope_frequency_in_bfloat16).
template <class P>
struct RopeTable {
  Matrix<typename P::Real> cos, sin;
  RopeTable(int positions, int head_dim, double theta, bool bfloat16_frequency = false);
};

// Rotates x [rows, heads * head_dim] in place; row t stands at positions[t]. Per element: bf16(x cos), bf16(rot(x) sin), bf16(sum).
template <class P>
void rope(Matrix<typename P::Real>& x, std::span<const int> positions, int head_dim, const RopeTable<P>& table);

}  // namespace loopgauge::reference
