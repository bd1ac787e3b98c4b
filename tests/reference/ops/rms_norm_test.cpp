// SPDX-License-Identifier: Apache-2.0
#include "reference/ops/rms_norm.hpp"

#include <gtest/gtest.h>

#include "models/spec/rms_norm.hpp"
#include "tests/reference/support.hpp"

namespace loopgauge::reference {
namespace {

template <class P>
Matrix<typename P::Real> norm(const std::vector<float>& x, const std::vector<float>& weight, float eps) {
  const int hidden = static_cast<int>(weight.size()), rows = static_cast<int>(x.size()) / hidden;
  Matrix<typename P::Real> y;
  rms_norm<P>(test::matrix<typename P::Real>(x, rows, hidden), test::vector_of<typename P::Real>(weight), eps, y);
  return y;
}

TEST(RmsNorm, ByHand) {
  const auto y = norm<Declared>({2, -2, 2, -2}, {1, 1, 3, 0.5f}, 0.0f);  // mean square 4, inv 0.5
  EXPECT_EQ(test::to_vector(y), (std::vector<float>{1, -1, 3, -0.5f}));
  const auto with_eps = norm<Declared>({1, 1}, {1, 1}, 3.0f);  // 1 / sqrt(1 + 3)
  EXPECT_EQ(test::to_vector(with_eps), (std::vector<float>{0.5f, 0.5f}));
  const auto zero = norm<Declared>({0, 0, 0}, {1, 2, 3}, 1e-6f);
  EXPECT_EQ(test::to_vector(zero), (std::vector<float>{0, 0, 0}));
}

TEST(RmsNorm, EqualsTheScalarRestatement) {
  for (const int hidden : {1, 16, 48, 384, 385}) {
    const auto x = test::bf16_values(static_cast<std::size_t>(3 * hidden), 11, 6),
               weight = test::bf16_values(static_cast<std::size_t>(hidden), 12, 1);
    const float eps = 1e-6f;
    const auto y = norm<Declared>(x, weight, eps);
    for (int t = 0; t < 3; ++t) {
      const float* row = x.data() + t * hidden;
      const float mean = test::plain_dot(row, row, hidden) / static_cast<float>(hidden);
      const float inv = 1.0f / std::sqrt(mean + eps);
      for (int i = 0; i < hidden; ++i) {
        const float expected = test::plain_bf16(weight[static_cast<std::size_t>(i)] * test::plain_bf16(row[i] * inv));
        ASSERT_EQ(test::bits(y(t, i)), test::bits(expected)) << hidden << ' ' << t << ' ' << i;
      }
    }
  }
}

TEST(RmsNorm, RoundsTwice) {
  const auto x = test::bf16_values(512, 13), weight = test::bf16_values(512, 14, 0);
  const auto y = norm<Declared>(x, weight, 1e-6f);
  const float inv = 1.0f / std::sqrt(test::plain_dot(x.data(), x.data(), 512) / 512.0f + 1e-6f);
  int differs_from_one_rounding = 0;
  for (int i = 0; i < 512; ++i) {
    differs_from_one_rounding += y(0, i) != test::plain_bf16(weight[static_cast<std::size_t>(i)] * (x[static_cast<std::size_t>(i)] * inv));
  }
  EXPECT_GT(differs_from_one_rounding, 50) << "about a quarter of the elements show the second rounding";
}

TEST(RmsNorm, MayWriteOverItsInput) {
  const auto x = test::bf16_values(2 * 64, 15), weight = test::bf16_values(64, 16, 1);
  const auto expected = norm<Declared>(x, weight, 1e-6f);
  auto in_place = test::matrix<float>(x, 2, 64);
  rms_norm<Declared>(in_place, test::vector_of<float>(weight), 1e-6f, in_place);
  EXPECT_TRUE(in_place == expected);
}

TEST(RmsNorm, OtherOrdersStayWithinTheDeclaredTolerance) {
  const spec::Tolerance tolerance = spec::kRmsNorm.outputs[0].relaxed;
  const auto x = test::bf16_values(64 * 1024, 17, 10), weight = test::bf16_values(1024, 18, 1);
  const auto declared = norm<Declared>(x, weight, 1e-6f), reordered = norm<Reordered>(x, weight, 1e-6f);
  int differing = 0;
  for (std::ptrdiff_t i = 0; i < declared.size(); ++i) {
    ASSERT_LE(spec::error_ratio(tolerance, {.expected = declared.data()[i]}, reordered.data()[i]), 1.0) << i;
    differing += declared.data()[i] != reordered.data()[i];
  }
  EXPECT_LE(differing, tolerance.differing_share * static_cast<double>(declared.size()));
  const auto exact = norm<DoublePrecision>(x, weight, 1e-6f);
  for (std::ptrdiff_t i = 0; i < declared.size(); ++i) {
    // Two roundings to BF16, half a spacing each, on values that double precision does not round.
    ASSERT_LE(std::fabs(declared.data()[i] - exact.data()[i]), (2 * 0x1p-8 + 0x1p-12) * std::fabs(exact.data()[i])) << i;
  }
}

TEST(RmsNorm, BitsArePinned) {
  EXPECT_EQ(test::digest(test::to_vector(norm<Declared>(test::bf16_values(4 * 384, 19, 10), test::bf16_values(384, 20, 1), 1e-6f))),
            "9b0e070c6637a258");
}

}  // namespace
}  // namespace loopgauge::reference
