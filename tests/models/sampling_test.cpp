// SPDX-License-Identifier: Apache-2.0
// S-SAMP-2: what the numbers are made of.
#include "models/sampling.hpp"

#include <gtest/gtest.h>

#include <set>

namespace loopgauge {
namespace {

TEST(Sampling, TheUpperBitsOfTheFirstWordMakeTheNumber) {
  constexpr std::uint64_t kSeed = 0x299f31d0a4093822u;  // the published test vector of Philox4x32-10 has this key
  static_assert(uniform_draw(kSeed, 0, 0, SamplingPurpose::target) == static_cast<float>(philox4x32_10({0, 0, 0, 0}, {0xa4093822, 0x299f31d0})[0] >> 8) / 16777216.0f);
  EXPECT_EQ(uniform_draw(0, 0, 0, SamplingPurpose::target), static_cast<float>(0x6627e8d5u >> 8) / 16777216.0f);
  EXPECT_EQ(uniform_draw(kSeed, 7, 300, SamplingPurpose::residual),
            static_cast<float>(philox4x32_10({300, 3, 7, 0}, {0xa4093822, 0x299f31d0})[0] >> 8) / 16777216.0f);
}

TEST(Sampling, EveryPartOfTheCounterAndOfTheKeyCounts) {
  std::set<float> draws;
  draws.insert(uniform_draw(1, 2, 3, SamplingPurpose::target));
  draws.insert(uniform_draw(2, 2, 3, SamplingPurpose::target));
  draws.insert(uniform_draw(1 + (std::uint64_t{1} << 32), 2, 3, SamplingPurpose::target));
  draws.insert(uniform_draw(1, 3, 3, SamplingPurpose::target));
  draws.insert(uniform_draw(1, 2, 4, SamplingPurpose::target));
  for (const SamplingPurpose purpose : {SamplingPurpose::draft, SamplingPurpose::acceptance, SamplingPurpose::residual})
    draws.insert(uniform_draw(1, 2, 3, purpose));
  EXPECT_EQ(draws.size(), 8u);
  for (const float draw : draws) {
    EXPECT_GE(draw, 0.0f);
    EXPECT_LT(draw, 1.0f);
  }
}

}  // namespace
}  // namespace loopgauge
