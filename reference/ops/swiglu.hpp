// SPDX-License-Identifier: Apache-2.0
// swiglu: y = bf16(bf16(silu(gate)) * up) (S-MLP-1, models/spec/swiglu.hpp).
#pragma once

#include "reference/numeric/profile.hpp"
#include "reference/ops/matrix.hpp"

namespace loopgauge::reference {

// gate, up [rows, intermediate] -> y like gate, resized; y may be gate or up.
template <class P>
void swiglu(const Matrix<typename P::Real>& gate, const Matrix<typename P::Real>& up, Matrix<typename P::Real>& y);

}  // namespace loopgauge::reference
