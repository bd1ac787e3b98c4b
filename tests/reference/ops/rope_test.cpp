// SPDX-License-Identifier: Apache-2.0
#include "reference/ops/rope.hpp"

#include <gtest/gtest.h>

#include <numeric>

#include "tests/reference/support.hpp"

namespace loopgauge::reference {
namespace {

// Positions slowest, the cosines of a position before its sines, little-endian BF16 (S-ROPE-3).
std::string table_digest(const RopeTable<Declared>& table) {
  std::vector<std::uint16_t> words;
  for (std::ptrdiff_t p = 0; p < table.cos.rows(); ++p) {
    for (std::ptrdiff_t i = 0; i < table.cos.cols(); ++i) words.push_back(test::bf16_bits(table.cos(p, i)));
    for (std::ptrdiff_t i = 0; i < table.sin.cols(); ++i) words.push_back(test::bf16_bits(table.sin(p, i)));
  }
  return test::digest(std::span<const std::uint16_t>(words));
}

// The one use of the C library: if its pow, cos or sin ever rounds another way somewhere in these tables, this says so.
TEST(RopeTable, DigestOfTheShippedModelsTable) { EXPECT_EQ(table_digest(RopeTable<Declared>(2048, 128, 10000.0)), "ac56ec52775367d6"); }
TEST(RopeTable, DigestOfTheLargeModelsTable) { EXPECT_EQ(table_digest(RopeTable<Declared>(8192, 128, 1000000.0)), "5a2ed2da2ea686b3"); }

TEST(RopeTable, EntriesAreBf16AndCloseToTheTruth) {
  const RopeTable<Declared> table(1024, 64, 10000.0);
  for (int p = 0; p < 1024; p += 7) {
    for (int i = 0; i < 32; ++i) {
      const long double angle = p * std::pow(10000.0L, -2.0L * i / 64);
      const long double allowed = 0x1p-9L + 0x1p-23L * angle + 0x1p-23L;  // half a BF16 spacing below 1, and the FP32 angle
      ASSERT_LE(std::fabs(table.cos(p, i) - std::cos(angle)), allowed) << p << ' ' << i;
      ASSERT_LE(std::fabs(table.sin(p, i) - std::sin(angle)), allowed) << p << ' ' << i;
      ASSERT_EQ(test::bits(table.cos(p, i)) & 0xffffu, 0u);
    }
  }
}

TEST(Rope, RotatesHalvesNotNeighbours) {
  const RopeTable<Declared> table(8, 4, 100.0);
  const int position[] = {3};
  auto x = test::matrix<float>({1, 0, 0, 0}, 1, 4);
  rope<Declared>(x, position, 4, table);
  EXPECT_EQ(x(0, 0), table.cos(3, 0));
  EXPECT_EQ(x(0, 2), table.sin(3, 0));
  EXPECT_EQ(x(0, 1), 0.0f);
  auto y = test::matrix<float>({0, 0, 0, 1}, 1, 4);
  rope<Declared>(y, position, 4, table);
  EXPECT_EQ(y(0, 1), -table.sin(3, 1));
  EXPECT_EQ(y(0, 3), table.cos(3, 1));
}

TEST(Rope, PositionZeroIsTheIdentity) {
  const RopeTable<Declared> table(1, 64, 10000.0);
  const int position[] = {0};
  const auto values = test::bf16_values(128, 21);
  auto x = test::matrix<float>(values, 1, 128);
  rope<Declared>(x, position, 64, table);
  EXPECT_EQ(test::to_vector(x), values);
}

TEST(Rope, EqualsTheScalarRestatementWithThreeRoundings) {
  const int head_dim = 32, heads = 3, half = 16;
  const RopeTable<Declared> table(300, head_dim, 10000.0);
  const std::vector<int> positions{0, 17, 5, 299};
  const auto values = test::bf16_values(positions.size() * 96, 22);
  auto x = test::matrix<float>(values, 4, 96);
  rope<Declared>(x, positions, head_dim, table);
  for (int t = 0; t < 4; ++t) {
    for (int h = 0; h < heads; ++h) {
      const float* in = values.data() + t * 96 + h * head_dim;
      for (int i = 0; i < head_dim; ++i) {
        const float c = table.cos(positions[static_cast<std::size_t>(t)], i % half),
                    s = table.sin(positions[static_cast<std::size_t>(t)], i % half);
        const float rotated = i < half ? -in[i + half] : in[i - half];
        const float expected = test::plain_bf16(test::plain_bf16(in[i] * c) + test::plain_bf16(rotated * s));
        ASSERT_EQ(test::bits(x(t, h * head_dim + i)), test::bits(expected)) << t << ' ' << h << ' ' << i;
      }
    }
  }
}

TEST(Rope, UsesThePositionOfTheTokenWhateverItsRow) {
  const RopeTable<Declared> table(64, 32, 10000.0);
  std::vector<int> all(64);
  std::iota(all.begin(), all.end(), 0);
  const auto values = test::bf16_values(64 * 32, 23);
  auto full = test::matrix<float>(values, 64, 32);
  Matrix<float> compact(3, 32);
  const std::vector<int> chosen{9, 40, 63};
  for (int i = 0; i < 3; ++i) compact.row(i) = full.row(chosen[static_cast<std::size_t>(i)]);
  rope<Declared>(full, all, 32, table);
  rope<Declared>(compact, chosen, 32, table);
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(compact.row(i) == full.row(chosen[static_cast<std::size_t>(i)])) << i;
}

TEST(Rope, DoubleProfileRotatesWithoutRounding) {
  const RopeTable<DoublePrecision> table(100, 16, 10000.0);
  const int position[] = {99};
  const auto values = test::bf16_values(16, 24);
  auto x = test::matrix<double>(values, 1, 16);
  rope<DoublePrecision>(x, position, 16, table);
  for (int i = 0; i < 8; ++i) {
    const double angle = 99 * std::pow(10000.0, -2.0 * i / 16), a = values[static_cast<std::size_t>(i)],
                 b = values[static_cast<std::size_t>(i + 8)];
    EXPECT_NEAR(x(0, i), a * std::cos(angle) - b * std::sin(angle), 1e-12);
    EXPECT_NEAR(x(0, i + 8), b * std::cos(angle) + a * std::sin(angle), 1e-12);
  }
}

}  // namespace
}  // namespace loopgauge::reference
