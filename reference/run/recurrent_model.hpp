// SPDX-License-Identifier: Apache-2.0
// One loop of the shared layers, the exit gate and the head, for rows of one request (S-MODEL-1..3). Rows are read from and written to the
// request's state; the modes of execution have no part in it.
#pragma once

#include <limits>
#include <span>
#include <vector>

#include "models/plan.hpp"
#include "reference/run/run_context.hpp"

namespace loopgauge::reference {

inline constexpr int kAllLayers = std::numeric_limits<int>::max();

// Runs loop `loop` of the rows at `positions`, ascending, all of one kind. K and V of all rows are written before any row attends. With
// `layers` below the model's the work breaks off after so many, and the rows have not executed the loop.
template <class P>
void run_rows(RunContext<P>& run, RequestState<P>& s, std::span<const int> positions, int loop, RowKind kind, int layers = kAllLayers);

// In the request's record.
template <class P>
void count_execution(RequestState<P>& s, int position, int loop);

// S-GATE-1 of H[loop].
template <class P>
typename P::Real gate_of(const RunContext<P>& run, RequestState<P>& s, int loop, int position);

// S-HEAD-1 of H[loop]: [vocab]. A logit that is not finite is a NumericError.
template <class P>
std::vector<typename P::Real> logits_of(const RunContext<P>& run, RequestState<P>& s, int loop, int position);

}  // namespace loopgauge::reference
