// SPDX-License-Identifier: Apache-2.0
// What a run has to show beside its results: that it did what the name of its mode says, that every (position, loop) was executed as often
// as the specification says, and that nothing is held at the end. Pure functions of the plan and the record.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "harness/case.hpp"
#include "harness/report/report.hpp"
#include "models/plan.hpp"
#include "models/run_record.hpp"
#include "models/trace.hpp"

namespace loopgauge::harness {

inline constexpr std::string_view kModeCheck = "mode";
inline constexpr std::string_view kExecutionsCheck = "executions";
inline constexpr std::string_view kDrainCheck = "drain";
inline constexpr std::string_view kEqualsUndisturbedCheck = "equals_undisturbed";

// mode: the plan's actions happened and the counters prove each part of the mode: at least two submissions in flight and no value read
// back (async), windows reused (prefix), requests preempted (preempt), steps replayed (graph, optimized), several chunks of one prompt in
// a submission (wcpb), several requests in a submission (mixed), every planned handoff acknowledged (pd). not_run where the trace gives the mode nothing to do, and where the
// executor counts nothing.
// executions: of every request that completed, exactly the (position, loop) that the specification executes, each once, plus at most one
// execution for each rewind; windows that were reused never; and the counters agree with the sum.
// drain: RunRecord::held_at_drain is zero everywhere.
std::vector<CheckRow> mode_checks(const ModeSpec& mode, const Plan& plan, const Trace& trace, const EffectiveConfig& config,
                                  const RunRecord& record);

// ---- cancelled requests -----------------------------------------------------------------------------------------------------

// The trace without the events that disturb a request (cancel, preempt, resume); reuse_id stays.
Trace undisturbed(const Trace& trace);
bool disturbs(const Trace& trace);

// What a cancelled request may have recorded, were it cut out of the record of an undisturbed run: its rows as far as `cancelled` has them.
// Windows that `cancelled` has not scored have no scores and no active rows; a request whose prompt was not complete has nothing else. K/V
// and codec groups are empty.
RequestRecord cut_to(const RequestRecord& whole, const RequestRecord& cancelled, int window);

// Cuts requests of two runs of which one was cancelled earlier than the other ended down to what both have, so that what is left corresponds.
// A line for each: "request 1: cancelled with 3 logits rows, expected completed with 9". Requests with other prompts stay.
std::vector<std::string> cut_to_common(RunRecord& expected, RunRecord& actual, int window);

// Why request `index` cannot have ended as its record `actual` says: cancelled without a cancel in the plan or with other rows than had
// been read by then (S-ACT-2, S-ASYNC-1), or completed although its last row had not been read when the plan cancelled it. Empty when it
// can. A row that exits early may be there before its last planned loop. `whole` is the request's record in an undisturbed run.
std::string cancellation_fault(const Plan& plan, const EffectiveConfig& config, const TraceRequest& request, int index,
                               const RequestRecord& whole, const RequestRecord& actual);

}  // namespace loopgauge::harness
