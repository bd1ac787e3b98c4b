// SPDX-License-Identifier: Apache-2.0
// residual_add: y = bf16(a + b) (S-RES-1, models/spec/residual_add.hpp).
#pragma once

#include "reference/numeric/profile.hpp"
#include "reference/ops/matrix.hpp"

namespace loopgauge::reference {

// a, b of equal shape -> y like a, resized; y may be a or b.
template <class P>
void residual_add(const Matrix<typename P::Real>& a, const Matrix<typename P::Real>& b, Matrix<typename P::Real>& y) {
  y.resize(a.rows(), a.cols());
  for (std::ptrdiff_t i = 0; i < a.size(); ++i) y.data()[i] = P::round_bf16(a.data()[i] + b.data()[i]);
}

}  // namespace loopgauge::reference
