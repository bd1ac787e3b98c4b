// SPDX-License-Identifier: Apache-2.0
// Known issues: regressions that somebody has looked at and lets pass until a day. Text, committed beside the baseline:
//
//     loopgauge-known-issues 1
//     # until      case                            executor   metric    why
//     2027-01-31   serial/t1s1q1:*/needle-*        optimized  kl_mean   ticket 123: the FP8 kernel is being replaced
//     2027-01-31   split*/t0s0q0/*                 *          case      ticket 124: fails on the runner's old driver
//
// One line per issue, fields separated by blanks: the last day on which it holds, a glob over case ids, a glob over executors, a glob over
// metrics of the baseline (`case`: a case that fails or is missing as a whole), and why, which must be given. '#' begins a comment line.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace loopgauge::harness {

inline constexpr int kKnownIssuesVersion = 1;
inline constexpr std::string_view kWholeCase = "case";

struct KnownIssue {
  int line = 0;
  std::string until;                 // "2027-01-31": texts of dates compare as dates
  std::string id, executor, metric;  // globs
  std::string why;
  bool matches(std::string_view case_id, std::string_view case_executor, std::string_view case_metric) const;
};

// Throws FileError naming `name` and the line for anything else, including a day that no calendar has.
std::vector<KnownIssue> parse_known_issues(std::string_view text, std::string_view name);
std::vector<KnownIssue> read_known_issues(const std::filesystem::path& path);

// Throws ConfigError unless `text` is a date such as 2027-01-31.
void require_date(std::string_view text);
// Today in UTC, in that form.
std::string today();

}  // namespace loopgauge::harness
