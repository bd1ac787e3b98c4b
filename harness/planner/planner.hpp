// SPDX-License-Identifier: Apache-2.0
// From an execution mode and a trace to a plan. A schedule (serial, split, mixed, wcpb; one file each) picks what runs next, modifiers
// (prefix, preempt; one file each) add actions, pd hands every request off when its prompt is complete, async and graph are properties of the
// plan. A plan depends on lengths, arrivals, events,
// the window, the mode and, under prefix, on which prompts begin alike; never on results: every row that a request could need is planned,
// and executors skip the rows of a request that has stopped and the loops after an exit.
#pragma once

#include <optional>

#include "harness/case.hpp"
#include "models/plan.hpp"
#include "models/trace.hpp"

namespace loopgauge::harness {

struct PlanFailure {
  int submission = 0;  // index into Plan::submissions
  PlannedFailure kind = PlannedFailure::none;
};
// "launch@17", "allocation@0". The parser throws ConfigError.
PlanFailure parse_plan_failure(std::string_view text);

struct PlanOptions {
  // That submission fails, and the next one begins with a rewind of every request that it touched (S-FAIL).
  std::optional<PlanFailure> failure;
};

// The plan of `mode` for `trace`, legal by plan_fault. Plan::mode is mode_text(mode). Time is counted in submissions: a request is not
// scheduled before its arrival, and the events of the trace happen where data/README.md says; when nothing can run, time goes on to the
// next arrival or event (a plan holds no empty submission). Throws UnsupportedError for a mode without a planner in this version,
// ConfigError for an invalid mode parameter and for a failure of a submission that the plan does not have or that runs nothing.
Plan make_plan(const ModeSpec& mode, const Trace& trace, const EffectiveConfig& config, const PlanOptions& options = {});

}  // namespace loopgauge::harness
