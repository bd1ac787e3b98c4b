// SPDX-License-Identifier: Apache-2.0
// exit_gate and exit_step: the early-exit hazard (S-EXIT-1..4, models/spec/exit_gate.hpp).
#pragma once

#include "models/algorithm_config.hpp"
#include "reference/numeric/profile.hpp"

namespace loopgauge::reference {

// FP32 dot(hidden, weight) + bias, before the sigmoid. hidden, weight [n].
template <class P>
typename P::Real exit_gate(const typename P::Real* hidden, const typename P::Real* weight, typename P::Real bias, int n) {
  return dot<P>(hidden, weight, n) + bias;
}

// Accumulates the survival s *= 1 - sigmoid(gate) over the loops of one token and tells when the rule fires.
template <class P>
class ExitHazard {
 public:
  // Takes the gate of loop r (1, 2, ... in order). True when r >= min_loops, 1 - s >= threshold and threshold < 1.
  bool fires(const ExitRule& rule, int loop, typename P::Real gate) {
    survival_ = survival_ * (1 - P::sigmoid(gate));
    return loop >= rule.min_loops && rule.threshold < 1.0f && 1 - survival_ >= rule.threshold;
  }

  // What a snapshot keeps of it.
  typename P::Real survival() const { return survival_; }
  static ExitHazard with_survival(typename P::Real survival) {
    ExitHazard hazard;
    hazard.survival_ = survival;
    return hazard;
  }

 private:
  typename P::Real survival_ = 1;
};

}  // namespace loopgauge::reference
