// SPDX-License-Identifier: Apache-2.0
// Speculative rows of one request: begun from a pending token, proposed one after the other, verified, committed or given up (S-SPEC,
// S-PIPE). A row runs like any decode row; what is special is that nobody knows yet whether it will have existed.
#pragma once

#include "models/plan.hpp"
#include "reference/run/run_context.hpp"

namespace loopgauge::reference {

// True when the item has something to run: the request goes on, and the first row of a draft, a round to verify, or for a stage a live token
// that has completed the loop before the item's, or may begin.
template <class P>
bool is_speculative_work(const RequestState<P>& s, const WorkItem& item);

// Runs the item's rows. A round is decided with its loop 4; a pipeline by settle_pipeline().
template <class P>
void speculate(RunContext<P>& run, RequestState<P>& s, const WorkItem& item);

// All stage items of a submission have run: the token that has loop 4 commits, then the one that has left the draft proposes (S-PIPE-4).
template <class P>
void settle_pipeline(RunContext<P>& run, RequestState<P>& s);

// break_off() of a speculative item.
template <class P>
void break_off_speculation(RunContext<P>& run, RequestState<P>& s, const WorkItem& item, int layers);

// Live rows from `first` (an index) on never were: their K/V, activity and references are gone, their executions count as rejected.
template <class P>
void give_up_rows(RunContext<P>& run, RequestState<P>& s, std::size_t first = 0);

}  // namespace loopgauge::reference
