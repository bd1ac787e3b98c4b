// SPDX-License-Identifier: Apache-2.0
// Runs cases on one executor and judges them. Nothing is run twice: the dense baseline of a trace and the serial run of a setting are
// kept (as logits and as a finished row) for the cases that need them.
// A runner belongs to one thread; runners of several threads share the dense baselines.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "harness/case.hpp"
#include "harness/report/report.hpp"
#include "harness/sweep/checks.hpp"
#include "harness/sweep/conformance_baseline.hpp"
#include "harness/sweep/dense_baselines.hpp"
#include "harness/sweep/operation_conformance.hpp"
#include "models/checkpoint.hpp"
#include "models/executor.hpp"

namespace loopgauge::harness {

// What a sweep wants to know.
enum class Measure {
  everything,  // all checks
  // Drift and the predicted memory ratio only: logits are all that is recorded, and nothing is compared with the specification or the
  // reference. The dense run is one in the case's own mode. For quality over many settings (reports/quality).
  quality,
  // Every mode against the executor's own serial run of the same settings, with what modes promise and report; no audit, no comparison with
  // the reference. For speculation over long traces (reports/speculation).
  modes,
};
std::string_view to_string(Measure measure);
Measure parse_measure(std::string_view text);  // throws ConfigError listing the words

struct CaseRunnerOptions {
  // Require that a second run with taps attached has the same bits. A plan that must equal the serial one is run with taps in the first
  // place; only where that does not suffice is a case run twice. Where bits differ, one more run without taps tells taps that change
  // results from plans that do and from an executor that is not repeatable.
  bool repeat_with_taps = false;
  // Once every row is judged and nothing else runs, repeat each passed row of the optimized column that often for its times: without taps and
  // without recording, after one repetition that is not counted. At least 3, or 0: the time of the judged run, which records, is all there is.
  int time_runs = 0;
  Measure measure = Measure::everything;
  DriftOptions drift;
  AuditOptions audit;
};

// What is known of the other cases of the same settings and trace.
struct Companions {
  const CaseResult* serial = nullptr;  // the finished row of the serial plan; null: serial is run when it is needed
  bool tapped_later = false;           // another plan that must give the same bits will run with taps
};

class CaseRunner {
 public:
  // Everything referred to must outlive the runner. `baselines` are of this executor (or of others with the same bits).
  CaseRunner(Executor& executor, const Checkpoint& checkpoint, DenseBaselines& baselines, CaseRunnerOptions options);

  // Fills verdict, numbers and tables of `row`, whose identity is set. Checks: audit of the record against the specification; bits equal to
  // the serial plan's where the specification promises them, the distance from them elsewhere; with a trace that cancels or preempts, bits
  // equal to those of the serial plan of the undisturbed trace, cancelled requests as far as they came; what the mode promises
  // (mode_checks.hpp); repetition with taps if asked; drift against dense; predicted memory.
  // Exceptions of the run become the row's status: NumericError failed, UnsupportedError not_run, anything else error.
  // With `conformance` the record is also compared with the reference's (checks decision_forced, teacher_forced, free_run).
  void judge(const Case& value, const Trace& trace, const Companions& companions, CaseResult& row,
             const ConformanceBaselines::Entry* conformance = nullptr);

  // Replaces the times of the row by those of options.time_runs repetitions, and its seconds by their median.
  void measure_time(const Case& value, const Trace& trace, CaseResult& row);

  // From now on judge() keeps the run of the case `id`, observed as a baseline needs it, where that costs no run; "" keeps none.
  void keep_run(std::string id) {
    keep_ = std::move(id);
    kept_.reset();
  }
  // The kept run, once; empty when the case was not run or not finished.
  std::optional<ObservedRun> take_kept_run() { return std::exchange(kept_, {}); }

  // The executor with a planted fault, against the clean executor. Both runs are judged alike, so that a rule that fires without a fault
  // shows. Without `conformance` the executor promises bits and any difference from the clean run is the finding; with it both runs are
  // compared with the reference's, and it is that comparison that must notice.
  void judge_mutant(const Case& value, const Trace& trace, Fault fault, CaseResult& clean_row, CaseResult& mutant_row,
                    const ConformanceBaselines::Entry* conformance = nullptr);

 private:
  class CountingTap;

  struct Run {
    RunRecord record;
    Plan plan;
    std::unique_ptr<KeyLogitTap> keys;  // of a run that is to be kept
    Digests digests;
    double seconds = 0.0;
  };

  void measure_quality(const Case& value, const Trace& trace, CaseResult& row);
  void judge_or_throw(const Case& value, const Trace& trace, const Companions& companions, CaseResult& row);
  // With repeat_with_taps the first run must be without taps, and a run with sparse decode attention is kept with a tap's evidence: then
  // nothing is kept.
  bool keeps(const Case& value) const {
    const bool needs_tap = value.config.sparse_decode_attention.enabled;
    return !keep_.empty() && keep_ == case_id(value) && !(options_.repeat_with_taps && needs_tap);
  }
  void judge_mutant_or_throw(const Case& value, const Trace& trace, Fault fault, const RunRecord& clean, CaseResult& row);

  Run run(Executor& executor, const Case& value, const Trace& trace, const RunOptions& options);
  Run run_all_groups(const Case& value, const Trace& trace, Tap* tap = nullptr);
  // Audit, drift and memory of a run whose bits are not known from another row.
  void judge_record(const Case& value, const Trace& trace, const RunRecord& record, CaseResult& row);
  // Levels 2 to 5 for a run of `candidate`, where a baseline is given.
  void judge_against_reference(Executor& candidate, const Case& value, const Trace& trace, const RunRecord& record, CaseResult& row);
  // `tap` was attached to `actual`; null: none was.
  void compare_with_serial(const Case& value, const Trace& trace, const Run& actual, const CountingTap* tap, const CaseResult& serial,
                           CaseResult& row);
  // Of a run with `tap` that has the expected bits.
  static CheckRow tap_check(const CountingTap& tap);
  CheckRow repeat_with_taps(const Case& value, const Trace& trace, const Run& first);
  const CaseResult& serial_row(const Case& value, const Trace& trace);
  // The run of the serial plan of the undisturbed trace, kept for the cases of one setting.
  const Run& whole_run(const Case& value, const Trace& trace);
  // Adds a failed check where a request was cancelled at another place than the plan says.
  bool cancellations_agree(const Case& value, const Trace& trace, const Run& actual, CaseResult& row);
  void compare_with_whole(const Case& value, const Trace& trace, const Run& actual, CaseResult& row);
  void enter_trace(const Trace& trace);
  EffectiveConfig resolve(const Case& value) const;

  Executor& executor_;
  const Checkpoint& checkpoint_;
  DenseBaselines& baselines_;
  CaseRunnerOptions options_;

  std::string keep_;
  std::optional<ObservedRun> kept_;
  const ConformanceBaselines::Entry* conformance_ = nullptr;  // of the case being judged
  std::unique_ptr<OperationReference> operations_;            // once a candidate is judged

  // Of the current trace.
  const Trace* trace_ = nullptr;
  std::map<std::string, CaseResult> serial_rows_;  // by case id; serial runs that are no row of the report
  std::string whole_id_;                           // the case that whole_ is of
  std::optional<Run> whole_;
};

}  // namespace loopgauge::harness
