// SPDX-License-Identifier: Apache-2.0
#include "reference/ops/linear.hpp"

#include <gtest/gtest.h>

#include "models/spec/linear.hpp"
#include "tests/reference/support.hpp"

namespace loopgauge::reference {
namespace {

const spec::Tolerance& tolerance() {
  static const spec::Tolerance value = spec::kLinear.outputs[0].tolerance;
  return value;
}

TEST(Linear, EveryTileShapeEqualsTheScalarRestatement) {
  for (const int rows : {0, 1, 2, 3, 5}) {
    for (const int in : {1, 15, 16, 17, 40, 129}) {
      for (const int out : {1, 2, 3, 16, 17, 35}) {
        const auto x = test::bf16_values(static_cast<std::size_t>(rows * in), 1, 12),
                   w = test::bf16_values(static_cast<std::size_t>(out * in), 2, 12);
        Matrix<float> y, raw;
        linear<Declared>(test::matrix<float>(x, rows, in), test::weight_matrix(w, out, in), OutputRounding::bf16, y);
        linear<Declared>(test::matrix<float>(x, rows, in), test::weight_matrix(w, out, in), OutputRounding::fp32, raw);
        ASSERT_EQ(y.rows(), rows);
        ASSERT_EQ(y.cols(), out);
        for (int r = 0; r < rows; ++r) {
          for (int o = 0; o < out; ++o) {
            const float expected = test::plain_dot(x.data() + r * in, w.data() + o * in, in);
            ASSERT_EQ(test::bits(raw(r, o)), test::bits(expected)) << rows << ' ' << in << ' ' << out << " at " << r << ' ' << o;
            ASSERT_EQ(test::bits(y(r, o)), test::bits(test::plain_bf16(expected)));
          }
        }
      }
    }
  }
}

template <class P>
void expect_rows_by_themselves() {
  using Real = typename P::Real;
  const int in = 107, out = 33;
  const auto x = test::bf16_values(7 * 107, 3), w = test::bf16_values(33 * 107, 4);
  const Matrix<Real> rows = test::matrix<Real>(x, 7, in);
  Matrix<Real> all, one;
  linear<P>(rows, test::weight_matrix(w, out, in), OutputRounding::bf16, all);
  for (int r = 0; r < 7; ++r) {
    linear<P>(Matrix<Real>(rows.row(r)), test::weight_matrix(w, out, in), OutputRounding::bf16, one);
    EXPECT_TRUE(one.row(0) == all.row(r)) << r;
  }
}

TEST(Linear, ARowDoesNotDependOnTheOtherRows) {
  expect_rows_by_themselves<Declared>();
  expect_rows_by_themselves<Reordered>();
  expect_rows_by_themselves<DoublePrecision>();
}

TEST(Linear, SmallIntegersAreExactInEveryProfile) {
  const int in = 200, out = 20;
  test::Random random(5);
  std::vector<float> x(in), w(static_cast<std::size_t>(in * out));
  for (float& v : x) v = static_cast<float>(random.below(9) - 4);
  for (float& v : w) v = static_cast<float>(random.below(9) - 4);
  Matrix<float> declared, reordered;
  Matrix<double> exact;
  linear<Declared>(test::matrix<float>(x, 1, in), test::weight_matrix(w, out, in), OutputRounding::fp32, declared);
  linear<Reordered>(test::matrix<float>(x, 1, in), test::weight_matrix(w, out, in), OutputRounding::fp32, reordered);
  linear<DoublePrecision>(test::matrix<double>(x, 1, in), test::weight_matrix(w, out, in), OutputRounding::fp32, exact);
  for (int o = 0; o < out; ++o) {
    int truth = 0;
    for (int i = 0; i < in; ++i)
      truth += static_cast<int>(x[static_cast<std::size_t>(i)]) * static_cast<int>(w[static_cast<std::size_t>(o * in + i)]);
    EXPECT_EQ(declared(0, o), truth);
    EXPECT_EQ(reordered(0, o), truth);
    EXPECT_EQ(exact(0, o), truth);
  }
}

// The declared tolerance holds between two legitimate orders and against double precision, and is not idle: results do differ.
TEST(Linear, OtherOrdersStayWithinTheDeclaredTolerance) {
  const int rows = 16, in = 1024, out = 256;
  const auto x = test::bf16_values(static_cast<std::size_t>(rows * in), 6, 12),
             w = test::bf16_values(static_cast<std::size_t>(out * in), 7, 12);
  Matrix<float> declared, reordered;
  Matrix<double> exact;
  linear<Declared>(test::matrix<float>(x, rows, in), test::weight_matrix(w, out, in), OutputRounding::bf16, declared);
  linear<Reordered>(test::matrix<float>(x, rows, in), test::weight_matrix(w, out, in), OutputRounding::bf16, reordered);
  linear<DoublePrecision>(test::matrix<double>(x, rows, in), test::weight_matrix(w, out, in), OutputRounding::bf16, exact);
  double worst = 0, worst_exact = 0;
  int differing = 0;
  for (int r = 0; r < rows; ++r) {
    for (int o = 0; o < out; ++o) {
      double magnitude = 0;
      for (int i = 0; i < in; ++i)
        magnitude += std::fabs(x[static_cast<std::size_t>(r * in + i)] * w[static_cast<std::size_t>(o * in + i)]);
      const spec::Element element{.expected = declared(r, o), .magnitude = magnitude, .terms = in};
      worst = std::max(worst, spec::error_ratio(tolerance(), element, reordered(r, o)));
      worst_exact = std::max(worst_exact, spec::error_ratio(tolerance(), element, exact(r, o)));
      differing += declared(r, o) != reordered(r, o);
    }
  }
  EXPECT_LE(worst, 1.0);
  EXPECT_LE(worst_exact, 1.0);
  EXPECT_GT(differing, 0);
  EXPECT_LE(differing, tolerance().differing_share * rows * out);
}

TEST(Linear, BitsArePinned) {
  const auto x = test::bf16_values(3 * 384, 8, 12), w = test::bf16_values(50 * 384, 9, 12);
  Matrix<float> y;
  linear<Declared>(test::matrix<float>(x, 3, 384), test::weight_matrix(w, 50, 384), OutputRounding::fp32, y);
  EXPECT_EQ(test::digest(test::to_vector(y)), "e568a16dc910055e");
}

}  // namespace
}  // namespace loopgauge::reference
