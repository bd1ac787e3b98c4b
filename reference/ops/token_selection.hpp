// SPDX-License-Identifier: Apache-2.0
// update_score and select_tokens: which prompt tokens of a window a late loop updates (S-TSEL-1..5, models/spec/update_score.hpp,
// models/spec/select_tokens.hpp).
#pragma once

#include <algorithm>
#include <cmath>
#include <span>
#include <vector>

#include "models/algorithm_config.hpp"
#include "reference/numeric/profile.hpp"

namespace loopgauge::reference {

// norm(current - previous) / max(norm(current), 1e-12): FP32, dot order, IEEE square root and division. Rows of [n], BF16 values.
// `current` is H[r-1], `previous` H[r-2] of the row; they must be two rows of memory: one row compared with itself scores zero.
template <class P>
typename P::Real update_score(const typename P::Real* current, const typename P::Real* previous, int n) {
  using Real = typename P::Real;
  std::vector<Real> change(static_cast<std::size_t>(n));
  for (int i = 0; i < n; ++i) change[static_cast<std::size_t>(i)] = current[i] - previous[i];
  const Real change_norm = std::sqrt(dot<P>(change.data(), change.data(), n));
  const Real current_norm = std::sqrt(dot<P>(current, current, n));
  return change_norm / std::max(current_norm, static_cast<Real>(1e-12f));
}

// The `count` candidates of highest score, ties to the lower position, ascending. score_of(position) is finite for every candidate.
template <class ScoreOf>
std::vector<int> select_tokens(std::span<const int> candidates, int count, ScoreOf&& score_of) {
  std::vector<int> order(candidates.begin(), candidates.end());
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
    const auto sa = score_of(a), sb = score_of(b);
    return sa > sb || (sa == sb && a < b);
  });
  order.resize(std::min(order.size(), static_cast<std::size_t>(count)));
  std::sort(order.begin(), order.end());
  return order;
}

}  // namespace loopgauge::reference
