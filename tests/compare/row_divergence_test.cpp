// SPDX-License-Identifier: Apache-2.0
#include "harness/compare/row_divergence.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

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

CellComparison narrow(const std::vector<Row>& expected, const std::vector<Row>& actual, bool work_may_differ = false) {
  CellDigests first;
  for (const Row& row : expected) first.record(row.point, row.values);
  CellDigests second(&first);
  for (const Row& row : actual) second.record(row.point, row.values);
  return CellComparison(first, second, work_may_differ);
}

// Row by row, of the places where the sums say that a difference may be first; of all of them it must be the same answer.
Outcome compare(const std::vector<Row>& expected, const std::vector<Row>& actual) {
  const CellComparison cells = narrow(expected, actual);
  RowDigests narrowed(&cells.suspects());
  for (const Row& row : expected) narrowed.record(row.point, row.values);
  EXPECT_EQ(narrowed.rows(), cells.expected_rows());
  RowComparer narrow_comparer(narrowed);
  for (const Row& row : actual) narrow_comparer.record(row.point, row.values);
  EXPECT_EQ(narrow_comparer.rows(), cells.actual_rows());
  const auto narrow_first = narrow_comparer.first();

  RowDigests digests;
  for (const Row& row : expected) digests.record(row.point, row.values);
  RowComparer comparer(digests);
  for (const Row& row : actual) comparer.record(row.point, row.values);
  const auto first = comparer.first();
  EXPECT_EQ(first.has_value(), narrow_first.has_value());
  if (first && narrow_first) {
    EXPECT_EQ(first->id, narrow_first->id);
    EXPECT_EQ(first->kind, narrow_first->kind);
  }
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

// What is kept row by row are the places of a submission, however long the run is; and of random changes the first is found.
TEST(RowDivergence, TheFirstDifferenceIsFoundAmongFewPlaces) {
  std::vector<Row> run;
  for (int submission = 0; submission < 40; ++submission) {
    for (int layer = 0; layer < 3; ++layer) {
      for (const std::string_view operation : {"rms_norm.input_layernorm", "linear.q_proj"}) {
        for (int p = 0; p < 4; ++p) {
          run.push_back({{0, submission, 4 * submission + p, 1, layer, operation}, {static_cast<float>(run.size()), 2.0f}});
        }
      }
    }
  }
  std::mt19937 random(7);
  for (int trial = 0; trial < 200; ++trial) {
    auto actual = run;
    for (int change = 0; change < 20; ++change) {
      const std::size_t at = random() % actual.size();
      switch (random() % 3) {
        case 0:
          actual[at].values[1] += 1.0f;
          break;
        case 1:
          actual.erase(actual.begin() + static_cast<std::ptrdiff_t>(at));
          break;
        default: {  // a row that the first run does not have, of a place that it has or has not
          Row extra = actual[at];
          extra.point.loop = 1 + static_cast<int>(random() % 2);
          extra.point.operation = "exit_gate";
          actual.insert(actual.begin() + static_cast<std::ptrdiff_t>(at), extra);
        }
      }
    }
    const CellComparison cells = narrow(run, actual);
    EXPECT_GT(cells.different(), 1);
    EXPECT_LE(cells.suspects().size(), 16u) << "trial " << trial;
    EXPECT_TRUE(compare(run, actual).first) << "trial " << trial;
  }
}

// Another plan executes a place again, or not at all; only other values make it a difference.
TEST(RowDivergence, RepeatedAndReusedWorkIsNoDifferenceBetweenPlans) {
  const auto run = sample_run();
  auto again = run;
  again.insert(again.end(), run.begin(), run.end());
  EXPECT_EQ(narrow(run, again).different(), 3);
  EXPECT_EQ(narrow(run, again, true).different(), 0);
  EXPECT_EQ(narrow(again, run, true).different(), 0);
  EXPECT_EQ(narrow(run, {}, true).different(), 0);
  again.back().values[0] += 1.0f;
  EXPECT_EQ(narrow(run, again, true).different(), 1);
  EXPECT_TRUE(narrow(run, again, true).suspects().contains({0, 2, 1}));
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
