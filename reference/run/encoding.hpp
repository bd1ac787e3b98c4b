// SPDX-License-Identifier: Apache-2.0
// When K/V is encoded and who sees it so (S-POL-1..4, S-TIME-1..3).
#pragma once

#include "models/plan.hpp"
#include "reference/run/run_context.hpp"

namespace loopgauge::reference {

// E at a committed length.
template <class P>
int frontier_rule(const RunContext<P>& run, const RequestState<P>& s, int committed);

// Positions below it are read reconstructed by this query row: under `serial_aligned` a property of the row, otherwise what is encoded now.
template <class P>
int visible_frontier(const RunContext<P>& run, const RequestState<P>& s, int position, RowKind kind);

// Encodes blocks until they cover [0, frontier).
template <class P>
void encode_to(const RunContext<P>& run, RequestState<P>& s, int frontier);

// Under `streaming`: a full window has completed a loop.
template <class P>
void encode_window_loop(const RunContext<P>& run, RequestState<P>& s, int window, int loop);

// Rows below `end` that stand in a sealed block in place of rejected ones are encoded again (S-SPEC-9).
template <class P>
void encode_again(RunContext<P>& run, RequestState<P>& s, int end);

// Lets go of blocks beyond `frontier`: of rows that prove to lie past the end of the sequence.
template <class P>
void drop_blocks_beyond(RequestState<P>& s, int frontier);

}  // namespace loopgauge::reference
