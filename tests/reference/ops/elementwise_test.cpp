// SPDX-License-Identifier: Apache-2.0
// embedding, residual_add, swiglu, exit_gate, exit_step, head_argmax.
#include <gtest/gtest.h>

#include <limits>

#include "models/spec/swiglu.hpp"
#include "reference/ops/embedding.hpp"
#include "reference/ops/exit_gate.hpp"
#include "reference/ops/head_argmax.hpp"
#include "reference/ops/residual_add.hpp"
#include "reference/ops/swiglu.hpp"
#include "tests/reference/support.hpp"

namespace loopgauge::reference {
namespace {

TEST(Embedding, CopiesRowsInTheOrderOfTheTokens) {
  const auto table = test::weight_matrix({1, 2, 3, 4, 5, 6}, 3, 2);
  const std::vector<std::int32_t> tokens{2, 0, 2};
  Matrix<float> y;
  embedding<float>(tokens, table, y);
  EXPECT_EQ(test::to_vector(y), (std::vector<float>{5, 6, 1, 2, 5, 6}));
}

TEST(ResidualAdd, RoundsOnceAndMayWriteOverItsInput) {
  // 1 + 2^-8 is half a BF16 spacing above 1: a tie, to even. 1 + 3 * 2^-8 rounds up.
  auto a = test::matrix<float>({1, 1, -3, 0x1p-8f}, 1, 4);
  const auto b = test::matrix<float>({0x1p-8f, 0x1.8p-7f, 3, 0x1p-8f}, 1, 4);
  residual_add<Declared>(a, b, a);
  EXPECT_EQ(test::to_vector(a), (std::vector<float>{1, 1 + 0x1p-6f, 0, 0x1p-7f}));
}

TEST(ResidualAdd, RoundingThroughFp32EqualsOneRoundingToBf16) {
  test::Random random(30);
  for (int i = 0; i < 20000; ++i) {
    const float a = random.bf16(30), b = random.bf16(30);
    Matrix<float> x(1, 1), y(1, 1), z;
    x(0, 0) = a, y(0, 0) = b;
    residual_add<Declared>(x, y, z);
    // The exact sum fits binary64 here; its nearest BF16 by distance, ties to even.
    const double exact = static_cast<double>(a) + b;
    const float near = test::plain_bf16(static_cast<float>(exact));
    const double step = std::ldexp(1.0, (exact == 0 ? -126 : std::ilogb(exact)) - 7);
    EXPECT_LE(std::fabs(z(0, 0) - exact), step / 2);
    EXPECT_EQ(z(0, 0), near);
  }
}

TEST(Swiglu, RoundsTheActivationAndTheProduct) {
  const auto gate = test::bf16_values(600, 31, 12), up = test::bf16_values(600, 32, 3);
  Matrix<float> y;
  swiglu<Declared>(test::matrix<float>(gate, 3, 200), test::matrix<float>(up, 3, 200), y);
  int differs_from_one_rounding = 0;
  for (int i = 0; i < 600; ++i) {
    const std::size_t j = static_cast<std::size_t>(i);
    const float expected = test::plain_bf16(test::plain_bf16(silu_binary32(gate[j])) * up[j]);
    ASSERT_EQ(test::bits(y.data()[i]), test::bits(expected)) << i;
    differs_from_one_rounding += y.data()[i] != test::plain_bf16(silu_binary32(gate[j]) * up[j]);
  }
  EXPECT_GT(differs_from_one_rounding, 60);
}

TEST(Swiglu, DoubleProfileAgreesWithinTwoBf16Roundings) {
  const auto gate = test::bf16_values(400, 33, 6), up = test::bf16_values(400, 34, 3);
  Matrix<float> y;
  Matrix<double> exact;
  swiglu<Declared>(test::matrix<float>(gate, 1, 400), test::matrix<float>(up, 1, 400), y);
  swiglu<DoublePrecision>(test::matrix<double>(gate, 1, 400), test::matrix<double>(up, 1, 400), exact);
  for (int i = 0; i < 400; ++i) ASSERT_LE(std::fabs(y(0, i) - exact(0, i)), (2 * 0x1p-8 + 0x1p-15) * std::fabs(exact(0, i))) << i;
}

TEST(ExitGate, AddsTheBiasToTheDotInFp32) {
  const auto h = test::bf16_values(100, 35), w = test::bf16_values(100, 36);
  EXPECT_EQ(exit_gate<Declared>(h.data(), w.data(), 0.75f, 100), test::plain_dot(h.data(), w.data(), 100) + 0.75f);
  EXPECT_EQ(exit_gate<Declared>(h.data(), w.data(), -0.5f, 0), -0.5f);
}

// A gate of 0 means sigmoid 1/2: the exit probability after loops 1, 2, 3 is 1/2, 3/4, 7/8.
int first_exit(const ExitRule& rule, float gate) {
  ExitHazard<Declared> hazard;
  int first = 0;
  for (int loop = 1; loop <= 4; ++loop) {
    if (hazard.fires(rule, loop, gate) && first == 0) first = loop;
  }
  return first;
}

TEST(ExitStep, ThresholdIsReachedByTheAccumulatedHazard) {
  EXPECT_EQ(first_exit({ExitMode::threshold, 0.5f, 1}, 0.0f), 1) << "equality exits";
  EXPECT_EQ(first_exit({ExitMode::threshold, 0.6f, 1}, 0.0f), 2);
  EXPECT_EQ(first_exit({ExitMode::threshold, 0.75f, 1}, 0.0f), 2);
  EXPECT_EQ(first_exit({ExitMode::threshold, 0.8f, 1}, 0.0f), 3);
  EXPECT_EQ(first_exit({ExitMode::threshold, 0.0f, 1}, -200.0f), 1) << "a threshold of zero always exits";
}

TEST(ExitStep, LoopsBelowMinLoopsAccumulateWithoutExit) {
  EXPECT_EQ(first_exit({ExitMode::threshold, 0.5f, 3}, 0.0f), 3);
  EXPECT_EQ(first_exit({ExitMode::threshold, 0.85f, 3}, 0.0f), 3) << "7/8 after loop 3 counts loops 1 and 2";
}

TEST(ExitStep, AThresholdOfOneNeverExits) { EXPECT_EQ(first_exit({ExitMode::threshold, 1.0f, 1}, 100.0f), 0); }

TEST(ExitStep, SurvivalIsRoundedInFp32AfterEveryOperation) {
  ExitHazard<Declared> hazard;
  float survival = 1.0f;
  const std::vector<float> gates{-1.25f, 0.3f, -2.0f, 0.9f};
  for (int loop = 1; loop <= 4; ++loop) {
    const float keep = 1.0f - sigmoid_binary32(gates[static_cast<std::size_t>(loop - 1)]);
    survival = survival * keep;
    const float reached = 1.0f - survival;
    ExitHazard<Declared> copy = hazard;
    EXPECT_TRUE(copy.fires({ExitMode::threshold, reached, 1}, loop, gates[static_cast<std::size_t>(loop - 1)])) << loop;
    EXPECT_FALSE(hazard.fires({ExitMode::threshold, std::nextafter(reached, 2.0f), 1}, loop, gates[static_cast<std::size_t>(loop - 1)]))
        << loop;
  }
}

TEST(HeadArgmax, TiesGoToTheLowestId) {
  EXPECT_EQ(argmax(std::span<const float>(std::vector<float>{1, 3, 2, 3})), 1);
  EXPECT_EQ(argmax(std::span<const float>(std::vector<float>{-0.0f, 0.0f})), 0) << "-0 equals +0";
  EXPECT_EQ(argmax(std::span<const float>(std::vector<float>{-5})), 0);
}

}  // namespace
}  // namespace loopgauge::reference
