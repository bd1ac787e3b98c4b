// SPDX-License-Identifier: Apache-2.0
// head_argmax: the highest logit, ties to the lowest id (S-HEAD-2, models/spec/head_argmax.hpp).
#pragma once

#include <span>

namespace loopgauge::reference {

// logits [vocab], all finite, vocab >= 1.
template <class Real>
int argmax(std::span<const Real> logits) {
  std::size_t best = 0;
  for (std::size_t i = 1; i < logits.size(); ++i) {
    if (logits[i] > logits[best]) best = i;
  }
  return static_cast<int>(best);
}

}  // namespace loopgauge::reference
