// SPDX-License-Identifier: Apache-2.0
// A plan is the list of submissions that an execution mode makes of a trace (SPEC.md, "Execution modes"). Planners (harness/planner)
// produce plans, both executors consume them; the rules that make a plan legal are here and know nothing of the planners.
#pragma once

#include <string>
#include <vector>

#include "models/algorithm_config.hpp"
#include "models/trace.hpp"

namespace loopgauge {

enum class RowKind { prefill, decode };

// Rows of one request that advance together through loops loop_first..loop_last (1-based, inclusive).
//   prefill: logical prompt positions [begin, end); at loops 3 and 4 only the active ones do work. Completing the last position of a
//            window at loop r completes (window, r). The range may span windows; they are then processed in ascending order.
//   decode:  exactly one position >= P. The row stops early where the exit rule says so.
struct WorkItem {
  int request = 0;                         // index into Trace::requests
  RowKind kind = RowKind::prefill;
  int begin = 0;
  int end = 0;
  int loop_first = 1;
  int loop_last = kLoops;
  bool operator==(const WorkItem&) const = default;
};

// Items of one submission are independent of each other: a submission with several items advances each by exactly one loop.
// Row order is the stable partition: decode items first, then prefill items.
struct Submission {
  std::vector<WorkItem> items;
};

// Items of a request that has already stopped (EOS) are skipped by executors, so a plan covers the longest possible run.
struct Plan {
  std::string mode;                        // "serial", "split", ...
  std::vector<Submission> submissions;
};

// The first violated rule as a sentence that names submission, item and the missing predecessor; empty when the plan is legal and
// complete for the trace. Rules: loops of a position in order; (window, r) after (window, r-1) and after every earlier window at r;
// pieces of a window in ascending order at one loop; selection (loop 3, 4) only after the window's whole previous loop; a decode row
// after its predecessor has executed all its loops; rows of one request never both prefill and decode in one submission.
std::string plan_fault(const Plan& plan, const Trace& trace, const EffectiveConfig& config);

}  // namespace loopgauge
