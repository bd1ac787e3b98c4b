// SPDX-License-Identifier: Apache-2.0
// How long idle threads of the executors' parallel loops spin before they sleep. Never changes a result.
#pragma once

namespace loopgauge::harness {

// OpenMP runtimes let idle threads spin for milliseconds by default. On a machine that something else keeps busy, a spinning thread
// takes the processor from the one it waits for: five times slower was measured on two shared cores, against 7 % lost on idle ones by
// sleeping after about as long as a sleep and a wake-up take. The runtimes read the setting from the environment when they are loaded,
// so the program starts itself once more with it, unless the user has chosen (OMP_WAIT_POLICY, GOMP_SPINCOUNT, KMP_BLOCKTIME).
// Returns when nothing is to be done or when the program cannot be started again.
void limit_thread_spinning(char** argv);

}  // namespace loopgauge::harness
