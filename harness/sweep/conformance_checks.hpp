// SPDX-License-Identifier: Apache-2.0
// The checks operations, decision_forced, teacher_forced and free_run of one case of a candidate, with the tables behind them.
#pragma once

#include <array>
#include <string_view>

#include "harness/report/report.hpp"
#include "harness/sweep/conformance_baseline.hpp"
#include "harness/sweep/operation_conformance.hpp"

namespace loopgauge::harness {

inline constexpr std::string_view kOperationsCheck = "operations";
inline constexpr std::string_view kDecisionForcedCheck = "decision_forced";
inline constexpr std::string_view kTeacherForcedCheck = "teacher_forced";
inline constexpr std::string_view kFreeRunCheck = "free_run";
inline constexpr std::array kConformanceChecks{kOperationsCheck, kDecisionForcedCheck, kTeacherForcedCheck, kFreeRunCheck};

// Appends to row.checks, row.tolerance and row.decisions. `own` is the candidate's record of the case, with all groups; the candidate runs
// again observed, and where it must take decisions.
void judge_conformance(Executor& candidate, const Checkpoint& checkpoint, const OperationReference& operations, const Case& value, const Trace& trace, const RunRecord& own,
                       const ConformanceBaseline& baseline, CaseResult& row);

}  // namespace loopgauge::harness
