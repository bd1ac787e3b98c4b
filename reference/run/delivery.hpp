// SPDX-License-Identifier: Apache-2.0
// Results reach the record when they are read, F submissions after they were made (S-ASYNC-1, S-ASYNC-2), and a request ends when its last
// one is read.
#pragma once

#include "reference/run/run_context.hpp"

namespace loopgauge::reference {

// Reads one result: logits, token, exit. A request that is cancelled or has ended takes none, nor does whoever bears its id later.
template <class P>
void deliver(RunContext<P>& run, RequestState<P>& s, RowResult<typename P::Real> result);

// Frees everything that the request holds on the device.
template <class P>
void release(RunContext<P>& run, RequestState<P>& s);

}  // namespace loopgauge::reference
