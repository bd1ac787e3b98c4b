// SPDX-License-Identifier: Apache-2.0
// The token that a row's logits choose: greedily or drawn (S-HEAD-2, S-SAMP-1..3), and what they say of a candidate (S-SPEC-3, S-SAMP-4).
#pragma once

#include <span>
#include <vector>

#include "models/sampling.hpp"
#include "models/trace.hpp"
#include "reference/ops/head_argmax.hpp"
#include "reference/ops/sampling.hpp"

namespace loopgauge::reference {

// A token, and where it was drawn, the distribution it was drawn from.
template <class Real>
struct Choice {
  std::int32_t token = 0;
  std::vector<Real> distribution = {};
};

template <class Real>
Real draw_of(const TraceRequest& request, int position, SamplingPurpose purpose) {
  return static_cast<Real>(uniform_draw(request.seed, request.id, position, purpose));
}

// For `position`; `purpose` is target or draft. Logits are finite.
template <class P>
Choice<typename P::Real> choose_token(const TraceRequest& request, int position, std::span<const typename P::Real> logits,
                                      SamplingPurpose purpose = SamplingPurpose::target) {
  using Real = typename P::Real;
  if (request.temperature == 0.0f) return {argmax(logits)};
  std::vector<Real> p = token_distribution<P>(logits, request.temperature);
  const std::int32_t token = inverse_cdf<Real>(p, draw_of<Real>(request, position, purpose));
  return {token, std::move(p)};
}

struct Verdict {
  std::int32_t token = 0;  // the candidate, or the one in its place
  bool confirmed = false;
};

// Of a candidate for `position` that was drawn from `q`; an empty q is a draft that was not drawn.
template <class P>
Verdict judge_candidate(const TraceRequest& request, int position, std::span<const typename P::Real> logits, std::int32_t candidate,
                        std::span<const typename P::Real> q) {
  using Real = typename P::Real;
  if (request.teacher_forced()) {
    const std::int32_t target = request.forced.at(static_cast<std::size_t>(position - request.prompt_length()));
    return {target, candidate == target};
  }
  if (request.temperature == 0.0f) {
    const std::int32_t target = argmax(logits);
    return {target, candidate == target};
  }
  const std::vector<Real> p = token_distribution<P>(logits, request.temperature);
  if (accepts<Real>(p, q, candidate, draw_of<Real>(request, position, SamplingPurpose::acceptance))) return {candidate, true};
  return {draw_residual<P>(p, q, candidate, draw_of<Real>(request, position, SamplingPurpose::residual)), false};
}

}  // namespace loopgauge::reference
