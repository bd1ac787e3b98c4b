// SPDX-License-Identifier: Apache-2.0
// Drift: how far a FlashLoop run moves from the dense run of the same executor on the same tokens. This is a property of the method, not
// conformance, and the two are never mixed.
//
// Row j of a request's logits follows position P - 1 + j; row 0 (the first token after the prompt) is kept apart from rows 1.. because
// token-sparse prefill moves it most: the last prompt token is rarely among the selected ones (SPEC.md, "Terms").
// All sums are in double precision; probabilities are those of a softmax in double precision over the FP32 logits; ties of an argmax go to
// the lowest token id.
//
// Uncertainties are 95 % intervals. Rates: Wilson score interval (it treats rows as independent; neighbouring rows are not quite, so it is
// a lower bound of the width). Means and percentiles: percentile bootstrap over blocks of consecutive rows of one request, fixed seed.
// A maximum is an observation, not an estimate, and has none.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "harness/compare/error_stats.hpp"
#include "models/run_record.hpp"
#include "models/trace.hpp"

namespace loopgauge::harness {

enum class Uncertainty { none, bootstrap, wilson };
std::string_view to_string(Uncertainty kind);

struct Estimate {
  double value = 0.0;
  double low = 0.0, high = 0.0;  // 95 % interval; equal to value where kind == none
  Uncertainty kind = Uncertainty::none;
};

struct RowDrift {
  int request = 0;
  int row = 0;      // logits row
  double kl = 0.0;  // KL(dense || candidate), nats
  bool same_top1 = true;
  double top1_probability_change = 0.0;  // p_candidate - p_dense of the dense argmax token
  std::int32_t token = -1;               // the known next token that both runs were given; -1: none
  double dense_nll = 0.0, nll = 0.0;     // its negative log-likelihood in nats, where there is one
  bool scored = false;                   // it is part of an answer, or the trace marks no answers
};

// A maximal run of ones in answer_mask.
struct AnswerDrift {
  int request = 0;
  int row = 0;  // logits row that predicts its first token
  int tokens = 0;
  // Prompt position of the last occurrence of the answer's tokens, if they are at least kFoundAnswerTokens and occur: where it was to be
  // found. -1: none.
  int source_position = -1;
  bool dense_correct = false, correct = false;  // every token of the answer is the argmax under teacher forcing
};
// Shorter answers occur in a prompt by chance.
inline constexpr int kFoundAnswerTokens = 3;

struct RowSummary {
  std::int64_t rows = 0;
  Estimate kl_mean;                        // nats
  std::array<Estimate, 5> kl_percentiles;  // in the order of kPercentiles; the last is the maximum
  Estimate same_top1;                      // rate
  Estimate top1_probability_change;        // mean of the absolute change
};

struct Likelihood {
  std::int64_t tokens = 0;                // next tokens scored: the known continuation under every compared row
  Estimate perplexity;                    // exp of the mean negative log-likelihood
  std::optional<Estimate> bits_per_byte;  // byte-level models only: negative log2-likelihood per byte token
};

struct TaskAccuracy {
  std::int64_t answers = 0;                               // maximal runs of ones in answer_mask
  std::int64_t dense_correct = 0, candidate_correct = 0;  // every token of the answer is the argmax under teacher forcing
  Estimate dense, candidate;                              // rates
};

struct DriftOptions {
  bool byte_level = false;        // token ids below 256 are bytes
  std::uint64_t seed = 20240229;  // of the bootstrap; a fixed seed makes a report reproducible
  int resamples = 1000;
  int block = 8;  // consecutive rows that are resampled together
};

struct Drift {
  std::vector<RowDrift> rows;        // by request, then row
  std::int64_t rows_left_out = 0;    // rows after the first token in which the two runs differ (free runs only)
  std::int64_t rows_non_finite = 0;  // rows with a NaN or an infinity among the logits of either run: in no statistic
  RowSummary first_token;            // row 0 of every request
  RowSummary continuation;           // rows 1..
  Likelihood dense, candidate;
  std::vector<AnswerDrift> answers;  // by request, then row
  std::optional<TaskAccuracy> task;  // traces with an answer_mask
};

// Both records must hold logits of the same trace; requests that either run cancelled are left out. Throws InternalError when requests or
// vocabularies differ or logits are absent.
Drift measure_drift(const RunRecord& dense, const RunRecord& candidate, const Trace& trace, const DriftOptions& options = {});

// Building blocks, exposed for the tests and for tables of other distances.
double kl_divergence(std::span<const float> logits_p, std::span<const float> logits_q);  // KL(softmax(p) || softmax(q)), nats
std::int32_t argmax_lowest_id(std::span<const float> logits);
Estimate wilson_interval(std::int64_t successes, std::int64_t trials);

}  // namespace loopgauge::harness
