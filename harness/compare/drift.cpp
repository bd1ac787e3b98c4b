// SPDX-License-Identifier: Apache-2.0
#include "harness/compare/drift.hpp"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <string>

#include "harness/compare/bootstrap.hpp"
#include "models/error.hpp"

namespace loopgauge::harness {
namespace {

constexpr double kNormalQuantile = 1.959963984540054;  // 97.5 % point of the standard normal distribution
constexpr int kByteTokens = 256;

bool all_finite(std::span<const float> values) {
  return std::all_of(values.begin(), values.end(), [](float x) { return std::isfinite(x); });
}

double log_sum_exp(std::span<const float> logits) {
  double largest = -std::numeric_limits<double>::infinity();
  for (const float x : logits) largest = std::max(largest, static_cast<double>(x));
  double sum = 0.0;
  for (const float x : logits) sum += std::exp(static_cast<double>(x) - largest);
  return largest + std::log(sum);
}

double negative_log_likelihood(std::span<const float> logits, std::int32_t token) {
  return log_sum_exp(logits) - static_cast<double>(logits[static_cast<std::size_t>(token)]);
}

// Consecutive rows of one request, at most `length` of them: [begin, end) into a list of rows.
struct Block {
  std::size_t begin, end;
};

std::vector<Block> cut_blocks(const std::vector<int>& request_of_row, int length) {
  std::vector<Block> blocks;
  for (std::size_t begin = 0; begin < request_of_row.size();) {
    std::size_t end = begin + 1;
    while (end < request_of_row.size() && end - begin < static_cast<std::size_t>(length) && request_of_row[end] == request_of_row[begin])
      ++end;
    blocks.push_back({begin, end});
    begin = end;
  }
  return blocks;
}

// Calls `use` with the multiplicity of every row, once per resample of the blocks.
void resample_rows(const std::vector<Block>& blocks, std::size_t rows, const DriftOptions& options,
                   const std::function<void(const std::vector<int>&)>& use) {
  std::vector<int> of_row(rows);
  resample(blocks.size(), options.seed, options.resamples, [&](const std::vector<int>& of_block) {
    for (std::size_t i = 0; i < blocks.size(); ++i) std::fill(&of_row[blocks[i].begin], of_row.data() + blocks[i].end, of_block[i]);
    use(of_row);
  });
}

Estimate with_interval(double value, std::vector<double> replicates) {
  Estimate estimate{value, value, value, Uncertainty::none};
  if (replicates.empty()) return estimate;
  std::sort(replicates.begin(), replicates.end());
  estimate.low = percentile_of_sorted(replicates, 0.025);
  estimate.high = percentile_of_sorted(replicates, 0.975);
  estimate.kind = Uncertainty::bootstrap;
  return estimate;
}

double weighted_mean(const std::vector<double>& values, const std::vector<int>& multiplicity) {
  double sum = 0.0;
  std::int64_t count = 0;
  for (std::size_t i = 0; i < values.size(); ++i) {
    sum += values[i] * multiplicity[i];
    count += multiplicity[i];
  }
  return sum / static_cast<double>(count);
}

double mean(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

Estimate undefined() {
  constexpr double nan = std::numeric_limits<double>::quiet_NaN();
  return {nan, nan, nan, Uncertainty::none};
}

RowSummary summarize(const std::vector<RowDrift>& rows, const DriftOptions& options) {
  RowSummary summary;
  summary.rows = static_cast<std::int64_t>(rows.size());
  if (rows.empty()) {
    summary.kl_mean = summary.same_top1 = summary.top1_probability_change = undefined();
    summary.kl_percentiles.fill(undefined());
    return summary;
  }
  std::vector<double> kl, change;
  std::vector<int> request;
  std::int64_t same = 0;
  for (const RowDrift& row : rows) {
    kl.push_back(row.kl);
    change.push_back(std::fabs(row.top1_probability_change));
    request.push_back(row.request);
    same += row.same_top1;
  }
  std::vector<std::size_t> ascending(kl.size());
  std::iota(ascending.begin(), ascending.end(), std::size_t{0});
  std::sort(ascending.begin(), ascending.end(), [&](std::size_t a, std::size_t b) { return kl[a] < kl[b]; });
  std::vector<double> sorted;
  for (const std::size_t i : ascending) sorted.push_back(kl[i]);

  const std::vector<Block> blocks = cut_blocks(request, options.block);
  std::vector<double> mean_replicates, change_replicates;
  std::array<std::vector<double>, kPercentiles.size()> percentile_replicates;
  resample_rows(blocks, kl.size(), options, [&](const std::vector<int>& multiplicity) {
    mean_replicates.push_back(weighted_mean(kl, multiplicity));
    change_replicates.push_back(weighted_mean(change, multiplicity));
    const std::int64_t total = std::accumulate(multiplicity.begin(), multiplicity.end(), std::int64_t{0});
    std::size_t at = 0;
    std::int64_t seen = multiplicity[ascending[0]];
    for (std::size_t k = 0; k + 1 < kPercentiles.size(); ++k) {
      const auto rank = static_cast<std::int64_t>(std::ceil(kPercentiles[k] * static_cast<double>(total)));
      while (seen < rank && at + 1 < ascending.size()) seen += multiplicity[ascending[++at]];
      percentile_replicates[k].push_back(sorted[at]);
    }
  });
  summary.kl_mean = with_interval(mean(kl), mean_replicates);
  summary.top1_probability_change = with_interval(mean(change), change_replicates);
  for (std::size_t k = 0; k < kPercentiles.size(); ++k) {
    summary.kl_percentiles[k] = with_interval(percentile_of_sorted(sorted, kPercentiles[k]), percentile_replicates[k]);
  }
  summary.same_top1 = wilson_interval(same, summary.rows);
  return summary;
}

// Where `answer` last begins in `prompt`; -1: nowhere, or it is too short to tell.
int find_answer(std::span<const std::int32_t> prompt, std::span<const std::int32_t> answer) {
  if (std::ssize(answer) < kFoundAnswerTokens) return -1;
  const auto found = std::find_end(prompt.begin(), prompt.end(), answer.begin(), answer.end());
  return found == prompt.end() ? -1 : static_cast<int>(found - prompt.begin());
}

struct ScoredToken {
  int request;
  std::int32_t token;
  double dense_nll, candidate_nll;
};

Likelihood likelihood(const std::vector<ScoredToken>& tokens, double ScoredToken::*nll, const DriftOptions& options) {
  Likelihood result;
  result.tokens = static_cast<std::int64_t>(tokens.size());
  if (tokens.empty()) {
    result.perplexity = undefined();
    return result;
  }
  std::vector<double> all;
  std::vector<int> request;
  std::vector<std::size_t> bytes;
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    all.push_back(tokens[i].*nll);
    request.push_back(tokens[i].request);
    if (tokens[i].token < kByteTokens) bytes.push_back(i);
  }
  const auto bits_per_byte = [&](const std::vector<int>* multiplicity) {
    double sum = 0.0;
    std::int64_t count = 0;
    for (const std::size_t i : bytes) {
      const int times = multiplicity != nullptr ? (*multiplicity)[i] : 1;
      sum += all[i] * times;
      count += times;
    }
    return count == 0 ? std::numeric_limits<double>::quiet_NaN() : sum / static_cast<double>(count) / std::log(2.0);
  };
  const std::vector<Block> blocks = cut_blocks(request, options.block);
  std::vector<double> perplexities, bits;
  resample_rows(blocks, all.size(), options, [&](const std::vector<int>& multiplicity) {
    perplexities.push_back(std::exp(weighted_mean(all, multiplicity)));
    const double value = options.byte_level ? bits_per_byte(&multiplicity) : 0.0;
    if (!std::isnan(value)) bits.push_back(value);
  });
  result.perplexity = with_interval(std::exp(mean(all)), perplexities);
  if (options.byte_level && !bytes.empty()) result.bits_per_byte = with_interval(bits_per_byte(nullptr), bits);
  return result;
}

// Number of leading logits rows that both runs computed from the same tokens.
std::int64_t comparable_rows(const RequestRecord& dense, const RequestRecord& candidate) {
  const std::size_t common = std::min(dense.tokens.size(), candidate.tokens.size());
  std::size_t same = 0;
  while (same < common && dense.tokens[same] == candidate.tokens[same]) ++same;
  return std::min({dense.logits.extent(0), candidate.logits.extent(0), static_cast<std::int64_t>(same) + 1});
}

}  // namespace

std::string_view to_string(Uncertainty kind) {
  switch (kind) {
    case Uncertainty::none:
      return "none";
    case Uncertainty::bootstrap:
      return "bootstrap";
    case Uncertainty::wilson:
      return "wilson";
  }
  return "?";
}

double kl_divergence(std::span<const float> logits_p, std::span<const float> logits_q) {
  const double norm_p = log_sum_exp(logits_p);
  const double norm_q = log_sum_exp(logits_q);
  double sum = 0.0;
  for (std::size_t i = 0; i < logits_p.size(); ++i) {
    const double log_p = static_cast<double>(logits_p[i]) - norm_p;
    const double log_q = static_cast<double>(logits_q[i]) - norm_q;
    sum += std::exp(log_p) * (log_p - log_q);
  }
  return std::max(sum, 0.0);  // rounding of equal distributions may fall below zero
}

std::int32_t argmax_lowest_id(std::span<const float> logits) {
  return static_cast<std::int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());  // the first of equal maxima
}

