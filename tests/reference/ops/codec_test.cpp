// SPDX-License-Identifier: Apache-2.0
// The 4-bit group codec (S-KVQ-2..7).
#include "reference/ops/codec.hpp"

#include <gtest/gtest.h>

#include <limits>

#include "tests/reference/support.hpp"

namespace loopgauge::reference {
namespace {

struct Encoded {
  GroupCode<float> group;
  std::vector<std::uint8_t> codes;
  std::vector<float> decoded() const {
    std::vector<float> values;
    for (const std::uint8_t code : codes) values.push_back(decode_value<float>(code, group.min16, group.scale16));
    return values;
  }
};

Encoded encode(const std::vector<float>& values) {
  Encoded e{{}, std::vector<std::uint8_t>(values.size(), 0xff)};
  e.group = encode_group(values.data(), 1, static_cast<int>(values.size()), e.codes.data());
  return e;
}

using Codes = std::vector<std::uint8_t>;

TEST(Codec, TiesRoundToTheEvenCode) {
  const Encoded e = encode({0, 0.5f, 1.5f, 2.5f, 3.5f, 14.5f, 15});
  EXPECT_EQ(e.group.scale16, 1.0f);
  EXPECT_EQ(e.codes, (Codes{0, 0, 2, 2, 4, 14, 15}));
}

TEST(Codec, EndsOfTheRangeAreCodesZeroAndFifteen) {
  test::Random random(130);
  for (int trial = 0; trial < 2000; ++trial) {
    std::vector<float> values(2 + static_cast<std::size_t>(random.below(63)));
    for (float& x : values) x = std::ldexp(random.uniform(), random.below(8));
    const Encoded e = encode(values);
    if (e.group.scale16 == 0) continue;
    const auto [lo, hi] = std::minmax_element(values.begin(), values.end());
    EXPECT_EQ(e.codes[static_cast<std::size_t>(lo - values.begin())], 0);
    EXPECT_EQ(e.codes[static_cast<std::size_t>(hi - values.begin())], 15);
    for (const std::uint8_t code : e.codes) EXPECT_LE(code, 15);
  }
}

TEST(Codec, CodesUseTheUnroundedParametersAndStorageUsesFp16) {
  const float lo = 1.0f + 0x1p-12f, hi = 3.0f;  // lo is not an FP16 value
  const float scale = (hi - lo) / 15.0f;
  const Encoded e = encode({lo, hi, 2.0f, 2.3f});
  EXPECT_EQ(e.group.min16, 1.0f);
  EXPECT_EQ(e.group.scale16, static_cast<float>(round_to_float16(scale)));
  EXPECT_NE(e.group.scale16, scale);
  EXPECT_EQ(e.codes[2], static_cast<std::uint8_t>(std::nearbyint((2.0f - lo) / scale)));
  EXPECT_EQ(e.codes[3], static_cast<std::uint8_t>(std::nearbyint((2.3f - lo) / scale)));
}

TEST(Codec, ConstantGroupsDecodeToTheStoredMinimum) {
  for (const float value : {2.5f, -3.0f, 0.1f, 0.0f}) {
    const Encoded e = encode(std::vector<float>(5, value));
    EXPECT_EQ(e.codes, Codes(5, 0));
    EXPECT_EQ(e.group.scale16, 0.0f);
    EXPECT_EQ(e.decoded()[0], static_cast<float>(round_to_float16(value)));
  }
}

TEST(Codec, ASingleValueIsAConstantGroup) {
  const Encoded e = encode({-7.25f});
  EXPECT_EQ(e.codes, Codes{0});
  EXPECT_EQ(e.decoded()[0], -7.25f);
}

TEST(Codec, AScaleThatUnderflowsFp16MakesTheGroupConstantASubnormalOneDoesNot) {
  const Encoded underflow = encode({0.0f, 15 * 0x1p-25f});  // scale 2^-25 rounds to zero
  EXPECT_EQ(underflow.group.scale16, 0.0f);
  EXPECT_EQ(underflow.codes, (Codes{0, 0}));
  const Encoded subnormal = encode({0.0f, 15 * 0x1p-24f, 7 * 0x1p-24f});
  EXPECT_EQ(subnormal.group.scale16, 0x1p-24f);
  EXPECT_EQ(subnormal.codes, (Codes{0, 15, 7}));
  EXPECT_EQ(subnormal.decoded(), (std::vector<float>{0.0f, 15 * 0x1p-24f, 7 * 0x1p-24f}));
}

TEST(Codec, MinimumThatUnderflowsFp16IsStoredAsZeroAndTheGroupStillDecodes) {
  const Encoded e = encode({0x1p-30f, 1.0f});
  EXPECT_EQ(e.group.min16, 0.0f);
  EXPECT_NEAR(e.decoded()[1], 1.0f, 1e-3f);
}

TEST(Codec, AZeroMinimumIsPlusZeroInEveryOrder) {
  EXPECT_EQ(test::bits(encode({-0.0f, 0.0f, 1.0f}).group.min16), 0u);
  EXPECT_EQ(test::bits(encode({0.0f, -0.0f, 1.0f}).group.min16), 0u);
  EXPECT_EQ(test::bits(encode({-0.0f}).group.min16), 0u);
}

TEST(Codec, TheScaleOfZerosIsPlusZeroInEveryOrder) {
  for (const std::vector<float>& zeros : {std::vector{-0.0f, 0.0f}, std::vector{0.0f, -0.0f}, std::vector{-0.0f, -0.0f, 0.0f}, std::vector{-0.0f}}) {
    EXPECT_EQ(test::bits(encode(zeros).group.scale16), 0u) << zeros.size() << " zeros, the first " << zeros.front();
  }
  EXPECT_EQ(test::bits(encode({-0.0f, 0x1p-30f}).group.scale16), 0u) << "a scale that rounds to zero";
  EXPECT_EQ(test::bits(encode({-15.0f, -0.0f}).group.scale16), test::bits(1.0f));
}

TEST(Codec, ParametersDoNotDependOnTheOrderOfValuesAndCodesMoveWithThem) {
  test::Random random(131);
  for (int trial = 0; trial < 500; ++trial) {
    std::vector<float> values(64);
    for (float& x : values) x = random.below(3) == 0 ? 0.0f * random.uniform() : random.bf16(8);
    std::vector<std::size_t> order(64);
    for (std::size_t i = 0; i < 64; ++i) order[i] = (i * 37 + 11) % 64;
    std::vector<float> moved(64);
    for (std::size_t i = 0; i < 64; ++i) moved[i] = values[order[i]];
    const Encoded a = encode(values), b = encode(moved);
    ASSERT_EQ(test::bits(a.group.min16), test::bits(b.group.min16));
    ASSERT_EQ(test::bits(a.group.scale16), test::bits(b.group.scale16));
    for (std::size_t i = 0; i < 64; ++i) ASSERT_EQ(b.codes[i], a.codes[order[i]]);
  }
}

TEST(Codec, ValuesOutsideTheRangeAreReported) {
  const float infinity = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  EXPECT_FALSE(encode({1, nan, 2}).group.valid);
  EXPECT_FALSE(encode({nan}).group.valid);
  EXPECT_FALSE(encode({1, infinity}).group.valid);
  EXPECT_FALSE(encode({-infinity, 1}).group.valid);
  EXPECT_FALSE(encode({-65520.0f, 0}).group.valid) << "the minimum rounds to FP16 infinity";
  EXPECT_TRUE(encode({-65519.0f, 0}).group.valid);
  EXPECT_FALSE(encode({65520.0f}).group.valid);
  EXPECT_FALSE(encode({0, 15 * 65520.0f}).group.valid) << "the scale rounds to FP16 infinity";
  EXPECT_TRUE(encode({0, 15 * 65504.0f}).group.valid);
  EXPECT_FALSE(encode({-3e38f, 3e38f}).group.valid) << "the span overflows FP32";
}

TEST(Codec, ErrorIsHalfAStepPlusTheRoundingOfTheParameters) {
  test::Random random(132);
  for (int trial = 0; trial < 500; ++trial) {
    std::vector<float> values(64);
    for (float& x : values) x = random.bf16(6);
    const Encoded e = encode(values);
    const auto decoded = e.decoded();
    for (std::size_t i = 0; i < 64; ++i) {
      const double allowed = 0.5 * e.group.scale16 + 0x1p-10 * std::fabs(e.group.min16) + 15 * 0x1p-10 * e.group.scale16 + 0x1p-20;
      ASSERT_LE(std::fabs(decoded[i] - values[i]), allowed);
    }
  }
}

TEST(Codec, FusedAndUnfusedDecodeAgree) {
  test::Random random(133);
  for (int trial = 0; trial < 20000; ++trial) {
    const float scale = static_cast<float>(round_to_float16(std::ldexp(random.uniform(), random.below(30) - 20)));
    const float min = static_cast<float>(round_to_float16(std::ldexp(random.uniform(), random.below(30) - 20)));
    const std::uint8_t code = static_cast<std::uint8_t>(random.below(16));
    ASSERT_EQ(test::bits(decode_value<float>(code, min, scale)), test::bits(std::fma(static_cast<float>(code), scale, min)));
  }
}

TEST(Codec, StridedGroupsTouchOnlyTheirElements) {
  const std::vector<float> values{1, 100, 2, 200, 3, 300};
  Codes codes(6, 0xee);
  const auto group = encode_group(values.data(), 2, 3, codes.data());
  EXPECT_EQ(group.min16, 1.0f);
  EXPECT_EQ(codes, (Codes{0, 0xee, 7, 0xee, 15, 0xee})) << "2 / 15 rounds up in FP32, so the quotient lies just below 7.5";
}

TEST(Codec, BitsArePinned) {
  test::Random random(134);
  std::vector<float> parameters;
  Codes all;
  for (int trial = 0; trial < 2000; ++trial) {
    std::vector<float> values(1 + static_cast<std::size_t>(random.below(64)));
    for (float& x : values) x = std::ldexp(random.uniform(), random.below(12) - 6);
    const Encoded e = encode(values);
    parameters.push_back(e.group.min16);
    parameters.push_back(e.group.scale16);
    all.insert(all.end(), e.codes.begin(), e.codes.end());
  }
  EXPECT_EQ(test::digest(parameters), "32d71a9d5f454019");
  EXPECT_EQ(test::digest(std::span<const std::uint8_t>(all)), "6b1f5eff42c9f7f3");
}

}  // namespace
}  // namespace loopgauge::reference
