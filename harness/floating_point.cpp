// SPDX-License-Identifier: Apache-2.0
#include "harness/floating_point.hpp"

#include <cfenv>
#include <cfloat>
#include <cmath>
#include <limits>
#include <set>

namespace loopgauge::harness {
namespace {

// volatile operands keep the compiler from evaluating at compile time, under its own rounding.
struct Probe {
  volatile float one = 1.0f, half_ulp = 0x1p-24f, three_halves_ulp = 3 * 0x1p-24f, three = 3.0f, two = 2.0f, half = 0.5f;
  volatile float smallest_normal = FLT_MIN, smallest = std::numeric_limits<float>::denorm_min();
  volatile float factor = 1.0f + 0x1p-12f, addend = -(1.0f + 0x1p-11f);
};

void probe_thread(std::set<std::string>& faults) {
  Probe p;
  if (std::fegetround() != FE_TONEAREST) faults.insert("the rounding mode is not round to nearest");
  // Both sums are halfway between two numbers: ties go to the even one, down here and up there.
  if (p.one + p.half_ulp != 1.0f || p.one + p.three_halves_ulp != 1.0f + 0x1p-22f) faults.insert("sums are not rounded to nearest even");
  if (p.one / p.three != 0x1.555556p-2f) faults.insert("quotients are not correctly rounded");
  if (std::sqrt(static_cast<float>(p.two)) != 0x1.6a09e6p+0f) faults.insert("square roots are not correctly rounded");
  if (p.smallest_normal * p.half == 0.0f) faults.insert("subnormal results are flushed to zero");
  if (p.smallest * 0x1p+100f == 0.0f) faults.insert("subnormal operands are read as zero");
  // The rounded product is 1 + 2^-11 exactly; a fused multiply-add would keep the 2^-24 below it.
  if (p.factor * p.factor + p.addend != 0.0f) faults.insert("a product and an addition are contracted into one rounding");
}

}  // namespace

std::vector<std::string> floating_point_faults() {
  std::set<std::string> faults;
  if (FLT_EVAL_METHOD != 0) faults.insert("binary32 expressions are evaluated in a wider format");
    // Rounding mode and flushing are state of a thread.
#pragma omp parallel
  {
    std::set<std::string> own;
    probe_thread(own);
#pragma omp critical
    faults.insert(own.begin(), own.end());
  }
  return {faults.begin(), faults.end()};
}

}  // namespace loopgauge::harness
