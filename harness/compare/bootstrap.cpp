// SPDX-License-Identifier: Apache-2.0
#include "harness/compare/bootstrap.hpp"

#include <algorithm>
#include <random>

namespace loopgauge::harness {

void resample(std::size_t units, std::uint64_t seed, int resamples, const std::function<void(const std::vector<int>&)>& use) {
  if (units < 2) return;
  std::mt19937_64 generator(seed);
  std::vector<int> multiplicity(units);
  for (int i = 0; i < resamples; ++i) {
    std::fill(multiplicity.begin(), multiplicity.end(), 0);
    for (std::size_t draw = 0; draw < units; ++draw) ++multiplicity[static_cast<std::size_t>(((generator() >> 32) * units) >> 32)];
    use(multiplicity);
  }
}

}  // namespace loopgauge::harness
