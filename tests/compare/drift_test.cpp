// SPDX-License-Identifier: Apache-2.0
// Drift on distributions that can be computed by hand: logits are logarithms of small fractions.
#include "harness/compare/drift.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <vector>

#include "harness/compare/bootstrap.hpp"
#include "models/error.hpp"

namespace loopgauge::harness {
namespace {

std::vector<float> logs(const std::vector<double>& probabilities) {
  std::vector<float> logits;
  for (const double p : probabilities) logits.push_back(static_cast<float>(std::log(p)));
  return logits;
}

struct Pair {
  Trace trace;
  RunRecord dense, candidate;
};

// One request of vocabulary 3 whose logits rows are given for both runs; forced tokens, one fewer than rows.
Pair make(const std::vector<std::vector<double>>& dense, const std::vector<std::vector<double>>& candidate,
          std::vector<std::int32_t> forced) {
  Pair pair;
  TraceRequest& request = pair.trace.requests.emplace_back();
  request.prompt = {0};
  request.forced = forced;
  request.max_new_tokens = static_cast<int>(forced.size());
  for (const auto& [rows, run] : {std::pair{&dense, &pair.dense}, std::pair{&candidate, &pair.candidate}}) {
    RequestRecord& record = run->requests.emplace_back();
    record.prompt_length = 1;
    record.fed = static_cast<int>(forced.size());
    record.tokens = forced;
    record.logits = Tensor<float>({static_cast<std::int64_t>(rows->size()), 3});
    for (std::size_t j = 0; j < rows->size(); ++j) {
      const auto values = logs((*rows)[j]);
      std::copy(values.begin(), values.end(), record.logits.row(static_cast<std::int64_t>(j)).begin());
    }
  }
  return pair;
}

TEST(Drift, KlDivergenceByHand) {
  // .5 ln(.5/.25) + .25 ln(.25/.25) + .25 ln(.25/.5) = .5 ln 2 - .25 ln 2
  const double kl = kl_divergence(logs({.5, .25, .25}), logs({.25, .25, .5}));
  EXPECT_NEAR(kl, 0.25 * std::log(2.0), 1e-7);
  EXPECT_EQ(kl_divergence(logs({.5, .3, .2}), logs({.5, .3, .2})), 0.0);
  // Adding a constant to all logits changes nothing.
  EXPECT_NEAR(kl_divergence(std::vector<float>{1000, 999, 998}, std::vector<float>{2, 1, 0}), 0.0, 1e-12);
}

TEST(Drift, KnownNextTokensCarryTheirLikelihoods) {
  Pair pair = make({{.5, .25, .25}, {.25, .5, .25}}, {{.25, .5, .25}, {.5, .25, .25}}, {2});
  Drift drift = measure_drift(pair.dense, pair.candidate, pair.trace);
  ASSERT_EQ(drift.rows.size(), 2u);
  EXPECT_EQ(drift.rows[0].token, 2);
  EXPECT_NEAR(drift.rows[0].dense_nll, std::log(4.0), 1e-6);
  EXPECT_NEAR(drift.rows[0].nll, std::log(4.0), 1e-6);
  EXPECT_TRUE(drift.rows[0].scored) << "a trace without marked answers scores every token";
  EXPECT_EQ(drift.rows[1].token, -1) << "nothing is known to follow the last token";
  EXPECT_FALSE(drift.rows[1].scored);

  pair.trace.requests[0].answer_mask = {0};
  drift = measure_drift(pair.dense, pair.candidate, pair.trace);
  EXPECT_EQ(drift.rows[0].token, 2);
  EXPECT_FALSE(drift.rows[0].scored);
  EXPECT_TRUE(drift.answers.empty());
}

// The first answer stands twice in the prompt, the second is too short to be looked for, the third is nowhere.
TEST(Drift, AnswersAreListedWithTheirSource) {
  const std::vector<std::int32_t> forced{0, 1, 2, 1, 0, 1, 1, 2, 2};
  const std::vector<std::vector<double>> sure_of_one(10, {.2, .6, .2});
  Pair pair = make(sure_of_one, sure_of_one, forced);
  pair.trace.requests[0].prompt = {2, 1, 2, 1, 0, 1, 2, 1, 0, 0};
  pair.trace.requests[0].answer_mask = {0, 1, 1, 1, 0, 1, 0, 1, 1};
  pair.trace.requests[0].answer_mask.resize(9);
  const Drift drift = measure_drift(pair.dense, pair.candidate, pair.trace);
  ASSERT_EQ(drift.answers.size(), 3u);
  EXPECT_EQ(drift.answers[0].row, 1);
  EXPECT_EQ(drift.answers[0].tokens, 3);
  EXPECT_EQ(drift.answers[0].source_position, 5);
  EXPECT_FALSE(drift.answers[0].correct) << "1 2 1 is not 1 1 1";
  EXPECT_EQ(drift.answers[1].tokens, 1);
  EXPECT_EQ(drift.answers[1].source_position, -1);
  EXPECT_TRUE(drift.answers[1].correct && drift.answers[1].dense_correct);
  EXPECT_EQ(drift.answers[2].row, 7);
  EXPECT_EQ(drift.answers[2].source_position, -1);
}

TEST(Drift, RowsThatAreNotFiniteAreCountedAndEnterNoStatistic) {
  std::vector<std::vector<double>> rows(20, {.5, .3, .2});
  Pair pair = make(rows, rows, std::vector<std::int32_t>(19, 0));
  pair.trace.requests[0].answer_mask.assign(19, 0);
  pair.trace.requests[0].answer_mask[4] = 1;
  pair.candidate.requests[0].logits.row(4)[1] = std::nanf("");
  pair.dense.requests[0].logits.row(7)[2] = INFINITY;
  const Drift drift = measure_drift(pair.dense, pair.candidate, pair.trace);
  EXPECT_EQ(drift.rows_non_finite, 2);
  EXPECT_EQ(drift.rows.size(), 18u);
  EXPECT_EQ(drift.continuation.rows, 17);
  EXPECT_EQ(drift.continuation.kl_mean.value, 0.0);
  EXPECT_EQ(drift.continuation.kl_mean.high, 0.0);
  EXPECT_EQ(drift.continuation.kl_percentiles.back().value, 0.0);
  EXPECT_TRUE(std::isfinite(drift.candidate.perplexity.value));
  ASSERT_TRUE(drift.task);
  EXPECT_EQ(drift.task->dense_correct, 1);
  EXPECT_EQ(drift.task->candidate_correct, 0);
}

TEST(Drift, KlIsNotSymmetricAndHasTheDenseRunFirst) {
  Pair pair = make({{.9, .05, .05}}, {{.4, .3, .3}}, {});
  const Drift drift = measure_drift(pair.dense, pair.candidate, pair.trace);
  ASSERT_EQ(drift.rows.size(), 1u);
  EXPECT_NEAR(drift.rows[0].kl, .9 * std::log(.9 / .4) + .1 * std::log(.05 / .3), 1e-6);
}

TEST(Drift, RowZeroIsKeptApart) {
  Pair pair = make({{.5, .25, .25}, {.6, .2, .2}}, {{.25, .25, .5}, {.6, .2, .2}}, {0});
  const Drift drift = measure_drift(pair.dense, pair.candidate, pair.trace);
  EXPECT_EQ(drift.first_token.rows, 1);
  EXPECT_NEAR(drift.first_token.kl_mean.value, 0.25 * std::log(2.0), 1e-7);
  EXPECT_EQ(drift.first_token.same_top1.value, 0.0);
  EXPECT_EQ(drift.continuation.rows, 1);
  EXPECT_EQ(drift.continuation.kl_mean.value, 0.0);
  EXPECT_EQ(drift.continuation.same_top1.value, 1.0);
  // One row is one block: a spread cannot be estimated, and none is claimed.
  EXPECT_EQ(drift.continuation.kl_mean.kind, Uncertainty::none);
  EXPECT_NEAR(drift.rows[0].top1_probability_change, .25 - .5, 1e-7);
}

TEST(Drift, TiesOfTheArgmaxGoToTheLowestId) {
  EXPECT_EQ(argmax_lowest_id(std::vector<float>{1, 3, 3, 2}), 1);
  // .4 .4 .2 against .2 .4 .4: argmax 0 and 1.
  Pair pair = make({{.4, .4, .2}}, {{.2, .4, .4}}, {});
  EXPECT_FALSE(measure_drift(pair.dense, pair.candidate, pair.trace).rows[0].same_top1);
}

TEST(Drift, PerplexityAndBitsPerByte) {
  // The forced tokens 0 and 2 have dense probabilities 1/2 and 1/4, candidate 1/4 and 1/4. The last row scores nothing.
  Pair pair = make({{.5, .25, .25}, {.5, .25, .25}, {.3, .3, .4}}, {{.25, .25, .5}, {.5, .25, .25}, {.3, .3, .4}}, {0, 2});
  DriftOptions options;
  options.byte_level = true;
  const Drift drift = measure_drift(pair.dense, pair.candidate, pair.trace, options);
  EXPECT_EQ(drift.dense.tokens, 2);
  EXPECT_NEAR(drift.dense.perplexity.value, std::sqrt(8.0), 1e-6);
  EXPECT_NEAR(drift.candidate.perplexity.value, 4.0, 1e-6);
  ASSERT_TRUE(drift.dense.bits_per_byte);
  EXPECT_NEAR(drift.dense.bits_per_byte->value, 1.5, 1e-6);
  EXPECT_NEAR(drift.candidate.bits_per_byte->value, 2.0, 1e-6);
  EXPECT_FALSE(measure_drift(pair.dense, pair.candidate, pair.trace).dense.bits_per_byte);
}

TEST(Drift, AnAnswerIsAMaximalRunOfOnesAndCorrectOnlyAsAWhole) {
  // Forced tokens 0 0 1 0, mask 1 1 0 1: two answers. The candidate misses the second token of the first one.
  const std::vector<double> zero{.6, .2, .2}, one{.2, .6, .2};
  Pair pair = make({zero, zero, one, zero, zero}, {zero, one, one, zero, zero}, {0, 0, 1, 0});
  pair.trace.requests[0].answer_mask = {1, 1, 0, 1};
  const Drift drift = measure_drift(pair.dense, pair.candidate, pair.trace);
  ASSERT_TRUE(drift.task);
  EXPECT_EQ(drift.task->answers, 2);
  EXPECT_EQ(drift.task->dense_correct, 2);
  EXPECT_EQ(drift.task->candidate_correct, 1);
  EXPECT_EQ(drift.task->candidate.value, 0.5);
  EXPECT_EQ(drift.task->candidate.kind, Uncertainty::wilson);
}

TEST(Drift, FreeRunsAreComparedUpToTheirFirstDifferentToken) {
  const std::vector<double> row{.5, .25, .25};
  Pair pair = make({row, row, row, row}, {row, row, row, row}, {0, 1, 2});
  pair.candidate.requests[0].tokens[1] = 2;
  const Drift drift = measure_drift(pair.dense, pair.candidate, pair.trace);
  EXPECT_EQ(drift.rows.size(), 2u);  // rows 0 and 1 follow equal tokens
  EXPECT_EQ(drift.rows_left_out, 2);
  EXPECT_EQ(drift.dense.tokens, 1);  // token 1 differs: nothing to score under row 1
}

TEST(Drift, WilsonIntervalOfKnownCases) {
  const Estimate half = wilson_interval(5, 10);
  EXPECT_NEAR(half.low, 0.2366, 5e-5);
  EXPECT_NEAR(half.high, 0.7634, 5e-5);
  const Estimate all = wilson_interval(10, 10);
  EXPECT_NEAR(all.low, 0.7225, 5e-5);
  EXPECT_EQ(all.high, 1.0);
  for (int trials = 1; trials <= 300; ++trials) EXPECT_EQ(wilson_interval(0, trials).low, 0.0) << trials;
  EXPECT_TRUE(std::isnan(wilson_interval(0, 0).value));
}

// Percentiles and bootstrap over many rows: the interval contains the value, narrows with data, and depends on the seed only.
TEST(Drift, BootstrapIsReproducibleAndCoversTheValue) {
  std::vector<std::vector<double>> dense, candidate;
  std::vector<std::int32_t> forced;
  for (int j = 0; j < 200; ++j) {
    const double shift = 0.001 * ((j * 37) % 100);
    dense.push_back({.5, .3, .2});
    candidate.push_back({.5 - shift, .3 + shift, .2});
    if (j > 0) forced.push_back(0);
  }
  Pair pair = make(dense, candidate, forced);
  const Drift a = measure_drift(pair.dense, pair.candidate, pair.trace);
  const Drift b = measure_drift(pair.dense, pair.candidate, pair.trace);
  const Estimate& mean = a.continuation.kl_mean;
  EXPECT_EQ(mean.kind, Uncertainty::bootstrap);
  EXPECT_LT(mean.low, mean.value);
  EXPECT_GT(mean.high, mean.value);
  EXPECT_EQ(mean.low, b.continuation.kl_mean.low);
  EXPECT_EQ(mean.high, b.continuation.kl_mean.high);
  DriftOptions other;
  other.seed = 1;
  EXPECT_NE(mean.low, measure_drift(pair.dense, pair.candidate, pair.trace, other).continuation.kl_mean.low);
  double previous = 0.0;
  for (const Estimate& percentile : a.continuation.kl_percentiles) {
    EXPECT_GE(percentile.value, previous);
    EXPECT_LE(percentile.low, percentile.value);
    EXPECT_GE(percentile.high, percentile.value);
    previous = percentile.value;
  }
  EXPECT_EQ(a.continuation.kl_percentiles.back().kind, Uncertainty::none);
  double largest = 0.0;
  for (const RowDrift& row : a.rows) largest = row.row > 0 ? std::max(largest, row.kl) : largest;
  EXPECT_EQ(a.continuation.kl_percentiles.back().value, largest);
}

TEST(Drift, RecordsOfAnotherTraceAreRefused) {
  Pair pair = make({{.5, .25, .25}}, {{.5, .25, .25}}, {});
  pair.candidate.requests.clear();
  EXPECT_THROW(measure_drift(pair.dense, pair.candidate, pair.trace), InternalError);
  pair = make({{.5, .25, .25}}, {{.5, .25, .25}}, {});
  pair.candidate.requests[0].logits = {};
  EXPECT_THROW(measure_drift(pair.dense, pair.candidate, pair.trace), InternalError);
}

TEST(Bootstrap, DrawsAsManyUnitsAsThereAreAndTheSameOnesForASeed) {
  const auto draws = [](std::uint64_t seed) {
    std::vector<std::vector<int>> all;
    resample(5, seed, 20, [&](const std::vector<int>& multiplicity) { all.push_back(multiplicity); });
    return all;
  };
  const auto first = draws(1);
  ASSERT_EQ(first.size(), 20u);
  for (const auto& multiplicity : first) EXPECT_EQ(std::accumulate(multiplicity.begin(), multiplicity.end(), 0), 5);
  EXPECT_EQ(draws(1), first);
  EXPECT_NE(draws(2), first);
}

TEST(Bootstrap, ASingleUnitTellsNothing) {
  resample(1, 1, 20, [](const std::vector<int>&) { ADD_FAILURE() << "called"; });
}

}  // namespace
}  // namespace loopgauge::harness
