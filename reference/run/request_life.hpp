// SPDX-License-Identifier: Apache-2.0
// The life of a request: prompt windows through their loops, decode rows through theirs. Which submission an item stands in, and what else
// stands there, plays no part: a row's result depends on the rows it reads.
#pragma once

#include "models/plan.hpp"
#include "reference/run/run_context.hpp"

namespace loopgauge::reference {

// What a request holds, empty.
template <class P>
std::unique_ptr<RequestStorage<P>> make_storage(const RunContext<P>& run, const RequestState<P>& s);
template <class P>
void allocate_storage(const RunContext<P>& run, RequestState<P>& s);

// A new generation begins (S-ACT-1).
template <class P>
void begin_request(RunContext<P>& run, RequestState<P>& s);

// Advances the item's rows. Rows past the end of the sequence and loops past the row's exit are no work.
template <class P>
void advance(RunContext<P>& run, RequestState<P>& s, const WorkItem& item);

// True when the item has rows to run: its request has not ended, its row has not finished.
template <class P>
bool is_work(const RequestState<P>& s, const WorkItem& item);

// The logits of the prompt's last row and the token that they choose go into the current ticket.
template <class P>
void emit_prompt(RunContext<P>& run, RequestState<P>& s);

// A decode row's logits and the token that they choose go into the submission's ticket; a free run feeds the token where it was computed.
template <class P>
void emit(RunContext<P>& run, RequestState<P>& s, int position, int depth, std::vector<typename P::Real> logits, std::int32_t token);

// Whether the token that decode row `step` is fed is known to be no end of the sequence, and none lies before it.
template <class P>
bool token_is_known(const RequestState<P>& s, int step);

// Begins the item's first loop, breaks off after half of the layers have written K and V, and poisons what it touched (S-FAIL-1).
template <class P>
void break_off(RunContext<P>& run, RequestState<P>& s, const WorkItem& item);

// The decode row lets go of its attention reference, if it has one (S-SDA-11).
template <class P>
void retire_reference(RunContext<P>& run, RequestState<P>& s);

// Commits every finished row that is known not to lie past the end of the sequence (S-ASYNC-2).
template <class P>
void commit_known_rows(RunContext<P>& run, RequestState<P>& s);

// Selection scores of the eligible rows of a window, [positions of the window], NaN elsewhere (S-TSEL-2).
template <class P>
std::vector<typename P::Real> score_window(RunContext<P>& run, RequestState<P>& s, int window, int loop);

}  // namespace loopgauge::reference
