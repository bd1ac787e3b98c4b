// SPDX-License-Identifier: Apache-2.0
// Rounding to BF16 and FP16 (S-NUM-1..2): every representable value, every midpoint, and a stride through all binary32 patterns.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

#include "reference/numeric/bfloat16.hpp"
#include "reference/numeric/float16.hpp"
#include "tests/reference/support.hpp"

namespace loopgauge::reference {
namespace {

TEST(Bfloat16, EveryValueWidensToItsPatternAndRoundsToItself) {
  for (std::uint32_t pattern = 0; pattern < 0x10000u; ++pattern) {
    const float x = bfloat16_to_float(static_cast<std::uint16_t>(pattern));
    ASSERT_EQ(test::bits(x), pattern << 16);
    if (std::isnan(x))
      ASSERT_TRUE(std::isnan(round_to_bfloat16(x)));
    else
      ASSERT_EQ(test::bits(round_to_bfloat16(x)), pattern << 16);
  }
}

TEST(Bfloat16, MidpointsGoToEvenAndTheirNeighboursToTheNearest) {
  for (std::uint32_t pattern = 0; pattern < 0x7f80u; ++pattern) {
    const std::uint32_t low = pattern << 16, high = low + 0x10000u, middle = low + 0x8000u;
    ASSERT_EQ(test::bits(round_to_bfloat16(std::bit_cast<float>(middle))), (pattern & 1u) == 0 ? low : high) << std::hex << middle;
    ASSERT_EQ(test::bits(round_to_bfloat16(std::bit_cast<float>(middle - 1))), low) << std::hex << middle;
    ASSERT_EQ(test::bits(round_to_bfloat16(std::bit_cast<float>(middle + 1))), high) << std::hex << middle;
    ASSERT_EQ(test::bits(round_to_bfloat16(std::bit_cast<float>(middle | 0x80000000u))), ((pattern & 1u) == 0 ? low : high) | 0x80000000u);
  }
}

TEST(Bfloat16, AgreesWithTheNearestNeighbourOverAStrideOfAllPatterns) {
  for (std::uint64_t pattern = 0; pattern < (std::uint64_t{1} << 32); pattern += 1021) {
    const float x = std::bit_cast<float>(static_cast<std::uint32_t>(pattern));
    if (std::isnan(x))
      ASSERT_TRUE(std::isnan(round_to_bfloat16(x)));
    else
      ASSERT_EQ(test::bits(round_to_bfloat16(x)), test::bits(test::plain_bf16(x))) << std::hex << pattern;
  }
}

TEST(Bfloat16, NanStaysNanWhateverItsPayload) {
  for (const std::uint32_t pattern : {0x7f800001u, 0x7f80ffffu, 0x7fffffffu, 0xff800001u, 0xffffffffu}) {
    EXPECT_TRUE(std::isnan(round_to_bfloat16(std::bit_cast<float>(pattern)))) << std::hex << pattern;
  }
}

// All finite non-negative binary16 values in order of their pattern, from the definition of the format.
std::vector<double> float16_values() {
  std::vector<double> values;
  for (int pattern = 0; pattern < 0x7c00; ++pattern) {
    const int exponent = pattern >> 10, fraction = pattern & 0x3ff;
    values.push_back(exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25));
  }
  return values;
}

TEST(Float16, EveryValueRoundsToItselfAndMidpointsGoToEven) {
  const std::vector<double> values = float16_values();
  for (std::size_t i = 0; i + 1 < values.size(); ++i) {
    const double middle = (values[i] + values[i + 1]) / 2, even = values[i + (i & 1u)];
    for (const double sign : {1.0, -1.0}) {
      ASSERT_EQ(round_to_float16(sign * values[i]), sign * values[i]);
      ASSERT_EQ(round_to_float16(sign * middle), sign * even) << middle;
      ASSERT_EQ(round_to_float16(sign * std::nextafter(middle, 0.0)), sign * values[i]) << middle;
      ASSERT_EQ(round_to_float16(sign * std::nextafter(middle, 1e9)), sign * values[i + 1]) << middle;
    }
  }
}

TEST(Float16, AgreesWithTheNearestValueOverAStrideOfAllPatterns) {
  const std::vector<double> values = float16_values();
  for (std::uint64_t pattern = 0; pattern < (std::uint64_t{1} << 31); pattern += 5003) {
    const double x = std::bit_cast<float>(static_cast<std::uint32_t>(pattern));
    if (!std::isfinite(x) || x >= 65520.0) continue;
    const std::size_t above = static_cast<std::size_t>(std::lower_bound(values.begin(), values.end(), x) - values.begin());
    std::size_t nearest = above;
    if (above == values.size())
      nearest = above - 1;
    else if (above > 0) {
      const double up = values[above] - x, down = x - values[above - 1];
      nearest = down < up || (down == up && (above - 1) % 2 == 0) ? above - 1 : above;
    }
    ASSERT_EQ(round_to_float16(x), values[nearest]) << x;
    ASSERT_EQ(round_to_float16(-x), -values[nearest]) << x;
  }
}

TEST(Float16, OverflowSubnormalsAndSignedZero) {
  const double infinity = std::numeric_limits<double>::infinity();
  EXPECT_EQ(round_to_float16(65519.99), 65504.0);
  EXPECT_EQ(round_to_float16(65520.0), infinity);
  EXPECT_EQ(round_to_float16(-65520.0), -infinity);
  EXPECT_EQ(round_to_float16(infinity), infinity);
  EXPECT_TRUE(std::isnan(round_to_float16(std::numeric_limits<double>::quiet_NaN())));
  EXPECT_EQ(round_to_float16(0x1p-24), 0x1p-24) << "subnormals are kept";
  EXPECT_EQ(round_to_float16(0x1p-25), 0.0) << "a tie goes to even, which is zero";
  EXPECT_EQ(round_to_float16(0x1.8p-25), 0x1p-24);
  EXPECT_TRUE(std::signbit(round_to_float16(-0x1p-30)));
}

}  // namespace
}  // namespace loopgauge::reference
