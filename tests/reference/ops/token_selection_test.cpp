// SPDX-License-Identifier: Apache-2.0
// update_score and select_tokens (S-TSEL-2..5).
#include "reference/ops/token_selection.hpp"

#include <gtest/gtest.h>

#include <map>
#include <numeric>

#include "tests/reference/support.hpp"

namespace loopgauge::reference {
namespace {

std::vector<int> positions(int begin, int end) {
  std::vector<int> all(static_cast<std::size_t>(end - begin));
  std::iota(all.begin(), all.end(), begin);
  return all;
}

std::vector<int> select(const std::vector<int>& candidates, int count, const std::map<int, float>& scores) {
  return select_tokens(std::span<const int>(candidates), count, [&](int p) { return scores.at(p); });
}

TEST(UpdateScore, IsTheRelativeChangeOfTheRow) {
  const std::vector<float> current{3, 4}, previous{3, 0};
  EXPECT_EQ(update_score<Declared>(current.data(), previous.data(), 2), 4.0f / 5.0f);
  EXPECT_EQ(update_score<Declared>(current.data(), current.data(), 2), 0.0f) << "what an aliased buffer would give for every token";
}

TEST(UpdateScore, AZeroRowIsDividedByTheClamp) {
  const std::vector<float> zero{0, 0}, one{1, 0};
  EXPECT_EQ(update_score<Declared>(zero.data(), zero.data(), 2), 0.0f);
  EXPECT_EQ(update_score<Declared>(zero.data(), one.data(), 2), 1.0f / 1e-12f);
}

TEST(UpdateScore, EqualsTheScalarRestatement) {
  for (const int n : {1, 17, 384}) {
    const auto a = test::bf16_values(static_cast<std::size_t>(n), 61, 5), b = test::bf16_values(static_cast<std::size_t>(n), 62, 5);
    for (const int lanes : {16, 32}) {
      std::vector<float> change;
      for (std::size_t i = 0; i < a.size(); ++i) change.push_back(a[i] - b[i]);
      const float expected = std::sqrt(test::plain_dot(change.data(), change.data(), n, lanes)) /
                             std::max(std::sqrt(test::plain_dot(a.data(), a.data(), n, lanes)), 1e-12f);
      const float actual = lanes == 16 ? update_score<Declared>(a.data(), b.data(), n) : update_score<Reordered>(a.data(), b.data(), n);
      EXPECT_EQ(test::bits(actual), test::bits(expected)) << n << ' ' << lanes;
    }
  }
}

TEST(UpdateScore, OverflowingNormsAreNotFinite) {
  const std::vector<float> huge{0x1p100f, 0x1p100f}, zero{0, 0};
  EXPECT_FALSE(std::isfinite(update_score<Declared>(huge.data(), zero.data(), 2)));
}

TEST(SelectTokens, HighestScoresInPositionOrder) {
  EXPECT_EQ(select(positions(64, 70), 3, {{64, 1}, {65, 9}, {66, 3}, {67, 8}, {68, 2}, {69, 7}}), (std::vector<int>{65, 67, 69}));
}

TEST(SelectTokens, TiesGoToTheLowerPosition) {
  std::map<int, float> equal;
  for (const int p : positions(0, 40)) equal[p] = 0.5f;
  EXPECT_EQ(select(positions(0, 40), 4, equal), (std::vector<int>{0, 1, 2, 3}));
  equal[39] = 0.6f;
  EXPECT_EQ(select(positions(0, 40), 4, equal), (std::vector<int>{0, 1, 2, 39}));
  EXPECT_EQ(select({3, 5}, 1, {{3, -0.0f}, {5, 0.0f}}), (std::vector<int>{3})) << "-0 equals +0";
}

TEST(SelectTokens, NoSlotIsReservedForTheLastToken) {
  EXPECT_EQ(select(positions(0, 4), 1, {{0, 1}, {1, 5}, {2, 1}, {3, 0}}), (std::vector<int>{1}));
}

TEST(SelectTokens, NeverMoreThanTheCandidates) {
  EXPECT_EQ(select({4, 9}, 3, {{4, 1}, {9, 2}}), (std::vector<int>{4, 9}));
  EXPECT_EQ(select({7}, 1, {{7, 0}}), (std::vector<int>{7})) << "a window of one token is always active";
}

TEST(SelectTokens, TheOrderOfCandidatesDoesNotMatter) {
  test::Random random(63);
  std::map<int, float> scores;
  for (const int p : positions(0, 100)) scores[p] = static_cast<float>(random.below(7));
  std::vector<int> shuffled = positions(0, 100);
  for (std::size_t i = shuffled.size(); i > 1; --i)
    std::swap(shuffled[i - 1], shuffled[static_cast<std::size_t>(random.below(static_cast<int>(i)))]);
  EXPECT_EQ(select(shuffled, 25, scores), select(positions(0, 100), 25, scores));
}

}  // namespace
}  // namespace loopgauge::reference
