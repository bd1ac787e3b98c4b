// SPDX-License-Identifier: Apache-2.0
// What a speculating run accepted (models/run_record.hpp, SpeculationRound), for the report and for the check of its mode.
#pragma once

#include <string>
#include <vector>

#include "harness/report/report.hpp"
#include "models/plan.hpp"
#include "models/run_record.hpp"
#include "models/trace.hpp"

namespace loopgauge::harness {

// A row per candidate index of a round, and one more for the bonus token. `serial`: of the same trace and settings; where it is given,
// tokens that differ from it are counted at their place in the round, up to the first of each request: what comes after follows another
// text.
std::vector<AcceptanceRow> acceptance_rows(const RunRecord& record, const RunRecord* serial);

// Why the rounds of the record cannot be those of the plan, or empty: every completed request's rounds are consecutive, emit as many tokens
// as it fed rows, and the counters add up.
std::string rounds_fault(const Plan& plan, const Trace& trace, const RunRecord& record);

// "31 rounds, 2.4 tokens a round, 44 of 93 candidates accepted".
std::string rounds_text(const RunRecord& record);

}  // namespace loopgauge::harness
