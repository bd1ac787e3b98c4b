// SPDX-License-Identifier: Apache-2.0
// Seeded sampling and the acceptance of drafts (S-SAMP-1, S-SAMP-3, S-SAMP-4). The random numbers are models/sampling.hpp's.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "reference/numeric/profile.hpp"

namespace loopgauge::reference {

// Softmax of logits / temperature: [vocab].
template <class P>
std::vector<typename P::Real> token_distribution(std::span<const typename P::Real> logits, float temperature) {
  using Real = typename P::Real;
  std::vector<Real> p(logits.begin(), logits.end());
  for (Real& z : p) z = z / static_cast<Real>(temperature);
  const Real most = *std::max_element(p.begin(), p.end());
  for (Real& z : p) z = P::exp(z - most);
  const Real total = sum<P>(p.data(), static_cast<int>(p.size()));
  for (Real& z : p) z = z / total;
  return p;
}

// The first id with level < running sum of the weights; where rounding leaves none, the highest id with a weight above 0.
template <class Real>
std::int32_t inverse_cdf(std::span<const Real> weights, Real level) {
  Real running = 0;
  std::int32_t last = 0;
  for (std::size_t v = 0; v < weights.size(); ++v) {
    running = running + weights[v];
    if (level < running) return static_cast<std::int32_t>(v);
    if (weights[v] > 0) last = static_cast<std::int32_t>(v);
  }
  return last;
}

// Whether `candidate` is accepted: u * q < p. An empty `q` is a draft without a distribution, whose probability is 1.
template <class Real>
bool accepts(std::span<const Real> p, std::span<const Real> q, std::int32_t candidate, Real u) {
  const std::size_t x = static_cast<std::size_t>(candidate);
  return u * (q.empty() ? Real{1} : q[x]) < p[x];
}

// The token in place of a rejected candidate, from normalize(max(p - q, 0)).
template <class P>
std::int32_t draw_residual(std::span<const typename P::Real> p, std::span<const typename P::Real> q, std::int32_t candidate,
                           typename P::Real u) {
  using Real = typename P::Real;
  std::vector<Real> residual(p.begin(), p.end());
  for (std::size_t v = 0; v < residual.size(); ++v) {
    const Real draft = q.empty() ? static_cast<Real>(v == static_cast<std::size_t>(candidate)) : q[v];
    residual[v] = std::max(residual[v] - draft, Real{0});
  }
  const Real total = sum<P>(residual.data(), static_cast<int>(residual.size()));
  return total == 0 ? inverse_cdf<Real>(p, u) : inverse_cdf<Real>(residual, u * total);
}

}  // namespace loopgauge::reference
