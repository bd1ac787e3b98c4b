// SPDX-License-Identifier: Apache-2.0
// How far a plan's results are from the serial plan's where the specification promises no equality (execution_dependent timing).
#pragma once

#include <string>
#include <vector>

#include "harness/report/report.hpp"
#include "models/run_record.hpp"

namespace loopgauge::harness {

// A row per logits row that both records have: of free runs the rows up to the first token in which they differ.
std::vector<DivergenceRow> plan_divergence(const RunRecord& serial, const RunRecord& actual);
// "12 of 90 logits rows differ, first request 0 position 130; largest KL 0.002 at ...".
std::string divergence_summary(const std::vector<DivergenceRow>& rows);

}  // namespace loopgauge::harness
