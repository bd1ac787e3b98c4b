// SPDX-License-Identifier: Apache-2.0
// rms_norm: y = bf16(weight * bf16(x * inv)), inv = 1 / sqrt(dot(x, x) / n + eps) (S-RMS-1, models/spec/rms_norm.hpp).
#pragma once

#include "reference/numeric/profile.hpp"
#include "reference/ops/matrix.hpp"

namespace loopgauge::reference {

// x [rows, hidden], weight [hidden] -> y [rows, hidden], resized; y may be x. IEEE square root and divisions.
template <class P>
void rms_norm(const Matrix<typename P::Real>& x, const Vector<typename P::Real>& weight, float eps, Matrix<typename P::Real>& y);

}  // namespace loopgauge::reference
