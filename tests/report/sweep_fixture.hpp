// SPDX-License-Identifier: Apache-2.0
// A sweep over a small random model, fast enough to run every setting many times.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "harness/executor_by_name.hpp"
#include "harness/report/schema.hpp"
#include "harness/sweep/sweep.hpp"
#include "tests/reference/executor/tiny_model.hpp"

namespace loopgauge::harness {

// The check of a row by its name; null where the row has none.
inline const CheckRow* find_check(const CaseResult& row, std::string_view name) {
  const auto found = std::find_if(row.checks.begin(), row.checks.end(), [&](const CheckRow& check) { return check.name == name; });
  return found == row.checks.end() ? nullptr : &*found;
}

inline std::string status_of(const CaseResult& row, std::string_view name) {
  const CheckRow* check = find_check(row, name);
  return check == nullptr ? "absent" : check->status;
}

// Prompts over one flush, one window and one group, with continuations that flush the tail again.
inline std::vector<Trace> small_traces() {
  Trace single = test::trace_of({test::request(0, 9, 4)});
  single.name = "single";
  Trace several = test::trace_of({test::request(0, 130, 70), test::request(1, 65, 5)});
  several.name = "several";
  return {single, several};
}

struct SmallSweep {
  explicit SmallSweep(std::vector<Trace> traces = small_traces(), const std::vector<std::string>& globs = {"*"}) {
    request.set = "small";
    request.traces = std::move(traces);
    request.executors = ExecutorChoice::reference;
    std::vector<CaseTrace> named;
    for (const Trace& trace : request.traces) named.push_back({trace.name, false});
    std::vector<Case> cases;
    for (const Case& value : enumerate_cases(named, default_modes())) {
      for (const std::string& glob : globs) {
        if (glob_match(glob, case_id(value))) {
          cases.push_back(value);
          break;
        }
      }
    }
    request.cases = numbered_cases(cases, request.traces, checkpoint.config);
    reference = make_executor("reference", checkpoint);
    executors.reference = {reference.get()};
    executors.device = "no CUDA device";
  }

  // Runs the given cases (default: all) to the end.
  Report run(std::optional<std::vector<SweepCase>> cases = {}) {
    Report report;
    report.meta.executors = to_string(request.executors);
    report.meta.case_count = std::ssize(request.cases);
    report.cases = planned_rows(request, cases.value_or(request.cases), executors, checkpoint.config);
    resume(report);
    return report;
  }

  void resume(Report& report) {
    run_sweep(
        request, executors, checkpoint, report, [](const CaseResult&, std::int64_t, std::int64_t) {},
        [](const Report&, std::int64_t, std::int64_t) { return true; });
  }

  Checkpoint checkpoint = test::tiny_checkpoint();
  SweepRequest request;
  std::unique_ptr<Executor> reference;
  SweepExecutors executors;
};

// A row as text, times left out.
inline std::string row_text(CaseResult row) {
  row.seconds = kNotApplicable;
  row.timings.clear();
  std::string text;
  const auto add = [&](const auto& entry) {
    using Row = std::remove_cvref_t<decltype(entry)>;
    for (const Column<Row>& column : columns<Row>()) text += cell_text(entry, column) + "|";
    text += "\n";
  };
  add(row);
  visit_tables([&](const char* name, const char*, auto table) {
    text += std::string(name) + "\n";
    for (const auto& entry : row.*table) add(entry);
  });
  return text;
}

}  // namespace loopgauge::harness
