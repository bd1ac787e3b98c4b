// SPDX-License-Identifier: Apache-2.0
// Two runs of one trace and configuration, and where they part: the operation row, the recorded result, the decision, and the one operation
// of the registry that all of it comes down to. Runs are repeated instead of kept: the first two leave a sum for each
// place, the next two narrow the places that differ down to a row (row_divergence.hpp), further ones capture what is shown. Observing changes no result (S-TAP-1).
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "harness/case.hpp"
#include "harness/compare/explanation.hpp"
#include "harness/compare/record_compare.hpp"
#include "harness/compare/row_divergence.hpp"
#include "models/checkpoint.hpp"
#include "models/executor.hpp"

namespace loopgauge::harness {

// The most bytes of one row that are kept as evidence, on either side.
inline constexpr std::size_t kEvidenceBytes = 64 * 1024;

struct RunSide {
  ModeSpec mode;
  std::string executor = "reference";
  Profile profile = Profile::declared;
  Fault fault = Fault::none;
  std::string text() const;
};

struct ExplainSubject {
  const Checkpoint& checkpoint;
  const Trace& trace;
  const EffectiveConfig& config;
  RunSide expected, actual;
};

// Whether the operation where the runs part is right for the inputs that it had in the actual run.
struct OwnBound {
  enum class State {
    within,       // its output is within its tolerance: the difference came with inputs that no row shows, or is that of another order
    beyond,       // it is not: the fault is here
    exact,        // nothing is rounded: with equal inputs any difference is a fault
    not_checked,  // `reason`
  };
  State state = State::not_checked;
  double ratio = 0.0;  // error / bound, within and beyond
  std::string reason;
  std::string text() const;
};

// An operation of the actual run that is wrong for the inputs that it had, whatever came before it.
struct FaultyOperation {
  std::string name;  // of the registry
  int loop = 0;
  double ratio = 0.0;  // error / bound of the worst element
  std::string where;   // "attention.output request 0 position 17 layer 2 head 1 element 3"
};

struct Explanation {
  RecordComparison results;
  std::string actual_error;  // what ended the actual run, if anything did: its results are then not compared
  // Requests of which one run had more, because they were cancelled (harness/sweep/mode_checks.hpp, cut_to_common); what both have is
  // compared. Under one plan that is a difference; how far a cancelled request comes under two is the plans' affair.
  std::vector<std::string> outcomes;
  bool outcomes_decide = false;
  std::optional<Divergence> decision;
  std::string decision_margin_text;
  std::int64_t rows_compared = 0;                // operation rows that both runs have
  std::int64_t places = 0, places_different = 0;  // (request, position, loop); of them those with rows that differ or that one run lacks
  std::optional<DivergentRow> row;
  RowDifference row_difference;
  std::vector<float> expected_row, actual_row;
  bool result_is_first = false;  // the recorded result parts before the first operation row that differs
  BlamedOperation operation;     // empty when the runs are identical
  OwnBound bound;
  // Where the two runs add in different orders, by executor or profile, their first difference says nothing: the operations of sampled rows
  // of the actual run are then checked one by one, and the first that is beyond its bound is the one to blame.
  int operations_checked = 0;           // operations and loops
  std::vector<FaultyOperation> faulty;  // by loop, then in the registry's order

  bool outcomes_differ() const { return outcomes_decide && !outcomes.empty(); }
  bool identical() const { return actual_error.empty() && !row && !outcomes_differ() && results.identical(); }
};

// Whether operation rows of the two runs stand for each other. Under two plans of which one speculates they do not: then results alone are
// compared, and no row is counted.
bool rows_are_comparable(const ExplainSubject& subject);

// Whether two runs of one plan differ in anything observed, by two runs; of two plans work that differs counts too.
bool runs_differ(const ExplainSubject& subject);
// Two runs: what parts first, without the values of rows and without the bound.
Explanation find_divergence(const ExplainSubject& subject);
// find_divergence and the evidence, at most four more runs. Throws what an executor throws when the expected run fails.
Explanation explain_runs(const ExplainSubject& subject);

}  // namespace loopgauge::harness
