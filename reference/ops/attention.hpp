// SPDX-License-Identifier: Apache-2.0
// attention: one query row of one head over the keys and values of one plane (S-ATT-1..4, models/spec/attention.hpp).
#pragma once

#include <span>

#include "reference/numeric/profile.hpp"

namespace loopgauge::reference {

// Keys or values of one (layer, loop, head) as a query sees them: positions below `frontier` are read reconstructed, the others exact.
// Both arrays are [positions, head_dim] row-major; `reconstructed` may be null when frontier is 0.
template <class Real>
struct PlaneView {
  const Real* exact = nullptr;
  const Real* reconstructed = nullptr;
  int frontier = 0;
  int head_dim = 0;

  const Real* row(int position) const {
    return (position < frontier ? reconstructed : exact) + static_cast<std::ptrdiff_t>(position) * head_dim;
  }
};

// RN32(1 / sqrt(head_dim)) from binary64 (unrounded in the double profile).
template <class P>
typename P::Real attention_scale(int head_dim) {
  return P::round_fp32(1.0 / std::sqrt(static_cast<double>(head_dim)));
}

// Scaled logits, softmax and value product over the keys [0, key_count).
//   query [head_dim] BF16 values; logits [key_count] or null; probabilities [key_count]; output [head_dim], not rounded to BF16.
template <class P>
void attention_dense(const typename P::Real* query, const PlaneView<typename P::Real>& keys, const PlaneView<typename P::Real>& values,
                     int key_count, typename P::Real scale, typename P::Real* logits, typename P::Real* probabilities,
                     typename P::Real* output);

// The same over an ascending list of key positions; sums run over the list in its order.
template <class P>
void attention_listed(const typename P::Real* query, const PlaneView<typename P::Real>& keys, const PlaneView<typename P::Real>& values,
                      std::span<const int> key_positions, typename P::Real scale, typename P::Real* probabilities,
                      typename P::Real* output);

// output [head_dim] = sum of weights[i] * values.row(positions[i]), ascending.
template <class P>
void weighted_value_sum(const PlaneView<typename P::Real>& values, std::span<const int> positions, const typename P::Real* weights,
                        typename P::Real* output);

// sum of weights[i] over ascending positions.
template <class P>
typename P::Real weight_sum(std::span<const int> positions, const typename P::Real* weights);

}  // namespace loopgauge::reference
