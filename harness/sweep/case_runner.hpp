// SPDX-License-Identifier: Apache-2.0
// Runs cases on one executor and judges them. Nothing is run twice: the dense baseline of a trace and the serial run of a setting are
// kept (as logits and as a finished row) for the cases that need them.
// A runner belongs to one thread; runners of several threads share the dense baselines.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "harness/case.hpp"
#include "harness/report/report.hpp"
#include "harness/sweep/checks.hpp"
#include "harness/sweep/dense_baselines.hpp"
#include "models/checkpoint.hpp"
#include "models/executor.hpp"

namespace loopgauge::harness {

struct CaseRunnerOptions {
  // Run every case a second time with taps attached and require the same bits. Where they differ, a third run without taps tells a
  // tap that changes results from an executor that is not repeatable.
  bool repeat_with_taps = false;
  DriftOptions drift;
  AuditOptions audit;
};

class CaseRunner {
 public:
  // Everything referred to must outlive the runner. `baselines` are of this executor (or of others with the same bits).
  CaseRunner(Executor& executor, const Checkpoint& checkpoint, DenseBaselines& baselines, CaseRunnerOptions options);

  // Fills verdict, numbers and tables of `row`, whose identity is set. Checks: audit of the record against the specification; bits equal to
  // the serial plan's where the specification promises them; repetition with taps if asked; drift against dense; predicted memory.
  // `serial` is the finished row of the serial plan of the same settings; null: serial is run when it is needed.
  // Exceptions of the run become the row's status: NumericError failed, UnsupportedError not_run, anything else error.
  void judge(const Case& value, const Trace& trace, const CaseResult* serial, CaseResult& row);

  // The executor with a planted fault as a candidate against the clean executor. The clean run is audited too, so that an audit rule
  // that fires without a fault shows.
  void judge_mutant(const Case& value, const Trace& trace, Fault fault, CaseResult& clean_row, CaseResult& mutant_row);

 private:
  struct Run {
    RunRecord record;
    Digests digests;
    double seconds = 0.0;
  };

  void judge_or_throw(const Case& value, const Trace& trace, const CaseResult* serial, CaseResult& row);
  void judge_mutant_or_throw(const Case& value, const Trace& trace, Fault fault, const RunRecord& clean, CaseResult& row);

  Run run(const Case& value, const Trace& trace, const RunOptions& options);
  Run run_all_groups(const Case& value, const Trace& trace);
  // Audit, drift and memory of a run whose bits are not known from another row.
  void judge_record(const Case& value, const Trace& trace, const RunRecord& record, CaseResult& row);
  CheckRow compare_with_serial(const Case& value, const Trace& trace, const Run& actual, const CaseResult& serial);
  CheckRow repeat_with_taps(const Case& value, const Trace& trace, const Run& first);
  const CaseResult& serial_row(const Case& value, const Trace& trace);
  void enter_trace(const Trace& trace);
  EffectiveConfig resolve(const Case& value) const;

  Executor& executor_;
  const Checkpoint& checkpoint_;
  DenseBaselines& baselines_;
  CaseRunnerOptions options_;

  // Of the current trace.
  const Trace* trace_ = nullptr;
  std::map<std::string, CaseResult> serial_rows_;  // by case id; serial runs that are no row of the report
};

}  // namespace loopgauge::harness
