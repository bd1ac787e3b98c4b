// SPDX-License-Identifier: Apache-2.0
#include "harness/compare/row_divergence.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace loopgauge::harness {
namespace {

struct Row {
  TapPoint point;
  std::vector<float> values;
};

// Three positions through two operations of one layer, loop 1.
std::vector<Row> sample_run() {
  std::vector<Row> rows;
  for (const std::string_view operation : {"rms_norm.input_layernorm", "linear.q_proj"}) {
    for (int p = 0; p < 3; ++p) rows.push_back({{0, 0, p, 1, 0, operation}, {1.0f + static_cast<float>(p), 2.0f, 3.0f}});
  }
  return rows;
}

struct Outcome {
  std::optional<DivergentRow> first;
  std::int64_t compared, different;
};

Outcome compare(const std::vector<Row>& expected, const std::vector<Row>& actual) {
  RowDigests digests;
  for (const Row& row : expected) digests.record(row.point, row.values);
  RowComparer comparer(digests);
  for (const Row& row : actual) comparer.record(row.point, row.values);
  const auto first = comparer.first();
  return {first, comparer.compared(), comparer.different()};
}

TEST(RowDivergence, EqualRunsHaveNone) {
  const Outcome outcome = compare(sample_run(), sample_run());
  EXPECT_FALSE(outcome.first);
  EXPECT_EQ(outcome.compared, 6);
  EXPECT_EQ(outcome.different, 0);
}

TEST(RowDivergence, EverySingleElementIsSeen) {
  for (std::size_t r = 0; r < 6; ++r) {
    for (std::size_t i = 0; i < 3; ++i) {
      auto actual = sample_run();
      actual[r].values[i] = std::nextafter(actual[r].values[i], 10.0f);
      const Outcome outcome = compare(sample_run(), actual);
      ASSERT_TRUE(outcome.first);
      EXPECT_EQ(outcome.different, 1);
      EXPECT_EQ(outcome.first->id.position, actual[r].point.position);
      EXPECT_EQ(outcome.first->id.operation, actual[r].point.operation);
      EXPECT_EQ(outcome.first->kind, DivergentRow::Kind::values);
    }
  }
}

TEST(RowDivergence, TheEarliestInTheFirstRunsOrderIsReportedWhateverTheOtherRunsOrder) {
  auto actual = sample_run();
  actual[1].values[0] += 1;
  actual[4].values[0] += 1;
  std::reverse(actual.begin(), actual.end());
  for (Row& row : actual) row.point.submission = 7;
  const Outcome outcome = compare(sample_run(), actual);
  ASSERT_TRUE(outcome.first);
  EXPECT_EQ(outcome.first->id.operation, "rms_norm.input_layernorm");
  EXPECT_EQ(outcome.first->id.position, 1);
  EXPECT_EQ(outcome.first->expected_submission, 0);
  EXPECT_EQ(outcome.first->actual_submission, 7);
  EXPECT_EQ(outcome.different, 2);
}

TEST(RowDivergence, RowsOfOneRunOnlyAreDivergences) {
  auto fewer = sample_run();
  fewer.erase(fewer.begin() + 2);
  const Outcome missing = compare(sample_run(), fewer);
  ASSERT_TRUE(missing.first);
  EXPECT_EQ(missing.first->kind, DivergentRow::Kind::only_expected);
  EXPECT_EQ(missing.first->id.position, 2);
  const Outcome extra = compare(fewer, sample_run());
  ASSERT_TRUE(extra.first);
  EXPECT_EQ(extra.first->kind, DivergentRow::Kind::only_actual);
  EXPECT_EQ(extra.first->id.position, 2);
  // A value that differs before the missing row is the first divergence.
  fewer[0].values[1] += 1;
  EXPECT_EQ(compare(sample_run(), fewer).first->kind, DivergentRow::Kind::values);
}

TEST(RowDivergence, RepeatedCoordinatesAreComparedInTurn) {
  const TapPoint point{0, 0, 5, 1, 0, "linear.q_proj"};
  const std::vector<Row> expected{{point, {1}}, {point, {2}}};
  EXPECT_FALSE(compare(expected, {{point, {1}}, {point, {2}}}).first);
  const auto first = compare(expected, {{point, {1}}, {point, {3}}}).first;
  ASSERT_TRUE(first);
  EXPECT_EQ(first->id.occurrence, 1);

  RowCapture capture(first->id, 1024);
  for (const Row& row : expected) capture.record(row.point, row.values);
  EXPECT_TRUE(capture.found());
  EXPECT_EQ(capture.values(), std::vector<float>{2});
}

TEST(RowDivergence, CaptureKeepsAtMostItsBytes) {
  RowCapture capture({0, 2, 1, 0, "linear.q_proj", 0}, 2 * sizeof(float));
  for (const Row& row : sample_run()) capture.record(row.point, row.values);
  EXPECT_EQ(capture.width(), 3u);
  EXPECT_EQ(capture.values(), (std::vector<float>{3, 2}));
}

TEST(RowDivergence, DigestSeesSignsAndLengthButNotNanPayloads) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  EXPECT_NE(row_digest(std::vector<float>{0.0f}), row_digest(std::vector<float>{-0.0f}));
  EXPECT_NE(row_digest(std::vector<float>{0.0f}), row_digest(std::vector<float>{0.0f, 0.0f}));
  EXPECT_NE(row_digest(std::vector<float>{1.0f, 2.0f}), row_digest(std::vector<float>{2.0f, 1.0f}));
  EXPECT_EQ(row_digest(std::vector<float>{nan}), row_digest(std::vector<float>{-nan}));
}

}  // namespace
}  // namespace loopgauge::harness
