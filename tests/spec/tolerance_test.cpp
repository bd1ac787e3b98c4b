// SPDX-License-Identifier: Apache-2.0
// The evaluation of tolerances, against numbers worked out by hand.
#include "models/spec/tolerance.hpp"

#include <gtest/gtest.h>

#include "models/spec/op_spec.hpp"

namespace loopgauge::spec {
namespace {

TEST(Tolerance, SpacingsAndRoundoffsOfTheFormats) {
  EXPECT_EQ(unit_roundoff(Format::bf16), 0x1p-8);
  EXPECT_EQ(unit_roundoff(Format::fp16), 0x1p-11);
  EXPECT_EQ(unit_roundoff(Format::fp32), 0x1p-24);
  EXPECT_EQ(ulp(1.0, Format::bf16), 0x1p-7);
  EXPECT_EQ(ulp(1.99, Format::bf16), 0x1p-7);
  EXPECT_EQ(ulp(-2.0, Format::bf16), 0x1p-6);
  EXPECT_EQ(ulp(1.0, Format::fp32), 0x1p-23);
  EXPECT_EQ(ulp(0.0, Format::fp32), 0x1p-149);
  EXPECT_EQ(ulp(0x1p-140, Format::fp32), 0x1p-149);
  EXPECT_EQ(ulp(0x1p-20, Format::fp16), 0x1p-24);
}

TEST(Tolerance, SumBoundsCountTheRoundingsOfBothSides) {
  const double u = 0x1p-24;
  EXPECT_DOUBLE_EQ(gamma(3, u), 3 * u / (1 - 3 * u));
  EXPECT_DOUBLE_EQ(lane_sum_bound(384), gamma(24 + 3, u) + gamma(384, 2 * u));
  EXPECT_DOUBLE_EQ(lane_sum_bound(17), gamma(2 + 3, u) + gamma(17, 2 * u));
  EXPECT_DOUBLE_EQ(running_sum_bound(100), gamma(101, u) + gamma(100, 2 * u));
}

TEST(Tolerance, BoundAddsSpacingsAndMagnitude) {
  const Tolerance tolerance{
      .kind = ToleranceKind::inherited, .ulps = 2, .format = Format::bf16, .lane_sums = 1, .relative = 0x1p-10, .input_gain = 3};
  const Element element{.expected = 1.5, .magnitude = 8, .terms = 64, .input_error = 0.25, .declared_relative = 0x1p-8};
  const double relative = lane_sum_bound(64) + 0x1p-10 + 0.75 + 0x1p-8;
  EXPECT_DOUBLE_EQ(bound(tolerance, element, 1.5), 2 * 0x1p-7 + 8 * relative);
  EXPECT_DOUBLE_EQ(bound(tolerance, element, 2.0), 2 * 0x1p-6 + 8 * relative) << "the larger side decides the spacing";
}

TEST(Tolerance, RatioPassesAtOneAndBitExactAllowsNothing) {
  const Tolerance two_ulps{.kind = ToleranceKind::ulp, .ulps = 2, .format = Format::bf16};
  const Element one{.expected = 1.0};
  EXPECT_EQ(error_ratio(two_ulps, one, 1.0), 0.0);
  EXPECT_EQ(error_ratio(two_ulps, one, 1.0 + 2 * 0x1p-7), 1.0);
  EXPECT_GT(error_ratio(two_ulps, one, 1.0 + 3 * 0x1p-7), 1.0);
  const Tolerance exact{.kind = ToleranceKind::bit_exact};
  EXPECT_EQ(error_ratio(exact, one, 1.0), 0.0);
  EXPECT_EQ(error_ratio(exact, one, std::nextafter(1.0f, 2.0f)), std::numeric_limits<double>::infinity());
}

TEST(Tolerance, NonFiniteValuesNeverPassUnlessBothAreEqual) {
  const Tolerance tolerance{.kind = ToleranceKind::norm_bound, .relative = 1.0};
  const double inf = std::numeric_limits<double>::infinity(), nan = std::numeric_limits<double>::quiet_NaN();
  EXPECT_EQ(error_ratio(tolerance, {.expected = 1.0, .magnitude = 1.0}, inf), inf);
  EXPECT_EQ(error_ratio(tolerance, {.expected = 1.0, .magnitude = 1.0}, nan), inf);
  EXPECT_EQ(error_ratio(tolerance, {.expected = nan, .magnitude = 1.0}, 1.0), inf);
  EXPECT_EQ(error_ratio(tolerance, {.expected = 1.0, .magnitude = inf}, 2.0), inf);
  EXPECT_EQ(error_ratio(tolerance, {.expected = nan}, nan), 0.0);
  EXPECT_EQ(error_ratio(tolerance, {.expected = inf}, inf), 0.0);
}

TEST(Tolerance, MarginIsJudgedAgainstTheComparedValue) {
  const Tolerance decision{.kind = ToleranceKind::decision_margin, .margin_factor = 2};
  EXPECT_EQ(margin_ratio(decision, 0.0, 0.0), 0.0);
  EXPECT_EQ(margin_ratio(decision, 0.5, 0.25), 1.0);
  EXPECT_GT(margin_ratio(decision, 0.6, 0.25), 1.0);
  EXPECT_EQ(margin_ratio(decision, 0.1, 0.0), std::numeric_limits<double>::infinity());
}

TEST(Tolerance, ListsDoNotOverflowTheirCapacity) {
  constexpr List<int, 3> list{1, 2, 3};
  static_assert(list.size() == 3 && list[2] == 3 && !list.empty());
  EXPECT_THROW((List<int, 2>{1, 2, 3}), std::out_of_range);
}

}  // namespace
}  // namespace loopgauge::spec
