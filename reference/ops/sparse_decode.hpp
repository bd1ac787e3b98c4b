// SPDX-License-Identifier: Apache-2.0
// Sparse decode attention (S-SDA-1..6): the reference that loop 2 leaves behind, and the correction that loops 3 and 4 apply
// (models/spec/reference_statistics.hpp, models/spec/sparse_correction.hpp).
#pragma once

#include <algorithm>
#include <span>
#include <vector>

#include "reference/ops/attention.hpp"

namespace loopgauge::reference {

// What one (layer, query row, head) keeps from loop 2.
template <class Real>
struct HeadReference {
  std::vector<int> keys;      // S, ascending positions
  Real mass = 0;              // m = sum of p over S
  std::vector<Real> output;   // O_ref [head_dim] = sum of p V over all keys, not rounded to BF16
  std::vector<Real> partial;  // C_ref [head_dim] = sum of p V over S
};

// The `count` positions of highest logit, ties to the lower position, ascending. Logits compare as numbers: -0 equals +0.
// All logits are finite (the caller has refused others).
template <class Real>
std::vector<int> select_keys(std::span<const Real> logits, int count) {
  std::vector<int> order(logits.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int>(i);
  const auto before = [&](int a, int b) {
    const Real la = logits[static_cast<std::size_t>(a)], lb = logits[static_cast<std::size_t>(b)];
    return la > lb || (la == lb && a < b);  // a total order, so the selected set is unique
  };
  const auto end = order.begin() + std::min<std::ptrdiff_t>(count, static_cast<std::ptrdiff_t>(order.size()));
  std::nth_element(order.begin(), end, order.end(), before);
  order.erase(end, order.end());
  std::sort(order.begin(), order.end());
  return order;
}

// m and C_ref over reference.keys from the loop-2 probabilities [n]. reference.keys and reference.output are set.
template <class P>
void summarize_reference(std::span<const typename P::Real> probabilities, const PlaneView<typename P::Real>& values,
                         HeadReference<typename P::Real>& reference) {
  using Real = typename P::Real;
  std::vector<Real> selected;
  for (const int position : reference.keys) selected.push_back(probabilities[static_cast<std::size_t>(position)]);
  reference.mass = weight_sum<P>(reference.keys, selected.data());
  reference.partial.resize(static_cast<std::size_t>(values.head_dim));
  weighted_value_sum<P>(values, reference.keys, selected.data(), reference.partial.data());
}

// output [head_dim] = (O_ref - C_ref) + m * L, every step rounded to FP32, with L the attention of `query` over S in the current plane.
// `bfloat16_correction`: O_ref + bf16(m * L - C_ref) instead (Fault::correction_in_bfloat16).
template <class P>
void sparse_correction(const typename P::Real* query, const PlaneView<typename P::Real>& keys, const PlaneView<typename P::Real>& values,
                       const HeadReference<typename P::Real>& reference, typename P::Real scale, typename P::Real* output,
                       bool bfloat16_correction = false) {
  using Real = typename P::Real;
  std::vector<Real> probabilities(reference.keys.size());
  attention_listed<P>(query, keys, values, reference.keys, scale, probabilities.data(), output);
  for (int d = 0; d < keys.head_dim; ++d) {
    const std::size_t i = static_cast<std::size_t>(d);
    const Real rest = reference.output[i] - reference.partial[i];
    const Real local = reference.mass * output[d];
    output[d] = bfloat16_correction ? reference.output[i] + P::round_bf16(local - reference.partial[i]) : rest + local;
  }
}

}  // namespace loopgauge::reference
