// SPDX-License-Identifier: Apache-2.0
// Judges a report against a baseline, metric by metric. Where the same bits are promised (the reference; the optimized column on the device
// of the baseline) a number has no noise, and what a drift metric may move by is a small share of itself. Elsewhere it may move by the
// uncertainty of both values, and a change that many traces share is found by a paired test over them.
//
//   kind            regression when                                               judged on another device
//   digest          not equal                                                     no
//   bytes           more than before                                              yes
//   error / bound   more than 1.25 times what it was, and .02                     yes
//   drift, rates    worse by more than 2 % of itself; on another device beyond    yes
//                   both 95 % intervals together, or in the paired test
//   time            the fastest repetition is slower than the slowest was, by     no
//                   more than 5 %
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "harness/gate/baseline.hpp"
#include "harness/gate/known_issues.hpp"
#include "harness/report/report.hpp"

namespace loopgauge::harness {

// In ascending order of what decides: the word of a case is the largest of its metrics'. known: a regression or a missing value that is a
// known issue today.
enum class GateWord { unchanged, added, improved, known, missing, regression };
inline constexpr int kGateWords = 6;
std::string_view to_string(GateWord word);  // "unchanged", "new", "improved", "known", "missing", "regression"

struct GateMetric {
  std::string metric;
  GateWord word = GateWord::unchanged;
  std::string old_value, new_value;  // empty where a side has none
  std::string limit;                 // what was allowed, in words
  std::string why;                   // of a known issue
};

struct GateCase {
  std::string id;  // of a case, or "<settings> over N traces"
  std::string executor;
  GateWord word = GateWord::unchanged;
  std::string reason;               // of a case that did not pass or was not run
  std::vector<GateMetric> metrics;  // those that are not unchanged
  bool excused = false;             // missing because there is no device here: stated, decides nothing
};

struct GateResult {
  std::vector<GateCase> cases;  // by case id, then executor; then what the paired test found
  std::vector<std::string> notes;
  int passed = 0, failed = 0, skipped = 0;
  int exit_code = 0;  // 1 any regression, 5 anything missing, 0
};

struct GateOptions {
  std::vector<KnownIssue> known_issues;
  std::string today;  // "2027-01-31": issues until an earlier day have expired
};

// Throws FileError when the two are not comparable: another model or configuration of it, another set, a planted fault.
GateResult judge_report(const Report& report, const Baseline& baseline, const GateOptions& options = {});

// One line per metric that is not unchanged, one per case for missing ones, the counts last: "N passed, N failed, N skipped".
std::string gate_text(const GateResult& result);

// The same as workflow commands of GitHub Actions: an error per regression, a warning per missing or known one, a notice for what is new or
// improved. At most `limit` lines of each, the number of others as one more.
std::string github_annotations(const GateResult& result, int limit = 10);

}  // namespace loopgauge::harness
