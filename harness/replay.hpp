// SPDX-License-Identifier: Apache-2.0
// Replay as a command does it: loopgauge::replay with progress and a look at interrupts between submissions.
#pragma once

#include "harness/progress.hpp"
#include "models/executor.hpp"

namespace loopgauge::harness {

// begin, every submission, finish. `progress` counts submissions and may be null. Throws Interrupted between two submissions, after
// which the executor can begin() again.
RunRecord replay_watched(Executor& executor, const Plan& plan, const Trace& trace, const EffectiveConfig& config, const RunOptions& options,
                         Progress* progress);

}  // namespace loopgauge::harness
