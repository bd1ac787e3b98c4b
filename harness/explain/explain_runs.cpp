// SPDX-License-Identifier: Apache-2.0
#include "harness/explain/explain_runs.hpp"

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <utility>

#include "harness/compare/distances.hpp"
#include "harness/compare/significant.hpp"
#include "harness/executor_by_name.hpp"
#include "harness/interrupt.hpp"
#include "harness/planner/planner.hpp"
#include "harness/replay.hpp"
#include "harness/sweep/mode_checks.hpp"
#include "harness/sweep/operation_conformance.hpp"
#include "models/error.hpp"
#include "models/spec/op_list.hpp"

namespace loopgauge::harness {
namespace {

RunOptions options_of(const RunSide& side, Tap& tap) {
  RunOptions options;
  options.profile = side.profile;
  options.fault = side.fault;
  options.tap = &tap;
  options.record = RecordGroups::all();
  return options;
}

// Where another plan is compared with the serial one, events of the trace disturb only the other: how far a cancelled request comes depends
// on the plan, and what it keeps is a part of an undisturbed run.
bool is_undisturbed(const ExplainSubject& subject, const RunSide& side) {
  return side.mode == ModeSpec{} && subject.expected.mode != subject.actual.mode && disturbs(subject.trace);
}
Trace trace_of(const ExplainSubject& subject, const RunSide& side) {
  return is_undisturbed(subject, side) ? undisturbed(subject.trace) : subject.trace;
}

RunRecord run(const ExplainSubject& subject, const RunSide& side, Tap& tap) {
  const std::unique_ptr<Executor> executor = make_executor(side.executor, subject.checkpoint);
  const Trace trace = trace_of(subject, side);
  const Plan plan = make_plan(side.mode, trace, subject.config);
  return replay_watched(*executor, plan, trace, subject.config, options_of(side, tap), nullptr);
}

// What a faulty run may end with: a value that decides is no number, or an executor finds its own state broken.
bool ends_a_run(const Error& error) { return error.kind() == ErrorKind::numeric || error.kind() == ErrorKind::internal; }

// Runs until `done` and no further, recording nothing. A faulty run may end before that.
void observe(const ExplainSubject& subject, const RunSide& side, Tap& tap, const std::function<bool()>& done) {
  const std::unique_ptr<Executor> executor = make_executor(side.executor, subject.checkpoint);
  RunOptions options = options_of(side, tap);
  options.record = {.logits = false};
  const Trace trace = trace_of(subject, side);
  const Plan plan = make_plan(side.mode, trace, subject.config);
  try {
    executor->begin(trace, subject.config, options_for(plan, options));
    for (const Submission& submission : plan.submissions) {
      throw_if_interrupted();
      executor->submit(submission);
      if (done()) return;
    }
    executor->finish();  // an executor may show its rows as late as here
  } catch (const Error& error) {
    if (&side == &subject.expected || !ends_a_run(error)) throw;
  }
}

// The first row that differs at one of the suspected places; `different`: whether any row that both runs have does.
std::optional<DivergentRow> first_divergent_row(const ExplainSubject& subject, const CellComparison& cells, bool& different) {
  RowDigests digests(&cells.suspects());
  observe(subject, subject.expected, digests, [&] { return digests.rows() == cells.expected_rows(); });
  RowComparer comparer(digests);
  observe(subject, subject.actual, comparer, [&] { return comparer.rows() == cells.actual_rows(); });
  different = comparer.different() > 0;
  return comparer.first();
}

// Repeats the actual run and gives the operation at that row the inputs that it had.
OwnBound check_own_bound(const ExplainSubject& subject, const BlamedOperation& blamed) {
  OwnBound bound;
  const auto unchecked = [&](const std::string& reason) {
    const spec::OpSpec* op = spec::find_op(blamed.name);
    const bool exact = blamed.decision || (op != nullptr && op->determinism == spec::Determinism::exact);
    bound.state = exact ? OwnBound::State::exact : OwnBound::State::not_checked;
    bound.reason = exact ? "" : reason;
    return bound;
  };
  if (subject.actual.profile == Profile::double_precision) {
    bound.reason = "the double profile rounds nothing, so the operation's bound does not hold for it";
    return bound;
  }
  if (blamed.decision) return unchecked("");
  if (blamed.position < 0) return unchecked("the divergence is of no row");
  std::vector<std::vector<int>> positions(subject.trace.requests.size());
  positions.at(static_cast<std::size_t>(blamed.request)) = {blamed.position};
  OperationTap tap(std::move(positions));
  RunRecord record;
  try {
    record = run(subject, subject.actual, tap);
  } catch (const Error& error) {
    if (!ends_a_run(error)) throw;
    return unchecked(std::string("the actual run ends with an error: ") + error.what());
  }
  const RequestRecord& request = record.requests.at(static_cast<std::size_t>(blamed.request));
  if (blamed.position >= request.prompt_length + request.fed) return unchecked("the actual run does not reach this row");
  const bool declared_order = record.profile == to_string(Profile::declared);
  const OperationReference operations(subject.checkpoint);
  const std::vector<OperationErrors> all = operations.check(tap, record, subject.trace, subject.config, declared_order);
  const auto found = std::find_if(all.begin(), all.end(), [&](const OperationErrors& errors) {
    return errors.operation == blamed.name && (errors.loop == blamed.loop || errors.loop < 1);
  });
  if (found == all.end()) return unchecked("what the operation read is in no record of the run");
  bound.ratio = std::fmax(found->largest_ratio, found->largest_share);
  bound.state = found->passed() ? OwnBound::State::within : OwnBound::State::beyond;
  return bound;
}

// Checks the operations of sampled rows of the actual run; the first faulty one takes the blame.
void blame_faulty_operation(const ExplainSubject& subject, const RunRecord& expected, Explanation& explanation) {
  OperationTap tap(sampled_positions(expected, subject.checkpoint.config), sampled_key_ranges(expected));
  const RunRecord record = run(subject, subject.actual, tap);
  if (!shape_difference(expected, record).empty()) return;  // the sample is not of this run
  const bool declared_order = record.profile == to_string(Profile::declared);
  std::vector<OperationErrors> all =
      OperationReference(subject.checkpoint).check(tap, record, subject.trace, subject.config, declared_order);
  explanation.operations_checked = static_cast<int>(all.size());
  std::stable_sort(all.begin(), all.end(), [](const OperationErrors& a, const OperationErrors& b) { return a.loop < b.loop; });
  const OperationErrors* first = nullptr;
  for (const OperationErrors& errors : all) {
    if (errors.passed()) continue;
    if (first == nullptr) first = &errors;
    explanation.faulty.push_back({errors.operation, errors.loop, std::fmax(errors.largest_ratio, errors.largest_share),
                                  errors.tap + " " + errors.where.text() + " element " + std::to_string(errors.element)});
  }
  if (first == nullptr) return;
  explanation.operation = blame_operation(first->operation, first->where.request, first->where.position, first->loop, first->where.layer);
  explanation.bound = {OwnBound::State::beyond, explanation.faulty.front().ratio, {}};
}

struct Divergences {
  Explanation explanation;
  RunRecord expected;
};

// `narrow`: down to the row.
Divergences compare_runs(const ExplainSubject& subject, bool narrow) {
  Divergences result;
  Explanation& explanation = result.explanation;
  CellDigests expected_cells;
  result.expected = run(subject, subject.expected, expected_cells);
  CellDigests actual_cells(&expected_cells);
  std::optional<RunRecord> actual;
  try {
    actual = run(subject, subject.actual, actual_cells);
  } catch (const Error& error) {
    if (!ends_a_run(error)) throw;
    explanation.actual_error = error.what();
  }
  const int window = subject.config.window();
  if (actual) {
    RunRecord expected = result.expected;
    explanation.outcomes = cut_to_common(expected, *actual, window);
    explanation.outcomes_decide = subject.expected.mode == subject.actual.mode;
    explanation.results = compare_records(expected, *actual, window);
    explanation.decision = first_decision(explanation.results);
    if (explanation.decision) {
      explanation.decision_margin_text = decision_margin(*explanation.decision, result.expected, subject.config.values());
    }
  }
  // Rejected candidates stand where committed rows stand, and another plan has others: only results say where the runs part.
  if (rows_are_comparable(subject)) {
    // Two plans may do different work for the same results: windows that are reused, rows past the end, rows that a rewind repeats.
    const bool work_may_differ = subject.expected.mode != subject.actual.mode && actual && explanation.results.identical();
    const CellComparison cells(expected_cells, actual_cells, work_may_differ);
    explanation.rows_compared = cells.compared();
    explanation.places = cells.places();
    explanation.places_different = cells.different();
    if (narrow && !cells.suspects().empty()) {
      bool different = false;
      explanation.row = first_divergent_row(subject, cells, different);
      if (work_may_differ && !different) {
        explanation.row.reset();
        explanation.places_different = 0;
      }
    }
  }

  const Divergence* first = explanation.results.first ? &*explanation.results.first : nullptr;
  if (explanation.row) {
    const RowId& row = explanation.row->id;
    const auto at = static_cast<std::size_t>(row.request);
    first = actual && explanation.results.requests.at(at) ? &*explanation.results.requests.at(at) : nullptr;
    explanation.result_is_first = first != nullptr && happens_before(*first, row, result.expected.requests.at(at), window);
  }
  if (explanation.row && !explanation.result_is_first) {
    explanation.operation =
        blame_row(explanation.row->id, result.expected.requests.at(static_cast<std::size_t>(explanation.row->id.request)), subject.config);
  } else if (first != nullptr) {
    explanation.operation = blame_result(*first, result.expected.requests.at(static_cast<std::size_t>(first->request)));
  }
  return result;
}

}  // namespace

std::string RunSide::text() const {
  std::string line = executor + " executor, " + std::string(to_string(profile)) + " profile, " + mode_text(mode) + " plan";
  if (fault != Fault::none) line += ", planted fault " + std::string(to_string(fault));
  return line;
}

std::string OwnBound::text() const {
  switch (state) {
    case State::within:
      return "within (error / bound " + significant(ratio, 3) +
             "): with the inputs that it had the operation is right, so the difference came with them or is that of another order";
    case State::beyond:
      return "beyond (error / bound " + significant(ratio, 3) + "): with the inputs that it had the operation is wrong";
    case State::exact:
      return "none, the operation is exact: with equal inputs any difference is its fault";
    case State::not_checked:
      return "not checked: " + reason;
  }
  return {};
}

bool rows_are_comparable(const ExplainSubject& subject) {
  return subject.expected.mode == subject.actual.mode || !(subject.expected.mode.speculates() || subject.actual.mode.speculates());
}

Explanation find_divergence(const ExplainSubject& subject) { return compare_runs(subject, true).explanation; }

bool runs_differ(const ExplainSubject& subject) {
  const Explanation found = compare_runs(subject, false).explanation;
  return !found.identical() || found.places_different > 0;
}

Explanation explain_runs(const ExplainSubject& subject) {
  Divergences found = compare_runs(subject, true);
  Explanation& explanation = found.explanation;
  if (explanation.row) {
    const DivergentRow& row = *explanation.row;
    RowCapture on_expected(row.id, kEvidenceBytes), on_actual(row.id, kEvidenceBytes);
    if (row.expected_submission >= 0) observe(subject, subject.expected, on_expected, [&] { return on_expected.found(); });
    if (row.actual_submission >= 0) observe(subject, subject.actual, on_actual, [&] { return on_actual.found(); });
    explanation.expected_row = on_expected.values();
    explanation.actual_row = on_actual.values();
    explanation.row_difference = row_difference(row.id.operation, explanation.expected_row, explanation.actual_row,
                                                std::max(on_expected.width(), on_actual.width()), subject.checkpoint.config);
  }
  if (explanation.operation.name.empty()) return std::move(explanation);
  explanation.bound = check_own_bound(subject, explanation.operation);
  const bool orders_differ = subject.expected.executor != subject.actual.executor || subject.expected.profile != subject.actual.profile;
  const bool checkable = explanation.actual_error.empty() && subject.actual.profile != Profile::double_precision;
  if (orders_differ && checkable && explanation.bound.state != OwnBound::State::beyond)
    blame_faulty_operation(subject, found.expected, explanation);
  return std::move(explanation);
}

}  // namespace loopgauge::harness
