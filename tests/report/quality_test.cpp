// SPDX-License-Identifier: Apache-2.0
// The quality report's arithmetic on rows that can be computed by hand.
#include "harness/report/quality.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <sstream>

#include "harness/report/render.hpp"
#include "tests/report/sample_report.hpp"

namespace loopgauge::harness {
namespace {

const double kLn2 = std::log(2.0), kLn4 = std::log(4.0);

DriftRow prose_row(std::int64_t request, std::int64_t row, double kl, bool same_top1, double dense_nll, double nll, int prompt = 100) {
  DriftRow result{request, row, prompt - 1 + row, kl, same_top1, 0.0};
  result.token = 'a';
  result.dense_nll = dense_nll;
  result.nll = nll;
  result.scored = true;
  return result;
}

CaseResult row_of(const std::string& settings, const std::string& trace) {
  CaseResult row = sample_row(0, "optimized", CaseStatus::passed);
  row.id = "mixed.b2048/" + settings + "/" + trace;
  row.trace = trace;
  return row;
}

AnswerRow answer(std::int64_t request, bool dense_correct, bool correct, int source = -1) {
  return {request, 0, 1, 100, source, dense_correct, correct};
}

TEST(Quality, ProseByHand) {
  Report report;
  CaseResult row = row_of("t1s0q0", "prose");
  row.drift = {prose_row(0, 0, 0.32, true, kLn2, kLn2), prose_row(0, 1, 0.1, true, kLn4, kLn2), prose_row(0, 2, 0.3, false, kLn2, kLn4),
               prose_row(1, 0, 0.08, true, kLn2, kLn4), prose_row(1, 1, 0.0, true, kLn2, kLn2, 100)};
  report.cases = {row};
  const Quality quality = measure_quality(report);
  ASSERT_EQ(quality.prose.size(), 2u) << "all prompts, and the one length";
  EXPECT_EQ(quality.prose[0].prompt_length, -1);
  EXPECT_EQ(quality.prose[1].prompt_length, 100);
  for (const ProseQuality& all : quality.prose) {
    EXPECT_EQ(all.settings, "t1s0q0");
    EXPECT_EQ(all.requests, 2);
    EXPECT_EQ(all.rows, 3);
    EXPECT_NEAR(all.kld_mean.value, 0.4 / 3, 1e-12);
    // Two requests: every resample is {0, 0}, {0, 1} or {1, 1}, the ends with probability 1/4 each.
    EXPECT_NEAR(all.kld_mean.low, 0.0, 1e-12);
    EXPECT_NEAR(all.kld_mean.high, 0.2, 1e-12);
    EXPECT_EQ(all.kld_median.value, 0.1);
    EXPECT_EQ(all.kld_p99.value, 0.3);
    EXPECT_EQ(all.kld_p999.value, 0.3);
    EXPECT_EQ(all.kld_p99.low, 0.0);
    EXPECT_EQ(all.kld_max, 0.3);
    EXPECT_NEAR(all.same_top.value, 2.0 / 3, 1e-12);
    EXPECT_NEAR(all.log_perplexity_ratio.value, 0.0, 1e-12);
    EXPECT_NEAR(all.rms_delta_p.value, std::sqrt((0.0625 + 0.0625) / 3), 1e-12);  // .25 -> .5, .5 -> .25, .5 -> .5
    EXPECT_NEAR(all.dense_bits_per_byte, 4.0 / 3, 1e-12);
    EXPECT_NEAR(all.bits_per_byte, 4.0 / 3, 1e-12);
    EXPECT_NEAR(all.bits_per_byte_change.value, 0.0, 1e-12);
    EXPECT_NEAR(all.first_token_kld.value, 0.2, 1e-12);
  }
}

TEST(Quality, PromptLengthsAreKeptApartAndTokensThatAreNoBytesAreLeftOut) {
  Report report;
  CaseResult row = row_of("t0s1q0", "prose");
  row.drift = {prose_row(0, 1, 0.1, true, kLn2, kLn4, 64), prose_row(1, 1, 0.3, true, kLn2, kLn2, 128)};
  row.drift[1].token = 257;
  DriftRow unknown = prose_row(0, 2, 9.0, false, 0, 0, 64);
  unknown.scored = false;
  row.drift.push_back(unknown);
  report.cases = {row};
  const Quality quality = measure_quality(report);
  ASSERT_EQ(quality.prose.size(), 3u);
  EXPECT_EQ(quality.prose[0].rows, 2);
  EXPECT_NEAR(quality.prose[0].bits_per_byte, 2.0, 1e-12);
  EXPECT_NEAR(quality.prose[0].bits_per_byte_change.value, 1.0, 1e-12);
  EXPECT_NEAR(quality.prose[0].log_perplexity_ratio.value, kLn2 / 2, 1e-12) << "every known token counts here";
  EXPECT_EQ(quality.prose[1].prompt_length, 64);
  EXPECT_EQ(quality.prose[1].kld_max, 0.1);
  EXPECT_TRUE(std::isnan(quality.prose[1].kld_mean.low)) << "one request has no spread";
  EXPECT_EQ(quality.prose[2].prompt_length, 128);
  EXPECT_TRUE(std::isnan(quality.prose[2].bits_per_byte));
}

TEST(Quality, TasksByHand) {
  Report report;
  CaseResult chain = row_of("t1s0q0", "chain"), swap = row_of("t1s0q0", "swap"), prose = row_of("t1s0q0", "prose");
  // Request 0 loses both of its answers, request 1 none of two.
  chain.answers = {answer(0, true, false), answer(0, true, false), answer(1, true, true), answer(1, false, false)};
  swap.answers = {answer(0, false, true)};
  prose.drift = {prose_row(0, 1, 0.1, true, kLn2, kLn2)};
  report.cases = {chain, swap, prose, chain};  // another mode of a case counts once
  const Quality quality = measure_quality(report);
  ASSERT_EQ(quality.tasks.size(), 3u);
  const TaskQuality &all = quality.tasks[0], &first = quality.tasks[1], &second = quality.tasks[2];
  EXPECT_EQ(all.trace, "");
  EXPECT_EQ(all.requests, 3);
  EXPECT_EQ(all.answers, 5);
  EXPECT_EQ(all.dense_correct, 3);
  EXPECT_EQ(all.correct, 2);
  EXPECT_EQ(all.lost, 2);
  EXPECT_EQ(all.gained, 1);
  EXPECT_EQ(first.trace, "chain");
  EXPECT_NEAR(first.accuracy_change.value, -0.5, 1e-12);
  EXPECT_NEAR(first.accuracy_change.low, -1.0, 1e-12);
  EXPECT_NEAR(first.accuracy_change.high, 0.0, 1e-12);
  EXPECT_NEAR(first.p, 0.5, 1e-12);  // two changes, both losses: 2 / 4
  EXPECT_NEAR(first.p_holm, 1.0, 1e-12);
  EXPECT_EQ(second.trace, "swap");
  EXPECT_TRUE(std::isnan(second.accuracy_change.low));
  EXPECT_TRUE(quality.depths.empty()) << "no answer has a source";
  ASSERT_EQ(quality.prose.size(), 2u);
}

TEST(Quality, DepthIsTheQuarterOfThePromptThatHoldsTheAnswer) {
  Report report;
  CaseResult row = row_of("t1s0q0", "needle");
  row.answers = {answer(0, true, true, 0), answer(0, true, false, 24), answer(0, true, true, 25), answer(1, true, true, 99),
                 answer(1, true, true)};
  report.cases = {row};
  const Quality quality = measure_quality(report);
  ASSERT_EQ(quality.depths.size(), 3u);
  EXPECT_EQ(quality.depths[0].depth, 0);
  EXPECT_EQ(quality.depths[0].answers, 2);
  EXPECT_EQ(quality.depths[0].lost, 1);
  EXPECT_EQ(quality.depths[1].depth, 1);
  EXPECT_EQ(quality.depths[2].depth, 3);
  EXPECT_EQ(quality.depths[2].answers, 1);
}

TEST(Quality, McNemarIsExactAndTwoSided) {
  EXPECT_EQ(mcnemar_exact(0, 0), 1.0);
  EXPECT_NEAR(mcnemar_exact(5, 1), 2 * 7.0 / 64, 1e-12);
  EXPECT_NEAR(mcnemar_exact(1, 5), 2 * 7.0 / 64, 1e-12);
  EXPECT_NEAR(mcnemar_exact(8, 0), 2.0 / 256, 1e-12);
  EXPECT_EQ(mcnemar_exact(3, 3), 1.0);
  EXPECT_GT(mcnemar_exact(0, 2000), 0.0 - 1e-300);
  EXPECT_LT(mcnemar_exact(900, 1100), 1e-4);
}

TEST(Quality, HolmStepsDownAndKeepsTheOrder) {
  const std::vector<double> adjusted = holm_adjusted(std::vector<double>{0.01, 0.04, 0.03, 0.6});
  EXPECT_NEAR(adjusted[0], 0.04, 1e-12);
  EXPECT_NEAR(adjusted[1], 0.09, 1e-12);  // 2 * 0.04 is below that of the smaller p
  EXPECT_NEAR(adjusted[2], 0.09, 1e-12);
  EXPECT_NEAR(adjusted[3], 0.6, 1e-12);
  EXPECT_TRUE(holm_adjusted({}).empty());
}

TEST(Quality, TheTablesSayWhatThereIsAndThatThereIsNothing) {
  Report report = sample_report();  // its drift rows know no next token
  std::ostringstream nothing;
  render_quality(report, nothing);
  EXPECT_NE(nothing.str().find("quality needs traces with forced tokens"), std::string::npos);

  CaseResult prose = row_of("t1s0q0", "prose"), task = row_of("t1s0q0", "chain");
  prose.drift = {prose_row(0, 1, 0.125, true, kLn2, kLn4), prose_row(1, 1, 0.125, true, kLn2, kLn4)};
  task.answers = {answer(0, true, false, 10)};
  report.cases = {prose, task};
  std::ostringstream text;
  render_quality(report, text);
  for (const char* expected : {"0.125 [0.125, 0.125]", "0.693 [0.693, 0.693]", "25.00 % [25, 25]", "chain", "-100", "quarter"})
    EXPECT_NE(text.str().find(expected), std::string::npos) << expected << "\n" << text.str();
}

}  // namespace
}  // namespace loopgauge::harness
