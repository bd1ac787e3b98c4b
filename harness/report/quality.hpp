// SPDX-License-Identifier: Apache-2.0
// What a setting costs in quality: FlashLoop against dense Ouro on the same executor and the same forced tokens, from the rows of a report.
// The words are those of llama.cpp's perplexity tool: KLD, same top p, ln(PPL(Q)/PPL(base)), RMS delta p.
//
// Prose: scored rows of traces without marked answers. Row 0 of a request, the first generated token, has its own number and is in no
// other. Tasks: marked answers, right when every token is the argmax.
//
// Uncertainty. Intervals are 95 %, by percentile bootstrap over whole requests (drawn with replacement, fixed seed), because rows and
// answers of one request are not independent; with fewer than two requests there is none. Differences from dense are paired: a drawn
// request brings both sides. McNemar's test is exact and two-sided on the answers that changed; it takes answers as independent, so the
// interval beside it is the safer statement. `p_holm` is p after Holm's correction over all tasks and settings of one executor.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "harness/report/aggregates.hpp"
#include "harness/report/report.hpp"

namespace loopgauge::harness {

struct ProseQuality {
  std::string executor, settings;
  std::int64_t prompt_length = -1;  // of the requests pooled here; -1: all
  std::int64_t requests = 0, rows = 0;
  Interval kld_mean, kld_median, kld_p99, kld_p999;  // KL(dense || setting) in nats
  double kld_max = kNotApplicable;
  Interval same_top;                      // fraction of rows with the dense top-1 token
  Interval log_perplexity_ratio;          // ln(PPL(setting) / PPL(dense))
  Interval rms_delta_p;                   // root mean square change of the probability of the true token
  double bits_per_byte = kNotApplicable;  // of byte tokens
  double dense_bits_per_byte = kNotApplicable;
  Interval bits_per_byte_change;
  Interval first_token_kld;  // mean over requests
};

struct TaskQuality {
  std::string executor, settings;
  std::string trace;  // empty: all traces with answers
  int depth = -1;     // quarter of the prompt that holds what is asked for, from 0; -1: all answers
  std::int64_t requests = 0, answers = 0;
  std::int64_t dense_correct = 0, correct = 0;
  std::int64_t lost = 0, gained = 0;  // right in dense alone, right here alone
  Interval accuracy_change;
  double p = kNotApplicable, p_holm = kNotApplicable;  // McNemar; p_holm for single traces, dense itself left out
};

struct Quality {
  std::vector<ProseQuality> prose;  // by executor and setting: all lengths, then each
  std::vector<TaskQuality> tasks;   // by executor and setting: all traces, then each
  std::vector<TaskQuality> depths;  // by executor and setting: answers with a source position, by quarter
};

// One case counts for each (executor, setting, trace): the first that has drift. Rows of mutants are left out.
Quality measure_quality(const Report& report);

// Two-sided exact p of `lost` against `gained` changes, each as likely as the other under the hypothesis of no effect; 1 without changes.
double mcnemar_exact(std::int64_t lost, std::int64_t gained);
// Holm's step-down adjustment, in the order of `p`.
std::vector<double> holm_adjusted(std::span<const double> p);

}  // namespace loopgauge::harness