Estimate wilson_interval(std::int64_t successes, std::int64_t trials) {
  if (trials == 0) return undefined();
  const double n = static_cast<double>(trials);
  const double rate = static_cast<double>(successes) / n;
  const double z2 = kNormalQuantile * kNormalQuantile;
  const double center = (rate + z2 / (2 * n)) / (1 + z2 / n);
  const double half = kNormalQuantile / (1 + z2 / n) * std::sqrt(rate * (1 - rate) / n + z2 / (4 * n * n));
  // Exactly 0 and 1 where nothing or all succeeded; the difference leaves a rounding there.
  return {rate, successes == 0 ? 0.0 : center - half, successes == trials ? 1.0 : center + half, Uncertainty::wilson};
}

Drift measure_drift(const RunRecord& dense, const RunRecord& candidate, const Trace& trace, const DriftOptions& options) {
  if (dense.requests.size() != trace.requests.size() || candidate.requests.size() != trace.requests.size()) {
    throw InternalError("drift of records with " + std::to_string(dense.requests.size()) + " and " +
                        std::to_string(candidate.requests.size()) + " requests for a trace of " + std::to_string(trace.requests.size()));
  }
  Drift result;
  std::vector<RowDrift> first_rows, later_rows;
  std::vector<ScoredToken> tokens;
  TaskAccuracy task;
  bool has_task = false;

  for (std::size_t i = 0; i < trace.requests.size(); ++i) {
    const RequestRecord& d = dense.requests[i];
    const RequestRecord& c = candidate.requests[i];
    const TraceRequest& request = trace.requests[i];
    // How far a cancelled request came depends on the plan.
    if (d.outcome == RequestOutcome::cancelled || c.outcome == RequestOutcome::cancelled) continue;
    if (d.logits.shape.size() != 2 || c.logits.shape.size() != 2 || d.logits.extent(1) != c.logits.extent(1)) {
      throw InternalError("drift of request " + std::to_string(i) + ": logits are absent or their vocabularies differ");
    }
    const std::int64_t rows = comparable_rows(d, c);
    result.rows_left_out += std::max(d.logits.extent(0), c.logits.extent(0)) - rows;
    for (std::int64_t j = 0; j < rows; ++j) {
      const auto p = d.logits.row(j);
      const auto q = c.logits.row(j);
      if (!all_finite(p) || !all_finite(q)) {
        ++result.rows_non_finite;
        continue;
      }
      const std::int32_t top = argmax_lowest_id(p);
      RowDrift row;
      row.request = static_cast<int>(i);
      row.row = static_cast<int>(j);
      row.kl = kl_divergence(p, q);
      row.same_top1 = top == argmax_lowest_id(q);
      row.top1_probability_change = std::exp(-negative_log_likelihood(q, top)) - std::exp(-negative_log_likelihood(p, top));
      const auto at = static_cast<std::size_t>(j);
      if (at < d.tokens.size() && at < c.tokens.size() && d.tokens[at] == c.tokens[at]) {
        row.token = d.tokens[at];
        row.dense_nll = negative_log_likelihood(p, row.token);
        row.nll = negative_log_likelihood(q, row.token);
        row.scored = request.answer_mask.empty() || (at < request.answer_mask.size() && request.answer_mask[at] != 0);
        tokens.push_back({row.request, row.token, row.dense_nll, row.nll});
      }
      (j == 0 ? first_rows : later_rows).push_back(row);
      result.rows.push_back(row);
    }
    if (request.answer_mask.empty() || request.forced.empty()) continue;
    has_task = true;
    const auto& mask = request.answer_mask;
    for (std::size_t begin = 0; begin < mask.size();) {
      if (mask[begin] == 0) {
        ++begin;
        continue;
      }
      std::size_t end = begin;
      bool dense_right = true, candidate_right = true;
      for (; end < mask.size() && mask[end] != 0; ++end) {
        const bool compared = static_cast<std::int64_t>(end) < rows;
        const auto right = [&](const RequestRecord& r) {
          if (!compared) return false;
          const auto logits = r.logits.row(static_cast<std::int64_t>(end));
          return all_finite(logits) && argmax_lowest_id(logits) == request.forced[end];
        };
        dense_right = dense_right && right(d);
        candidate_right = candidate_right && right(c);
      }
      const std::span<const std::int32_t> answer = std::span(request.forced).subspan(begin, end - begin);
      result.answers.push_back({static_cast<int>(i), static_cast<int>(begin), static_cast<int>(answer.size()),
                                find_answer(request.prompt, answer), dense_right, candidate_right});
      ++task.answers;
      task.dense_correct += dense_right;
      task.candidate_correct += candidate_right;
      begin = end;
    }
  }

  result.first_token = summarize(first_rows, options);
  result.continuation = summarize(later_rows, options);
  result.dense = likelihood(tokens, &ScoredToken::dense_nll, options);
  result.candidate = likelihood(tokens, &ScoredToken::candidate_nll, options);
  if (has_task) {
    task.dense = wilson_interval(task.dense_correct, task.answers);
    task.candidate = wilson_interval(task.candidate_correct, task.answers);
    result.task = task;
  }
  return result;
}

}  // namespace loopgauge::harness
