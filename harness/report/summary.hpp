// SPDX-License-Identifier: Apache-2.0
// What all human-readable renderers show: rows of a report grouped by mode and setting. Everything follows from the report's rows.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "harness/report/report.hpp"

namespace loopgauge::harness {

// The settings part of a case id: "t1s0q1:rolling:serial_aligned".
std::string settings_of(const CaseResult& row);

// How the cases of one executor ended, by setting (in order of first appearance) and mode.
struct StatusMatrix {
  std::string executor;
  std::vector<std::string> settings;
  std::vector<std::string> modes;
  std::map<std::pair<std::string, std::string>, StatusCounts> cells;  // (setting, mode)
};
std::vector<StatusMatrix> status_matrices(const Report& report);  // a matrix per executor column

// Drift of one setting on one executor, pooled over the traces: percentiles and means are those of all their rows together.
struct SettingDrift {
  std::string executor;
  std::string settings;
  int traces = 0;
  std::int64_t rows = 0;  // continuation rows
  double same_top1 = kNotApplicable;
  double same_top1_low = kNotApplicable, same_top1_high = kNotApplicable;  // 95 % Wilson interval
  double kl_mean = kNotApplicable, kl_p99 = kNotApplicable, kl_max = kNotApplicable;
  std::string kl_max_where;                // "<case id> request r position p"
  double first_token_kl = kNotApplicable;  // mean over requests
  std::int64_t first_tokens = 0;
  double bits_per_byte = kNotApplicable;  // over all scored tokens
  double task_accuracy = kNotApplicable;  // over all answers
  std::int64_t answers = 0;
};
// Serial rows only: other modes have the same bits or are failures of their own. Mutants and rows without drift are left out.
std::vector<SettingDrift> setting_drifts(const Report& report);

// How near one metric or operation came to its limit over all cases of a column: the worst loop of the worst case.
struct MetricConformance {
  std::string executor;
  std::string level;  // "operation", "decision_forced", "teacher_forced"
  std::string operation;
  int values = 0, failed = 0;                // judged: one per case and loop
  double error_over_bound = kNotApplicable;  // at most 1 passes
  std::int64_t loop = -1;
  std::string where;  // "<case id> <index>"
};
std::vector<MetricConformance> metric_conformances(const Report& report);  // judged rows, in order of first appearance

// Decisions of one kind that differ from the reference, of those that the report lists (roots, and all that are unexplained).
struct FlipCount {
  std::string executor;
  std::string kind;
  std::int64_t roots = 0, unexplained = 0;
  double largest_margin = kNotApplicable;  // of explained roots
};
std::vector<FlipCount> flip_counts(const Report& report);

// Steady bytes of the trace with most of them, per setting.
struct SettingMemory {
  std::string settings;
  std::map<std::string, MemoryRow> categories;  // predicted, steady, by category
  double ratio = kNotApplicable;
};
struct MemoryTable {
  std::string trace;
  std::vector<SettingMemory> rows;
};
MemoryTable memory_table(const Report& report);

}  // namespace loopgauge::harness
