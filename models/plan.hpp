// SPDX-License-Identifier: Apache-2.0
// A plan is the list of submissions that an execution mode makes of a trace (SPEC.md, "Plans"). Planners (harness/planner) produce
// plans, both executors consume them; the rules that make a plan legal are here and know nothing of the planners.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "models/algorithm_config.hpp"
#include "models/trace.hpp"

namespace loopgauge {

enum class RowKind { prefill, decode, draft, verify, stage };
std::string_view to_string(RowKind kind);

// Rows of one request that advance together through loops loop_first..loop_last (1-based, inclusive).
//   prefill: logical prompt positions [begin, end); at loops 3 and 4 only the active ones do work. Completing the last position of a
//            window at loop r completes (window, r). The range may span windows; results are those of processing them in ascending order.
//   decode:  exactly one position >= P. The row stops early where the exit rule says so.
// The others speculate. Where they start depends on what was accepted, so they name no position: begin and end count from the request's
// pending position p0 = P + committed decode rows, as it is when the round begins (S-SPEC-6, S-PIPE-3).
//   draft:   rows p0 + j of the round, j in [begin, end), within loops 1..d; with several loops one row after the other, each through them.
//   verify:  all K + 1 rows of the round, [0, K + 1), within loops d + 1..4. Loop 4 decides the round.
//   stage:   the live token that has completed loop_first - 1 loops; begin is the stage, (loop_first - 1) / d, end = begin + 1.
struct WorkItem {
  int request = 0;                         // index into Trace::requests
  RowKind kind = RowKind::prefill;
  int begin = 0;
  int end = 0;
  int loop_first = 1;
  int loop_last = kLoops;
  bool operator==(const WorkItem&) const = default;
};

// What happens to a request's state between two submissions (S-ACT). Actions advance no row.
enum class ActionKind {
  cancel,   // the request ends: everything it holds is free, nothing of it runs afterwards
  preempt,  // a snapshot goes to host memory, everything the request holds on the device is free; nothing of it runs until `resume`
  resume,   // the snapshot is checked and restored into whatever storage is free
  rewind,   // back to the completed frontier: prompt windows short of the last loop and a decode row on its way start over at loop 1
  publish,  // prompt windows [0, windows) become reusable by requests of the same identity
  reuse,    // the request begins with the published windows [0, windows) of its identity, and computes the others
  evict,    // published windows with this request's tokens, from `windows` on, are no longer found; requests that share them keep them
  hand_off,  // the prompt is complete: what it leaves goes elsewhere, where the request goes on (S-ACT-7); before its first decode row
};
std::string_view to_string(ActionKind kind);

struct Action {
  ActionKind kind = ActionKind::cancel;
  int request = 0;                         // index into Trace::requests
  int windows = 0;                         // publish, reuse, evict
  bool operator==(const Action&) const = default;
};

// A failure that the executor makes happen to a submission (S-FAIL). The submission then advances nothing, and the state of the rows
// and storage it touched is undefined until `rewind` or `cancel`.
enum class PlannedFailure {
  none,
  allocation,  // storage for the rows is refused, before any of them runs
  launch,      // the work breaks off after some layers have written their K and V
};
std::string_view to_string(PlannedFailure failure);
PlannedFailure parse_planned_failure(std::string_view text);  // throws ConfigError listing the words; "none" is one

inline constexpr int kMostDraftLength = 64;  // K of block speculation (S-SPEC-1)

// How the plan speculates (S-SPEC, S-PIPE).
enum class SpeculationKind { none, block, pipeline };
struct Speculation {
  SpeculationKind kind = SpeculationKind::none;
  int draft_depth = 0;                     // d: loops of a draft, 1..2 of a block, 1..3 of a pipeline
  int draft_length = 0;                    // block: K, drafted tokens of a round, 1..kMostDraftLength

  // Rows of one request that are on their way at most: K + 1 of a block, ceil(4 / d) of a pipeline, otherwise 1.
  int live_rows() const;
  bool operator==(const Speculation&) const = default;
};

// Actions, in order, then items. Items are independent of each other: a submission with several items advances each by exactly one loop.
// Row order is the stable partition: decode items first, then prefill items. A submission may hold actions alone.
struct Submission {
  std::vector<WorkItem> items;
  std::vector<Action> actions = {};
  PlannedFailure failure = PlannedFailure::none;
};

// Items of a request that has already stopped (EOS) are skipped by executors, so a plan covers the longest possible run.
struct Plan {
  std::string mode;                        // "serial", "split", ...
  std::vector<Submission> submissions;
  // Submissions that may be in flight at once (S-ASYNC): when submission i is issued, the results of those before i - submissions_in_flight
  // + 1 have been read, and no other. 1: every result is read before the next submission is issued.
  int submissions_in_flight = 1;
  bool graph_replay = false;               // decode steps are captured once and replayed (S-GRAPH)
  bool handoff = false;                    // every request is handed off: two executors run the plan (S-PD)
  Speculation speculation = {};            // with one, the plan has no decode items
};

// The first violated rule as a sentence that names submission, item or action and the missing predecessor; empty when the plan is legal
// and complete for the trace. Judged are S-PLAN-2..9, S-ACT, S-FAIL, the exits of S-MODE-5, S-SPEC-6, S-PIPE-3 and S-TIME-2; whether a published window has the identity that a reuse needs
// is judged by the prompts' tokens.
std::string plan_fault(const Plan& plan, const Trace& trace, const EffectiveConfig& config);

}  // namespace loopgauge
