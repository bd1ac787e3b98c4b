// SPDX-License-Identifier: Apache-2.0
// embedding: y[t, :] = weight[token[t], :], a copy (S-EMB-1, models/spec/embedding.hpp).
#pragma once

#include <cstdint>
#include <span>

#include "reference/numeric/bfloat16.hpp"
#include "reference/ops/matrix.hpp"

namespace loopgauge::reference {

// weight [vocab, hidden] BF16 bit patterns -> y [tokens, hidden], resized. Tokens are valid ids: traces are validated before a run.
template <class Real>
void embedding(std::span<const std::int32_t> tokens, const WeightArgument& weight, Matrix<Real>& y) {
  y.resize(static_cast<std::ptrdiff_t>(tokens.size()), weight.cols());
  for (std::size_t t = 0; t < tokens.size(); ++t) {
    for (std::ptrdiff_t i = 0; i < weight.cols(); ++i) y(static_cast<std::ptrdiff_t>(t), i) = bfloat16_to_float(weight(tokens[t], i));
  }
}

}  // namespace loopgauge::reference
