// SPDX-License-Identifier: Apache-2.0
// The declared orders of additions (S-SUM-1..2, S-PROF-2): by hand, against a scalar restatement, and pinned.
#include "reference/numeric/reduction.hpp"

#include <gtest/gtest.h>

#include "reference/numeric/profile.hpp"
#include "tests/reference/support.hpp"

namespace loopgauge::reference {
namespace {

constexpr float kBig = 16777216.0f;  // 2^24: adding 1 to it is a tie and changes nothing, adding 2 does

float sum_of(const std::vector<float>& values) { return sum<Declared>(values.data(), static_cast<int>(values.size())); }

TEST(LaneSum, ElementSixteenFollowsElementZeroInItsLane) {
  std::vector<float> values(33, 0.0f);
  values[0] = kBig, values[16] = 1.0f, values[32] = 1.0f;
  EXPECT_EQ(sum_of(values), kBig) << "each 1 is added to 2^24 on its own";
  std::vector<float> other(33, 0.0f);
  other[16] = 1.0f, other[32] = 1.0f, other[1] = kBig;
  EXPECT_EQ(sum_of(other), kBig + 2.0f) << "lane 0 holds 2 before the lanes meet";
}

TEST(LaneSum, TreeAddsLaneJPlusEightFirst) {
  std::vector<float> values(16, 0.0f);
  values[0] = kBig, values[8] = 1.0f, values[4] = 1.0f;
  EXPECT_EQ(sum_of(values), kBig) << "lanes 8 and 4 reach lane 0 one after the other";
  values = std::vector<float>(16, 0.0f);
  values[0] = kBig, values[4] = 1.0f, values[12] = 1.0f;
  EXPECT_EQ(sum_of(values), kBig + 2.0f) << "lane 12 meets lane 4 before lane 4 meets lane 0";
  values = std::vector<float>(16, 0.0f);
  values[0] = kBig, values[1] = 1.0f, values[2] = 1.0f;
  EXPECT_EQ(sum_of(values), kBig) << "distance 2 before distance 1";
  values = std::vector<float>(16, 0.0f);
  values[0] = kBig, values[1] = 1.0f, values[3] = 1.0f;
  EXPECT_EQ(sum_of(values), kBig + 2.0f) << "lane 3 meets lane 1 at distance 2";
}

TEST(LaneSum, ReorderedProfileHasThirtyTwoLanes) {
  std::vector<float> values(33, 0.0f);
  values[0] = kBig, values[16] = 1.0f, values[8] = 1.0f;
  EXPECT_EQ(sum<Reordered>(values.data(), 33), kBig);
  values = std::vector<float>(48, 0.0f);
  values[0] = kBig, values[8] = 1.0f, values[24] = 1.0f;
  EXPECT_EQ(sum<Reordered>(values.data(), 48), kBig + 2.0f) << "lane 24 meets lane 8 at distance 16";
  EXPECT_EQ(sum<Declared>(values.data(), 48), kBig + 2.0f) << "elements 8 and 24 share a lane";
}

TEST(LaneSum, OfNothingIsPlusZeroAndOfMinusZeroToo) {
  EXPECT_EQ(test::bits(sum_of({})), 0u);
  EXPECT_EQ(test::bits(sum_of({-0.0f})), 0u) << "lanes start at +0";
}

TEST(Dot, EqualsTheScalarRestatementOnCancellingDataOfEveryLength) {
  int distinguishes = 0;
  for (int n = 0; n <= 130; ++n) {
    const auto a = test::cancelling_values(static_cast<std::size_t>(n), 1000u + static_cast<unsigned>(n));
    const auto b = test::cancelling_values(static_cast<std::size_t>(n), 2000u + static_cast<unsigned>(n));
    const float declared = dot<Declared>(a.data(), b.data(), n), reordered = dot<Reordered>(a.data(), b.data(), n);
    ASSERT_EQ(test::bits(declared), test::bits(test::plain_dot(a.data(), b.data(), n, 16))) << n;
    ASSERT_EQ(test::bits(reordered), test::bits(test::plain_dot(a.data(), b.data(), n, 32))) << n;
    ASSERT_EQ(test::bits(sum<Declared>(a.data(), n)),
              test::bits(test::plain_lane_sum(n, 16, [&](int i) { return a[static_cast<std::size_t>(i)]; })))
        << n;
    distinguishes += declared != test::plain_dot(a.data(), b.data(), n, 8);
    distinguishes += declared != reordered;
  }
  EXPECT_GT(distinguishes, 60) << "the data must tell one order from another";
}

TEST(Dot, DoubleProfileIsCloseToTheTruthAndTheDeclaredOneWithinItsBound) {
  for (const int n : {384, 2048, 5632}) {
    const auto a = test::bf16_values(static_cast<std::size_t>(n), 7), b = test::bf16_values(static_cast<std::size_t>(n), 8);
    const std::vector<double> da(a.begin(), a.end()), db(b.begin(), b.end());
    long double truth = 0, magnitude = 0;
    for (int i = 0; i < n; ++i) {
      truth += static_cast<long double>(da[static_cast<std::size_t>(i)]) * db[static_cast<std::size_t>(i)];
      magnitude += std::fabs(static_cast<long double>(da[static_cast<std::size_t>(i)]) * db[static_cast<std::size_t>(i)]);
    }
    EXPECT_LE(std::fabs(dot<DoublePrecision>(da.data(), db.data(), n) - truth), 0x1p-45L * magnitude);
    const long double roundings = n / 16 + 3;  // chain of a lane, then the tree
    EXPECT_LE(std::fabs(dot<Declared>(a.data(), b.data(), n) - truth), roundings * 0x1p-24L * magnitude);
  }
}

TEST(Dot, BitsArePinned) {
  std::vector<float> declared, reordered;
  for (int n = 1; n <= 512; ++n) {
    const auto a = test::cancelling_values(static_cast<std::size_t>(n), 31u * static_cast<unsigned>(n));
    const auto b = test::cancelling_values(static_cast<std::size_t>(n), 37u * static_cast<unsigned>(n));
    declared.push_back(dot<Declared>(a.data(), b.data(), n));
    reordered.push_back(dot<Reordered>(a.data(), b.data(), n));
  }
  EXPECT_EQ(test::digest(declared), "ed2e4bd16a64fe34");
  EXPECT_EQ(test::digest(reordered), "7a7066ba9e4de428");
}

}  // namespace
}  // namespace loopgauge::reference
