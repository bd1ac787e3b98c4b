// SPDX-License-Identifier: Apache-2.0
// The declared order of additions (S-SUM-1): element i goes to lane i mod L in ascending order, every lane starts at +0, and the lanes are
// reduced by a halving tree (L = 16: 8, 4, 2, 1). Lanes are independent, so any vector width gives the same bits; multiplication and
// addition are separate roundings (the build switches contraction off).
#pragma once

#include <cstring>

// Compiles a function for several instruction sets and picks one at start-up. The bits do not depend on the choice.
#define LOOPGAUGE_MULTIVERSION __attribute__((target_clones("default", "avx2", "avx512f")))
#define LOOPGAUGE_INLINE [[gnu::always_inline]] inline
#define LOOPGAUGE_INLINE_LAMBDA __attribute__((always_inline))

namespace loopgauge::reference {

template <class Real, int L>
struct Lanes {
  typedef Real Vector __attribute__((vector_size(L * sizeof(Real))));
  Vector value{};

  LOOPGAUGE_INLINE static Vector load(const Real* p) {
    Vector v;
    std::memcpy(&v, p, sizeof v);
    return v;
  }

  // Lane j takes lane j + L/2, and so on down to one lane.
  LOOPGAUGE_INLINE Real halving_tree() const {
    if constexpr (L == 1) return value[0];
    else {
      Lanes<Real, L / 2> low, high;
      std::memcpy(&low.value, &value, sizeof low.value);
      std::memcpy(&high.value, reinterpret_cast<const char*>(&value) + sizeof low.value, sizeof high.value);
      low.value += high.value;
      return low.halving_tree();
    }
  }

  // Adds the `tail_count` < L leftover elements element(j) to lanes j and reduces.
  template <class Element>
  LOOPGAUGE_INLINE Real reduce(int tail_count, Element&& element) {
    for (int j = 0; j < tail_count; ++j) value[j] += element(j);
    return halving_tree();
  }
};

// sum of a[i] * b[i], i in [0, n)
template <class Real, int L>
LOOPGAUGE_INLINE Real lane_dot(const Real* a, const Real* b, int n) {
  Lanes<Real, L> sum;
  int i = 0;
  for (; i + L <= n; i += L) sum.value += Lanes<Real, L>::load(a + i) * Lanes<Real, L>::load(b + i);
  return sum.reduce(n - i, [&](int j) LOOPGAUGE_INLINE_LAMBDA { return a[i + j] * b[i + j]; });
}

// sum of a[i], i in [0, n)
template <class Real, int L>
LOOPGAUGE_INLINE Real lane_sum(const Real* a, int n) {
  Lanes<Real, L> sum;
  int i = 0;
  for (; i + L <= n; i += L) sum.value += Lanes<Real, L>::load(a + i);
  return sum.reduce(n - i, [&](int j) LOOPGAUGE_INLINE_LAMBDA { return a[i + j]; });
}

}  // namespace loopgauge::reference
