// SPDX-License-Identifier: Apache-2.0
#include "reference/ops/rope.hpp"

#include <cmath>

namespace loopgauge::reference {

template <class P>
RopeTable<P>::RopeTable(int positions, int head_dim, double theta, bool bfloat16_frequency)
    : cos(positions, head_dim / 2), sin(positions, head_dim / 2) {
  using Real = typename P::Real;
  for (int i = 0; i < head_dim / 2; ++i) {
    Real inv_freq = P::round_fp32(std::pow(theta, -2.0 * i / head_dim));
    if (bfloat16_frequency) inv_freq = P::round_bf16(inv_freq);
    for (int position = 0; position < positions; ++position) {
      const Real angle = static_cast<Real>(position) * inv_freq;
      cos(position, i) = P::round_bf16(P::round_fp32(std::cos(static_cast<double>(angle))));
      sin(position, i) = P::round_bf16(P::round_fp32(std::sin(static_cast<double>(angle))));
    }
  }
}

template <class P>
void rope(Matrix<typename P::Real>& x, std::span<const int> positions, int head_dim, const RopeTable<P>& table) {
  using Real = typename P::Real;
  const int half = head_dim / 2;
  for (int t = 0; t < static_cast<int>(x.rows()); ++t) {
    const Real* cos = table.cos.row(positions[static_cast<std::size_t>(t)]).data();
    const Real* sin = table.sin.row(positions[static_cast<std::size_t>(t)]).data();
    for (int begin = 0; begin < static_cast<int>(x.cols()); begin += head_dim) {
      Real* low = x.row(t).data() + begin;
      Real* high = low + half;
      for (int i = 0; i < half; ++i) {
        // rot(x) = (-high, low)
        const Real a = low[i], b = high[i];
        low[i] = P::round_bf16(P::round_bf16(a * cos[i]) + P::round_bf16(-b * sin[i]));
        high[i] = P::round_bf16(P::round_bf16(b * cos[i]) + P::round_bf16(a * sin[i]));
      }
    }
  }
}

#define LOOPGAUGE_INSTANTIATE(P)    \
  template struct RopeTable<P>;     \
  template void rope<P>(Matrix<P::Real>&, std::span<const int>, int, const RopeTable<P>&);
LOOPGAUGE_FOR_EACH_PROFILE(LOOPGAUGE_INSTANTIATE)

}  // namespace loopgauge::reference
