// SPDX-License-Identifier: Apache-2.0
#include "harness/thread_waiting.hpp"

#include <omp.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <initializer_list>

namespace loopgauge::harness {

void limit_thread_spinning(char** argv) {
  for (const char* chosen : {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"}) {
    if (std::getenv(chosen) != nullptr) return;
  }
  setenv("GOMP_SPINCOUNT", "1000", 1);  // GNU: about 50 microseconds
  setenv("KMP_BLOCKTIME", "0", 1);      // LLVM: milliseconds
  execv("/proc/self/exe", argv);
}

void limit_threads() {
  constexpr int kThreadsOfAProcessor = 4, kAlwaysAllowed = 256;
  omp_set_num_threads(std::min(omp_get_max_threads(), std::max(kAlwaysAllowed, kThreadsOfAProcessor * omp_get_num_procs())));
}

}  // namespace loopgauge::harness
