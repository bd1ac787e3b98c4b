// SPDX-License-Identifier: Apache-2.0
// The three profiles of one and the same operations (S-PROF-1..3). Every reference operation is a template over one of these; nothing else
// in this folder depends on the profile.
//
//   Declared         the contract: FP32 arithmetic, declared BF16 rounding points, 16-lane sums, positions one by one
//   Reordered        the same rounding points, a second declared order: 32 lanes, sums over positions in blocks of 256
//   DoublePrecision  binary64 throughout, no rounding but the codec's FP16 parameters; exp of the C library, so its bits are no promise
#pragma once

#include <cmath>

#include "reference/numeric/bfloat16.hpp"
#include "reference/numeric/elementary.hpp"
#include "reference/numeric/reduction.hpp"

namespace loopgauge::reference {

struct SinglePrecision {
  using Real = float;
  LOOPGAUGE_INLINE static float round_bf16(float x) { return round_to_bfloat16(x); }
  LOOPGAUGE_INLINE static float round_fp32(double x) { return static_cast<float>(x); }
  LOOPGAUGE_INLINE static float exp(float x) { return exp_binary32(x); }
  LOOPGAUGE_INLINE static float sigmoid(float x) { return sigmoid_binary32(x); }
  LOOPGAUGE_INLINE static float silu(float x) { return silu_binary32(x); }
};

struct Declared : SinglePrecision {
  static constexpr int kLanes = 16;
  static constexpr int kPositionBlock = 0;    // sums over positions are one ascending sequence
};

struct Reordered : SinglePrecision {
  static constexpr int kLanes = 32;
  static constexpr int kPositionBlock = 256;  // absolute positions; block sums are added ascending
};

struct DoublePrecision {
  using Real = double;
  static constexpr int kLanes = 16;
  static constexpr int kPositionBlock = 0;
  LOOPGAUGE_INLINE static double round_bf16(double x) { return x; }
  LOOPGAUGE_INLINE static double round_fp32(double x) { return x; }
  static double exp(double x) { return std::exp(x); }
  static double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }
  static double silu(double x) { return x / (1.0 + std::exp(-x)); }
};

// Lists the instantiations of a function template: LOOPGAUGE_FOR_EACH_PROFILE(MACRO) expands MACRO(Declared) MACRO(Reordered) ...
#define LOOPGAUGE_FOR_EACH_PROFILE(MACRO) MACRO(Declared) MACRO(Reordered) MACRO(DoublePrecision)

template <class P>
LOOPGAUGE_INLINE typename P::Real dot(const typename P::Real* a, const typename P::Real* b, int n) {
  return lane_dot<typename P::Real, P::kLanes>(a, b, n);
}

template <class P>
LOOPGAUGE_INLINE typename P::Real sum(const typename P::Real* a, int n) {
  return lane_sum<typename P::Real, P::kLanes>(a, n);
}

}  // namespace loopgauge::reference
