// SPDX-License-Identifier: Apache-2.0
// Operations on rows whose bits are promised: every element equals the reference's, for ragged row counts and widths, with outliers.
#include <cmath>

#include "optimized/ops/compact_rows.cuh"
#include "optimized/ops/embedding.cuh"
#include "optimized/ops/residual_add.cuh"
#include "optimized/ops/rms_norm.cuh"
#include "optimized/ops/rope.cuh"
#include "optimized/ops/swiglu.cuh"
#include "optimized/ops/update_score.cuh"
#include "reference/ops/embedding.hpp"
#include "reference/ops/residual_add.hpp"
#include "reference/ops/rms_norm.hpp"
#include "reference/ops/rope.hpp"
#include "reference/ops/swiglu.hpp"
#include "reference/ops/token_selection.hpp"
#include "tests/equivalence/device_fixture.hpp"

namespace loopgauge::test {
namespace {

using optimized::Bfloat16;
using reference::Declared;
using reference::Matrix;
using reference::Vector;

constexpr float kEpsilon = 1e-6f;

Vector<float> to_vector(const Bits& bits) { return to_matrix(bits, static_cast<int>(bits.size()), 1); }

class RowsTest : public DeviceTest {};

struct Shape {
  int rows, hidden;
};
const Shape kShapes[] = {{1, 8}, {1, 384}, {7, 64}, {65, 2048}, {3, 1000}, {130, 384}, {2, 2056}, {2, 8192}};

TEST_F(RowsTest, RmsNormHasTheReferenceBits) {
  std::uint32_t seed = 1;
  for (const auto [rows, hidden] : kShapes) {
    for (const float scale : {1.0f, 1e-4f, 300.0f}) {
      const Bits input = random_bits(static_cast<std::size_t>(rows) * hidden, ++seed, scale), weight = random_bits(hidden, ++seed);
      Matrix<float> expected;
      reference::rms_norm<Declared>(to_matrix(input, rows, hidden), to_vector(weight), kEpsilon, expected);
      const auto x = upload(input), w = upload(weight);
      auto y = poisoned<std::uint16_t>(input.size());
      optimized::rms_norm(x.as<Bfloat16>(), w.as<Bfloat16>(), y.as<Bfloat16>(), rows, hidden, kEpsilon, *stream_);
      EXPECT_TRUE(same_bits(to_bits(expected), download<std::uint16_t>(y, input.size()))) << rows << " x " << hidden << ", scale " << scale;
    }
  }
}

TEST_F(RowsTest, RmsNormOfAZeroRowIsZero) {
  const Bits zeros(64, 0), weight = random_bits(64, 3);
  const auto x = upload(zeros), w = upload(weight);
  auto y = poisoned<std::uint16_t>(64);
  optimized::rms_norm(x.as<Bfloat16>(), w.as<Bfloat16>(), y.as<Bfloat16>(), 1, 64, kEpsilon, *stream_);
  for (const std::uint16_t bits : download<std::uint16_t>(y, 64)) EXPECT_EQ(bits & 0x7FFF, 0);
}

TEST_F(RowsTest, NormAndResidualAddFusedAndApartHaveTheReferenceBits) {
  std::uint32_t seed = 100;
  for (const auto [rows, hidden] : kShapes) {
    const auto count = static_cast<std::size_t>(rows) * hidden;
    const Bits input = random_bits(count, ++seed), weight = random_bits(hidden, ++seed), residual = random_bits(count, ++seed), next_weight = random_bits(hidden, ++seed);
    Matrix<float> normed, expected, expected_next;
    reference::rms_norm<Declared>(to_matrix(input, rows, hidden), to_vector(weight), kEpsilon, normed);
    reference::residual_add<Declared>(to_matrix(residual, rows, hidden), normed, expected);
    reference::rms_norm<Declared>(expected, to_vector(next_weight), kEpsilon, expected_next);

    const auto x = upload(input), w = upload(weight), next_w = upload(next_weight);
    auto fused = upload(residual), apart = upload(residual), with_next = upload(residual);
    auto y = poisoned<std::uint16_t>(count), next = poisoned<std::uint16_t>(count);
    optimized::rms_norm_residual_add_rms_norm(x.as<Bfloat16>(), w.as<Bfloat16>(), with_next.as<Bfloat16>(), next_w.as<Bfloat16>(), next.as<Bfloat16>(), rows, hidden,
                                              kEpsilon, *stream_);
    EXPECT_TRUE(same_bits(to_bits(expected), download<std::uint16_t>(with_next, count))) << rows << " x " << hidden;
    EXPECT_TRUE(same_bits(to_bits(expected_next), download<std::uint16_t>(next, count))) << rows << " x " << hidden;
    optimized::rms_norm_residual_add(x.as<Bfloat16>(), w.as<Bfloat16>(), fused.as<Bfloat16>(), rows, hidden, kEpsilon, *stream_);
    optimized::rms_norm(x.as<Bfloat16>(), w.as<Bfloat16>(), y.as<Bfloat16>(), rows, hidden, kEpsilon, *stream_);
    optimized::residual_add(apart.as<Bfloat16>(), y.as<Bfloat16>(), count, *stream_);
    EXPECT_TRUE(same_bits(to_bits(expected), download<std::uint16_t>(fused, count))) << rows << " x " << hidden;
    EXPECT_TRUE(same_bits(to_bits(expected), download<std::uint16_t>(apart, count))) << rows << " x " << hidden;
  }
}

TEST_F(RowsTest, FinalNormAndScoreHaveTheReferenceBits) {
  std::uint32_t seed = 200;
  for (const auto [rows, hidden] : kShapes) {
    const auto count = static_cast<std::size_t>(rows) * hidden;
    const Bits input = random_bits(count, ++seed), weight = random_bits(hidden, ++seed), before = random_bits(count, ++seed);
    Matrix<float> expected;
    reference::rms_norm<Declared>(to_matrix(input, rows, hidden), to_vector(weight), kEpsilon, expected);
    const Matrix<float> previous = to_matrix(before, rows, hidden);
    std::vector<float> scores;
    for (int row = 0; row < rows; ++row) scores.push_back(reference::update_score<Declared>(expected.row(row).data(), previous.row(row).data(), hidden));

    const auto x = upload(input), w = upload(weight), old = upload(before);
    auto y = poisoned<std::uint16_t>(count), s = poisoned<float>(static_cast<std::size_t>(rows));
    optimized::final_norm_update_score(x.as<Bfloat16>(), w.as<Bfloat16>(), old.as<Bfloat16>(), y.as<Bfloat16>(), s.as<float>(), rows, hidden,
                                       kEpsilon, *stream_);
    EXPECT_TRUE(same_bits(to_bits(expected), download<std::uint16_t>(y, count))) << rows << " x " << hidden;
    EXPECT_TRUE(same_bits(scores, download<float>(s, static_cast<std::size_t>(rows)))) << rows << " x " << hidden;

    auto unscored = poisoned<std::uint16_t>(count);
    optimized::final_norm_update_score(x.as<Bfloat16>(), w.as<Bfloat16>(), nullptr, unscored.as<Bfloat16>(), nullptr, rows, hidden, kEpsilon, *stream_);
    EXPECT_TRUE(same_bits(to_bits(expected), download<std::uint16_t>(unscored, count))) << rows << " x " << hidden;
  }
}

TEST_F(RowsTest, AScoreOfAZeroRowUsesTheSmallestLength) {
  const int hidden = 16;
  const Bits zeros(hidden, 0), before = random_bits(hidden, 5), weight = random_bits(hidden, 6);
  const Matrix<float> now = to_matrix(zeros, 1, hidden), previous = to_matrix(before, 1, hidden);
  const auto x = upload(zeros), w = upload(weight), old = upload(before);
  auto y = poisoned<std::uint16_t>(hidden), s = poisoned<float>(1);
  optimized::final_norm_update_score(x.as<Bfloat16>(), w.as<Bfloat16>(), old.as<Bfloat16>(), y.as<Bfloat16>(), s.as<float>(), 1, hidden, kEpsilon,
                                     *stream_);
  const std::vector<float> expected{reference::update_score<Declared>(now.data(), previous.data(), hidden)};
  EXPECT_GT(expected[0], 1e9f);
  EXPECT_TRUE(same_bits(expected, download<float>(s, 1)));
}

// Every BF16 pattern as the gate, NaN and infinities included where the reference gives a number.
TEST_F(RowsTest, SwigluHasTheReferenceBitsForEveryGate) {
  const int rows = 64, columns = 1024;
  Bits gate(static_cast<std::size_t>(rows) * columns), up = random_bits(gate.size(), 9);
  for (std::size_t i = 0; i < gate.size(); ++i) {
    const auto pattern = static_cast<std::uint16_t>(i);
    gate[i] = (pattern & 0x7F80) == 0x7F80 ? 0 : pattern;  // finite gates only
  }
  Matrix<float> expected;
  reference::swiglu<Declared>(to_matrix(gate, rows, columns), to_matrix(up, rows, columns), expected);
  Bits both;
  for (int row = 0; row < rows; ++row) {
    both.insert(both.end(), gate.begin() + row * columns, gate.begin() + (row + 1) * columns);
    both.insert(both.end(), up.begin() + row * columns, up.begin() + (row + 1) * columns);
  }
  const auto input = upload(both);
  auto y = poisoned<std::uint16_t>(gate.size());
  optimized::swiglu(input.as<Bfloat16>(), y.as<Bfloat16>(), rows, columns, *stream_);
  EXPECT_TRUE(same_bits(to_bits(expected), download<std::uint16_t>(y, gate.size())));
}

TEST_F(RowsTest, RopeHasTheReferenceBitsAtAnyPositions) {
  for (const int head_dim : {64, 128}) {
    const int heads = 3, positions = 2048;
    const std::vector<int> places{0, 1, 5, 63, 64, 700, 2047};
    const int rows = static_cast<int>(places.size()), width = heads * head_dim, stride = 3 * width;
    const reference::RopeTable<Declared> table(positions, head_dim, 10000.0);
    const optimized::RopeTable own = optimized::make_rope_table(positions, head_dim, 10000.0);
    EXPECT_TRUE(same_bits(to_bits(table.cos), own.cosine));
    EXPECT_TRUE(same_bits(to_bits(table.sin), own.sine));

    const Bits input = random_bits(static_cast<std::size_t>(rows) * stride, 17);
    Matrix<float> expected = to_matrix(input, rows, stride);
    Matrix<float> rotated = expected.leftCols(width);
    reference::rope<Declared>(rotated, places, head_dim, table);
    expected.leftCols(width) = rotated;

    auto x = upload(input);
    const auto where = upload(std::vector<std::int32_t>(places.begin(), places.end()));
    const auto cosine = upload(own.cosine), sine = upload(own.sine);
    optimized::rope(x.as<Bfloat16>(), stride, where.as<std::int32_t>(), cosine.as<Bfloat16>(), sine.as<Bfloat16>(), rows, heads, head_dim, *stream_);
    EXPECT_TRUE(same_bits(to_bits(expected), download<std::uint16_t>(x, input.size()))) << "head_dim " << head_dim;
  }
}

TEST_F(RowsTest, EmbeddingGatherAndScatterCopyTheRightRows) {
  const int vocab = 50, hidden = 40;
  const Bits table = random_bits(static_cast<std::size_t>(vocab) * hidden, 21);
  const std::vector<std::int32_t> tokens{49, 0, 7, 7, 31};
  const int rows = static_cast<int>(tokens.size());
  Matrix<float> expected;
  reference::embedding<float>(tokens, to_bit_matrix(table, vocab, hidden), expected);
  const auto t = upload(table), ids = upload(tokens);
  const auto count = static_cast<std::size_t>(rows) * hidden;
  auto embedded = poisoned<std::uint16_t>(count), gathered = poisoned<std::uint16_t>(count);
  optimized::embedding(ids.as<std::int32_t>(), t.as<Bfloat16>(), embedded.as<Bfloat16>(), rows, hidden, *stream_);
  optimized::gather_rows(t.as<Bfloat16>(), ids.as<std::int32_t>(), gathered.as<Bfloat16>(), rows, hidden, *stream_);
  EXPECT_TRUE(same_bits(to_bits(expected), download<std::uint16_t>(embedded, count)));
  EXPECT_TRUE(same_bits(to_bits(expected), download<std::uint16_t>(gathered, count)));

  const std::vector<std::int32_t> places{3, 0, 9, 4, 8};
  const auto where = upload(places);
  auto spread = upload(Bits(10 * hidden, 0x1234));
  optimized::scatter_rows(gathered.as<Bfloat16>(), where.as<std::int32_t>(), spread.as<Bfloat16>(), rows, hidden, *stream_);
  Bits wanted(10 * hidden, 0x1234);
  const Bits source = to_bits(expected);
  for (int i = 0; i < rows; ++i) std::copy_n(source.begin() + i * hidden, hidden, wanted.begin() + places[static_cast<std::size_t>(i)] * hidden);
  EXPECT_TRUE(same_bits(wanted, download<std::uint16_t>(spread, wanted.size())));
}

}  // namespace
}  // namespace loopgauge::test
