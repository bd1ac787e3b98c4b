// SPDX-License-Identifier: Apache-2.0
// What a submission does to requests before its items run (S-ACT-1..6, S-PFX-3..5).
#pragma once

#include "models/plan.hpp"
#include "reference/run/run_context.hpp"

namespace loopgauge::reference {

template <class P>
void act(RunContext<P>& run, RequestState<P>& s, const Action& action);

}  // namespace loopgauge::reference
