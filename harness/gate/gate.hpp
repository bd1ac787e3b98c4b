// SPDX-License-Identifier: Apache-2.0
// Judges a report against a baseline. Digests and bytes are compared exactly; drift metrics move by more than their combined uncertainty
// or not at all.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "harness/gate/baseline.hpp"
#include "harness/report/report.hpp"

namespace loopgauge::harness {

// In ascending order of what decides: the word of a case is the largest of its metrics'.
enum class GateWord { unchanged, added, improved, missing, regression };
std::string_view to_string(GateWord word);  // "unchanged", "new", "improved", "missing", "regression"

struct GateMetric {
  std::string metric;
  GateWord word = GateWord::unchanged;
  std::string old_value, new_value;  // empty where a side has none
  std::string limit;                 // what was allowed, in words
};

struct GateCase {
  std::string id;
  std::string executor;
  GateWord word = GateWord::unchanged;
  std::string reason;               // of a case that did not pass or was not run
  std::vector<GateMetric> metrics;  // those that are not unchanged
  bool excused = false;             // missing because there is no device here: stated, decides nothing
};

struct GateResult {
  std::vector<GateCase> cases;  // by case id, then executor
  std::vector<std::string> notes;
  int passed = 0, failed = 0, skipped = 0;
  int exit_code = 0;  // 1 any regression, 5 anything missing, 0
};

// Throws FileError when the two are not comparable: other model, other set, a planted fault.
GateResult judge_report(const Report& report, const Baseline& baseline);

// One line per metric that is not unchanged, one per case for missing ones, the counts last: "N passed, N failed, N skipped".
std::string gate_text(const GateResult& result);

}  // namespace loopgauge::harness
