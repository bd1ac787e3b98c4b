// SPDX-License-Identifier: Apache-2.0
// What goes into a request's record, and when: decisions and hidden rows as windows and rows finish, K/V and blocks when the request ends.
// The record is on the host: it is no part of a snapshot, and what is cancelled or discarded later is cut off when the record is closed.
#pragma once

#include "reference/run/run_context.hpp"

namespace loopgauge::reference {

// Room for every position of the request, cut to what was committed by close_record().
template <class P>
void open_record(const RunContext<P>& run, RequestState<P>& s);

// Hidden rows and gates of a position that has all its loops, inherited ones included.
template <class P>
void observe_position(const RunContext<P>& run, RequestState<P>& s, int position);

// Scores and active sets, as far as the window has come.
template <class P>
void observe_decisions(const RunContext<P>& run, RequestState<P>& s, const WindowState<typename P::Real>& window);

// The request has ended, or is cancelled: then its K/V and codec groups stay empty. Counts what was recomputed.
template <class P>
void close_record(RunContext<P>& run, RequestState<P>& s);

}  // namespace loopgauge::reference
