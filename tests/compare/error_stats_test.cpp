// SPDX-License-Identifier: Apache-2.0
#include "harness/compare/error_stats.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "models/error.hpp"

namespace loopgauge::harness {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kSubnormal = std::numeric_limits<float>::denorm_min();

TEST(UlpDistance, CountsRepresentableValuesBetween) {
  EXPECT_EQ(ulp_distance(1.0f, 1.0f), 0u);
  EXPECT_EQ(ulp_distance(1.0f, std::nextafter(1.0f, 2.0f)), 1u);
  EXPECT_EQ(ulp_distance(std::nextafter(1.0f, 0.0f), std::nextafter(1.0f, 2.0f)), 2u);
  EXPECT_EQ(ulp_distance(1.0f, 2.0f), 1u << 23);
  EXPECT_EQ(ulp_distance(-1.0f, -2.0f), 1u << 23);
}

TEST(UlpDistance, ZeroIsOnePointAndTheLineRunsThroughIt) {
  EXPECT_EQ(ulp_distance(0.0f, -0.0f), 0u);
  EXPECT_EQ(ulp_distance(-kSubnormal, kSubnormal), 2u);
  EXPECT_EQ(ulp_distance(-0.0f, kSubnormal), 1u);
  // From the most negative to the most positive finite number: the widest finite distance does not overflow.
  EXPECT_EQ(ulp_distance(std::numeric_limits<float>::lowest(), std::numeric_limits<float>::max()), 2ull * 0x7f7fffff);
}

TEST(UlpDistance, NonFiniteValuesHaveNoDistanceToOthers) {
  EXPECT_EQ(ulp_distance(kNan, kNan), 0u);
  EXPECT_EQ(ulp_distance(kNan, 1.0f), kNoUlpDistance);
  EXPECT_EQ(ulp_distance(kInfinity, kInfinity), 0u);
  EXPECT_EQ(ulp_distance(kInfinity, -kInfinity), kNoUlpDistance);
  EXPECT_EQ(ulp_distance(std::numeric_limits<float>::max(), kInfinity), kNoUlpDistance);
}

TEST(UlpDistance, Bfloat16StepsAreRoundedUp) {
  EXPECT_EQ(ulp_distance(1.0f, 1.0078125f, UlpFormat::bfloat16), 1u);  // 1 + 2^-7
  EXPECT_EQ(ulp_distance(1.0f, 1.0f + 0x1p-23f, UlpFormat::bfloat16), 1u);
  EXPECT_EQ(ulp_distance(1.0f, 1.0f, UlpFormat::bfloat16), 0u);
}

TEST(ErrorStats, NanDoesNotHideTheLargestFiniteError) {
  const std::vector<float> expected{1, 2, 3, 4, kInfinity};
  const std::vector<float> actual{1, kNan, 3.5f, 4.25f, 5};
  const ErrorStats stats = error_stats(expected, actual);
  EXPECT_EQ(stats.count, 5);
  EXPECT_EQ(stats.different, 4);
  EXPECT_EQ(stats.actual_nan, 1);
  EXPECT_EQ(stats.expected_nan, 0);
  EXPECT_EQ(stats.expected_inf, 1);
  EXPECT_EQ(stats.actual_inf, 0);
  EXPECT_DOUBLE_EQ(stats.max_abs, 0.5);
  EXPECT_EQ(stats.max_abs_index, 2);
  EXPECT_EQ(stats.max_ulp, 1u << 21);  // 3 to 3.5: a quarter of a binade of 2^23 steps
  EXPECT_DOUBLE_EQ(stats.rms, std::sqrt((0.25 + 0.0625) / 3));
  EXPECT_DOUBLE_EQ(stats.abs_percentiles.back(), 0.5);
}

TEST(ErrorStats, NothingFiniteGivesNoNumbers) {
  const std::vector<float> expected{kNan}, actual{1.0f};
  const ErrorStats stats = error_stats(expected, actual);
  EXPECT_EQ(stats.max_abs_index, -1);
  EXPECT_TRUE(std::isnan(stats.rms));
  EXPECT_TRUE(std::isnan(stats.abs_percentiles[0]));
}

TEST(ErrorStats, SignedZerosAreDifferentBits) {
  const std::vector<float> expected{0.0f}, actual{-0.0f};
  EXPECT_EQ(error_stats(expected, actual).different, 1);
  EXPECT_EQ(error_stats(expected, actual).max_ulp, 0u);
}

TEST(ErrorStats, PercentilesAreNearestRank) {
  std::vector<double> values(1000);
  std::iota(values.begin(), values.end(), 1.0);
  EXPECT_EQ(percentile_of_sorted(values, 0.50), 500);
  EXPECT_EQ(percentile_of_sorted(values, 0.999), 999);
  EXPECT_EQ(percentile_of_sorted(values, 1.0), 1000);
  EXPECT_EQ(percentile_of_sorted(std::vector<double>{7}, 0.5), 7);
  EXPECT_TRUE(std::isnan(percentile_of_sorted({}, 0.5)));
  EXPECT_EQ(percentile_of_sorted(std::vector<double>{1, 2, 3, 4}, 0.5), 2) << "a rank";
  EXPECT_EQ(median_of_sorted(std::vector<double>{1, 2, 3, 4}), 2.5);
  EXPECT_EQ(median_of_sorted(std::vector<double>{1, 2, 4}), 2);
  EXPECT_TRUE(std::isnan(median_of_sorted({})));
  // A tail is one where something lies above it.
  EXPECT_EQ(tail_percentile_of_sorted(values, 0.99), 990);
  EXPECT_EQ(tail_percentile_of_sorted(std::span(values).first(100), 0.99), 99);
  EXPECT_TRUE(std::isnan(tail_percentile_of_sorted(std::span(values).first(99), 0.99)));
  EXPECT_TRUE(std::isnan(tail_percentile_of_sorted({}, 0.99)));
}

TEST(ErrorStats, DifferentSizesAreAnInternalError) {
  const std::vector<float> expected{1, 2}, actual{1};
  EXPECT_THROW(error_stats(expected, actual), InternalError);
}

}  // namespace
}  // namespace loopgauge::harness
