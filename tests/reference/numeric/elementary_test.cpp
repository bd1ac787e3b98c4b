// SPDX-License-Identifier: Apache-2.0
// exp, sigmoid and silu (S-ELEM-1..4) against 64-bit-mantissa long double over samples of every exponent, and their exact bits.
#include "reference/numeric/elementary.hpp"

#include <gtest/gtest.h>

#include <limits>

#include "tests/reference/support.hpp"

namespace loopgauge::reference {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr long double kBound = 0.5L + 0x1p-20L;

long double spacing(long double value) {
  const int exponent = value == 0 ? -126 : std::max(-126, std::ilogb(value));
  return std::ldexp(1.0L, exponent - 23);
}

// Errors in units of the last place of the true value over all binary32 patterns p with p mod stride == 0.
template <class Function, class Truth>
void expect_within_bound(Function function, Truth truth) {
  static_assert(std::numeric_limits<long double>::digits >= 64, "the test needs an extended format to compare with");
  long double worst = 0;
  float worst_at = 0;
  for (std::uint64_t pattern = 0; pattern < (std::uint64_t{1} << 32); pattern += 4099) {
    const float x = std::bit_cast<float>(static_cast<std::uint32_t>(pattern));
    if (!std::isfinite(x)) continue;
    const long double expected = truth(static_cast<long double>(x));
    const float actual = function(x);
    if (std::isinf(actual)) {
      ASSERT_GE(std::fabs(expected), 0x1.ffffffp127L) << "x = " << x;
      continue;
    }
    const long double error = std::fabs(actual - expected) / spacing(expected);
    if (error > worst) worst = error, worst_at = x;
  }
  EXPECT_LE(worst, kBound) << "at x = " << worst_at;
  EXPECT_GT(worst, 0.49L) << "the sample is too small to mean anything";
}

TEST(Elementary, ExpIsWithinTheDeclaredBoundOverAllExponents) {
  expect_within_bound(exp_binary32, [](long double x) { return std::exp(x); });
}

TEST(Elementary, SigmoidIsWithinTheDeclaredBoundOverAllExponents) {
  expect_within_bound(sigmoid_binary32, [](long double x) { return 1 / (1 + std::exp(-x)); });
}

TEST(Elementary, SiluIsWithinTheDeclaredBoundOverAllExponents) {
  expect_within_bound(silu_binary32, [](long double x) { return x / (1 + std::exp(-x)); });
}

TEST(Elementary, SpecialValues) {
  EXPECT_EQ(exp_binary32(0.0f), 1.0f);
  EXPECT_EQ(exp_binary32(-0.0f), 1.0f);
  EXPECT_EQ(exp_binary32(kInfinity), kInfinity);
  EXPECT_EQ(test::bits(exp_binary32(-kInfinity)), 0u);
  EXPECT_TRUE(std::isnan(exp_binary32(kNan)));
  EXPECT_TRUE(std::isnan(exp_binary32(-kNan)));

  EXPECT_EQ(sigmoid_binary32(0.0f), 0.5f);
  EXPECT_EQ(sigmoid_binary32(kInfinity), 1.0f);
  EXPECT_EQ(test::bits(sigmoid_binary32(-kInfinity)), 0u);
  EXPECT_TRUE(std::isnan(sigmoid_binary32(kNan)));

  EXPECT_EQ(test::bits(silu_binary32(-0.0f)), 0x80000000u);
  EXPECT_EQ(silu_binary32(kInfinity), kInfinity);
  EXPECT_EQ(silu_binary32(-kInfinity), -kInfinity) << "the declared sequence, not the limit";
  EXPECT_TRUE(std::isnan(silu_binary32(kNan)));
  EXPECT_EQ(silu_binary32(3.0e38f), 3.0e38f);
  EXPECT_EQ(test::bits(silu_binary32(-3.0e38f)), 0x80000000u);
}

TEST(Elementary, ExpOverflowsAndUnderflowsWhereTheSpecificationSays) {
  EXPECT_TRUE(std::isfinite(exp_binary32(std::nextafter(88.72284f, 0.0f))));
  EXPECT_EQ(exp_binary32(88.72284f), kInfinity);
  EXPECT_GT(exp_binary32(std::nextafter(-103.972084f, 0.0f)), 0.0f);
  EXPECT_EQ(exp_binary32(-103.972084f), 0.0f);
  EXPECT_EQ(exp_binary32(-103.0f), 0x1p-149f) << "subnormal results are kept";
}

// One written sequence, so one result: the bits of 65,536 arguments spread over all patterns.
TEST(Elementary, BitsArePinned) {
  std::vector<float> exps, sigmoids, silus;
  for (std::uint64_t pattern = 0; pattern < (std::uint64_t{1} << 32); pattern += 65537) {
    const float x = std::bit_cast<float>(static_cast<std::uint32_t>(pattern));
    if (std::isnan(x)) continue;
    exps.push_back(exp_binary32(x));
    sigmoids.push_back(sigmoid_binary32(x));
    silus.push_back(silu_binary32(x));
  }
  EXPECT_EQ(test::digest(exps), "a3c7943d91e43e93");
  EXPECT_EQ(test::digest(sigmoids), "97e76b5a5b7f20ad");
  EXPECT_EQ(test::digest(silus), "e0ebd654a1d415e6");
}

}  // namespace
}  // namespace loopgauge::reference
