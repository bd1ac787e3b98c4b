// SPDX-License-Identifier: Apache-2.0
// linear: y[t, o] = bf16(dot(x[t, :], weight[o, :])), or FP32 for the head (S-LIN-1, models/spec/linear.hpp).
#pragma once

#include "reference/numeric/profile.hpp"
#include "reference/ops/matrix.hpp"

namespace loopgauge::reference {

enum class OutputRounding { bf16, fp32 };

// x [rows, in], weight [out, in] BF16 bit patterns -> y [rows, out], resized. Any row count, 0 included.
template <class P>
void linear(const Matrix<typename P::Real>& x, const WeightArgument& weight, OutputRounding rounding, Matrix<typename P::Real>& y);

}  // namespace loopgauge::reference
