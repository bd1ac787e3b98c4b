// SPDX-License-Identifier: Apache-2.0
#include "reference/ops/attention.hpp"

#include <algorithm>

namespace loopgauge::reference {
namespace {

// Key index -> absolute position.
struct AllPositions {
  LOOPGAUGE_INLINE int operator()(int i) const { return i; }
};
struct ListedPositions {
  const int* list;
  LOOPGAUGE_INLINE int operator()(int i) const { return list[i]; }
};

// Four keys side by side: the dots are independent, each in the declared order.
template <class P, class Positions>
LOOPGAUGE_INLINE void scaled_logits(const typename P::Real* query, const PlaneView<typename P::Real>& keys, int count, Positions position,
                                    typename P::Real scale, typename P::Real* logits) {
  using L = Lanes<typename P::Real, P::kLanes>;
  constexpr int kTile = 4;
  int i = 0;
  for (; i + kTile <= count; i += kTile) {
    const typename P::Real* rows[kTile];
    L sums[kTile];
    for (int j = 0; j < kTile; ++j) rows[j] = keys.row(position(i + j));
    int d = 0;
    for (; d + P::kLanes <= keys.head_dim; d += P::kLanes) {
      const auto q = L::load(query + d);
      for (int j = 0; j < kTile; ++j) sums[j].value += q * L::load(rows[j] + d);
    }
    for (int j = 0; j < kTile; ++j) {
      const typename P::Real* row = rows[j];
      logits[i + j] = sums[j].reduce(keys.head_dim - d, [&](int t) LOOPGAUGE_INLINE_LAMBDA { return query[d + t] * row[d + t]; }) * scale;
    }
  }
  for (; i < count; ++i) logits[i] = dot<P>(query, keys.row(position(i)), keys.head_dim) * scale;
}

template <class P>
LOOPGAUGE_INLINE void softmax(typename P::Real* x, int count) {
  using Real = typename P::Real;
  Real max = x[0];
  for (int i = 1; i < count; ++i) max = x[i] > max ? x[i] : max;
  for (int i = 0; i < count; ++i) x[i] = P::exp(x[i] - max);
  const Real total = sum<P>(x, count);
  for (int i = 0; i < count; ++i) x[i] = x[i] / total;
}

// The end of the run of key indices whose positions share the block of the first: the whole range where the profile has no blocks.
template <class P, class Positions>
LOOPGAUGE_INLINE int block_end(int begin, int count, Positions position) {
  if constexpr (P::kPositionBlock == 0) return count;
  else {
    int end = begin;
    while (end < count && position(end) / P::kPositionBlock == position(begin) / P::kPositionBlock) ++end;
    return end;
  }
}

// sum of weights[i] * values.row(position(i))[d] over one block of positions, ascending, for N channels: one running sum per channel.
template <class Real, int N, class Positions>
LOOPGAUGE_INLINE void channel_sums(const PlaneView<Real>& values, int begin, int end, Positions position, const Real* weights, int channel,
                                   Real* output) {
  constexpr int kWidth = N < 16 ? N : 16, kCount = N / kWidth;
  using L = Lanes<Real, kWidth>;
  L sums[kCount];
  for (int i = begin; i < end; ++i) {
    const Real* value = values.row(position(i)) + channel;
    for (int c = 0; c < kCount; ++c) sums[c].value += weights[i] * L::load(value + c * kWidth);
  }
  for (int c = 0; c < kCount; ++c) {
    for (int j = 0; j < kWidth; ++j) output[channel + c * kWidth + j] += sums[c].value[j];
  }
}

template <class P, class Positions>
LOOPGAUGE_INLINE void value_product(const PlaneView<typename P::Real>& values, int count, Positions position,
                                    const typename P::Real* weights, typename P::Real* output) {
  using Real = typename P::Real;
  std::fill(output, output + values.head_dim, Real{0});
  for (int begin = 0; begin < count;) {
    const int end = block_end<P>(begin, count, position);
    int channel = 0;
    for (; channel + 64 <= values.head_dim; channel += 64) channel_sums<Real, 64>(values, begin, end, position, weights, channel, output);
    for (; channel < values.head_dim; ++channel) channel_sums<Real, 1>(values, begin, end, position, weights, channel, output);
    begin = end;
  }
}

template <class P, class Positions>
LOOPGAUGE_INLINE void attention(const typename P::Real* query, const PlaneView<typename P::Real>& keys,
                                const PlaneView<typename P::Real>& values, int count, Positions position, typename P::Real scale,
                                typename P::Real* logits, typename P::Real* probabilities, typename P::Real* output) {
  scaled_logits<P>(query, keys, count, position, scale, probabilities);
  for (int i = 0; logits != nullptr && i < count; ++i) logits[i] = probabilities[i];
  softmax<P>(probabilities, count);
  value_product<P>(values, count, position, probabilities, output);
}

}  // namespace

#define LOOPGAUGE_INSTANTIATE(P)                                                                                                            \
  template <>                                                                                                                               \
  LOOPGAUGE_MULTIVERSION void attention_dense<P>(const P::Real* query, const PlaneView<P::Real>& keys, const PlaneView<P::Real>& values,    \
                                                 int key_count, P::Real scale, P::Real* logits, P::Real* probabilities, P::Real* output) {  \
    attention<P>(query, keys, values, key_count, AllPositions{}, scale, logits, probabilities, output);                                     \
  }                                                                                                                                         \
  template <>                                                                                                                               \
  LOOPGAUGE_MULTIVERSION void attention_listed<P>(const P::Real* query, const PlaneView<P::Real>& keys, const PlaneView<P::Real>& values,   \
                                                  std::span<const int> positions, P::Real scale, P::Real* probabilities, P::Real* output) { \
    attention<P>(query, keys, values, static_cast<int>(positions.size()), ListedPositions{positions.data()}, scale, nullptr, probabilities, \
                 output);                                                                                                                   \
  }                                                                                                                                         \
  template <>                                                                                                                               \
  LOOPGAUGE_MULTIVERSION void weighted_value_sum<P>(const PlaneView<P::Real>& values, std::span<const int> positions,                       \
                                                    const P::Real* weights, P::Real* output) {                                              \
    value_product<P>(values, static_cast<int>(positions.size()), ListedPositions{positions.data()}, weights, output);                       \
  }                                                                                                                                         \
  template <>                                                                                                                               \
  P::Real weight_sum<P>(std::span<const int> positions, const P::Real* weights) {                                                           \
    const int count = static_cast<int>(positions.size());                                                                                   \
    P::Real total = 0;                                                                                                                      \
    for (int begin = 0; begin < count;) {                                                                                                   \
      const int end = block_end<P>(begin, count, ListedPositions{positions.data()});                                                        \
      P::Real partial = 0;                                                                                                                  \
      for (int i = begin; i < end; ++i) partial += weights[i];                                                                              \
      total += partial;                                                                                                                     \
      begin = end;                                                                                                                          \
    }                                                                                                                                       \
    return total;                                                                                                                           \
  }
LOOPGAUGE_FOR_EACH_PROFILE(LOOPGAUGE_INSTANTIATE)

}  // namespace loopgauge::reference
