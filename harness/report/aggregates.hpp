// SPDX-License-Identifier: Apache-2.0
// Sums over the rows of a report for pages that cannot show every row: everything follows from the report's own numbers.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "harness/report/report.hpp"

namespace loopgauge::harness {

// The word of the verdict for people: "passed", "failed", "not run", ...; "fault not found" of a sweep whose planted fault no check noticed.
std::string verdict_word(const Report& report);

// One sentence: why the report has its verdict. Names the first row that decided it, or the most frequent reason of rows that did not run.
std::string verdict_reason(const Report& report);

// Largest error over its bound among the judged rows of `tolerance`; infinity where a failed row has no finite one, NaN where none is
// judged.
double worst_error_over_bound(const CaseResult& row);

// A value with its 95 % interval; NaN ends where none can be given.
struct Interval {
  double value = kNotApplicable, low = kNotApplicable, high = kNotApplicable;
};

// Mean of values that cannot be negative, with an interval from the spread between clusters, which are taken as independent: linearized
// variance of a ratio of sums, normal quantile, cut at 0. No interval below two clusters.
class ClusteredMean {
 public:
  void add(std::int64_t cluster, double value);
  Interval interval() const;
  std::int64_t count() const { return count_; }

 private:
  struct Sum {
    double values = 0.0;
    std::int64_t count = 0;
  };
  std::map<std::int64_t, Sum> clusters_;
  double sum_ = 0.0;
  std::int64_t count_ = 0;
};

// KL of the logits rows in [begin, end) of either axis, pooled over the serial rows of one setting on one executor. Clusters are at most
// eight consecutive rows of one request, as in harness/compare/drift.hpp.
struct DriftBin {
  std::int64_t begin = 0, end = 0;
  std::int64_t rows = 0;
  Interval kl;
  double kl_max = kNotApplicable;
  Interval same_top1;
};
struct DriftProfile {
  std::string executor;
  std::string settings;
  Interval continuation_kl;            // rows >= 1
  Interval first_token_kl;             // row 0, clusters are requests
  std::vector<DriftBin> after_prompt;  // by logits row: 0, 1, 2-3, 4-7, ...
  std::vector<DriftBin> by_position;   // by absolute position: 0-63, 64-127, 128-255, ...
  double noise_p99 = kNotApplicable;   // KL of the reordered reference to the reference, largest 99th percentile of a trace
  double noise_max = kNotApplicable;   // and its largest value
};
std::vector<DriftProfile> drift_profiles(const Report& report);

// One metric or operation and loop on one executor over all cases.
struct LoopConformance {
  std::string executor, level, operation;
  std::int64_t loop = -1;
  int judged = 0, failed = 0;
  double median = kNotApplicable, worst = kNotApplicable;  // error over bound
  std::size_t worst_row = 0;                               // index into Report::cases
  std::string where;
  // The yardsticks of the worst row over the same bound, at the percentile that decided: what arithmetic alone does. NaN where the level
  // has none (operations: their bound follows from the declared rounding).
  double reordered = kNotApplicable, exact = kNotApplicable;
};
std::vector<LoopConformance> loop_conformances(const Report& report);

// The distance of a yardstick over the limit of the judged row it belongs to, at the percentile that decided there. NaN when the row does
// not say which one that was.
double yardstick_over_bound(const ToleranceRow& judged, const ToleranceRow& yardstick);

// Speculation by mode, timing of the encoding (with tail and flush where they are not the default) and executor, pooled over switches, policies and traces.
struct AcceptanceSummary {
  std::string executor, mode;
  std::string timing;  // empty with Q off; "serial_aligned", "execution_dependent, tail 5", "execution_dependent, tail 0, eager"
  int cases = 0;
  struct Position {
    std::int64_t drafted = 0, accepted = 0, rounds = 0;
    std::int64_t divergences = 0;  // requests whose first token that differs from serial execution was emitted here
  };
  std::vector<Position> positions;
  double mean_emitted = kNotApplicable;  // tokens a round
  std::int64_t tokens = 0;               // emitted by rounds
  std::int64_t draft_loops = 0, verify_loops = 0, rejected_loops = 0;  // executions of one loop of one row; a committed row has four
  double dense_kl = kNotApplicable;      // mean KL of all logits rows to the dense run
  std::int64_t doubled_bytes = 0;        // most of a case: BF16 of encoded positions that a round still reads as BF16
  std::int64_t rewritten_rows = 0;       // positions of sealed blocks encoded again after a rejection
  double draft_seconds = 0, verify_seconds = 0, accept_seconds = 0;  // of the cases that measured them
  std::int64_t timed_tokens = 0;         // emitted by rounds of those cases, as often as they were timed
  // Verification rows against serial rows of the same tokens, where the timing allows a difference.
  std::int64_t divergent_rows = 0, different_rows = 0, flips = 0;
  std::int64_t compared_requests = 0;
  Interval kl_mean;  // bootstrapped over requests
  double kl_max = kNotApplicable;
  int equals_serial = 0;  // cases in which all bits were found to be those of the serial plan, of an undisturbed trace where it cancels or preempts
  double least_memory_ratio = kNotApplicable, most_memory_ratio = kNotApplicable;  // CaseResult::memory_ratio of its cases
};
std::vector<AcceptanceSummary> acceptance_summaries(const Report& report);

// Bytes of the trace with most of them. `executor` is empty for predictions, which do not depend on it.
struct MemoryBar {
  std::string settings, source, phase, executor;
  std::map<std::string, MemoryRow> categories;
};
struct MemoryBars {
  std::string trace;
  std::vector<MemoryBar> bars;
};
MemoryBars memory_bars(const Report& report);
bool is_kv_category(const std::string& category);  // holds K/V in whatever form, or what is needed to find it

// Times of one phase in the serial cases of one setting, over cases and repetitions.
struct TimingSummary {
  std::string executor, phase, settings;
  int cases = 0;
  std::int64_t repetitions = 0;
  double median = kNotApplicable, least = kNotApplicable, most = kNotApplicable, total = kNotApplicable;
  double floor = kNotApplicable;           // median of the floors of the same repetitions
  double ratio_to_floor = kNotApplicable;  // median of time over floor
};
std::vector<TimingSummary> timing_summaries(const Report& report);

}  // namespace loopgauge::harness
