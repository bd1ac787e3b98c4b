// SPDX-License-Identifier: Apache-2.0
// The threads of the executors' parallel loops: how long idle ones spin before they sleep, and how many there are at most. Never changes a result.
#pragma once

namespace loopgauge::harness {

// OpenMP runtimes let idle threads spin for milliseconds by default. On a machine that something else keeps busy, a spinning thread
// takes the processor from the one it waits for: five times slower was measured on two shared cores, against 7 % lost on idle ones by
// sleeping after about as long as a sleep and a wake-up take. The runtimes read the setting from the environment when they are loaded,
// so the program starts itself once more with it, unless the user has chosen (OMP_WAIT_POLICY, GOMP_SPINCOUNT, KMP_BLOCKTIME).
// Returns when nothing is to be done or when the program cannot be started again.
void limit_thread_spinning(char** argv);

// Where OMP_NUM_THREADS asks for more threads than could be of use (four for each processor, 256 at least), the executors use that many: the OpenMP
// runtime ends the process, or crashes, where the system does not give it all.
void limit_threads();

}  // namespace loopgauge::harness
