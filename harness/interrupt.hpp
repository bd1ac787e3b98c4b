// SPDX-License-Identifier: Apache-2.0
// SIGINT, SIGTERM and SIGHUP end a command between two submissions: destructors run, temporary files and sockets go, what was committed stays.
// A second signal ends the process at once. A SIGHUP that is ignored when the process starts (nohup) stays ignored.
#pragma once

namespace loopgauge::harness {

// Not an Error: nothing is wrong. main() returns 128 + signal for it (130 for SIGINT).
struct Interrupted {
  int signal = 0;
};

void install_interrupt_handlers();
bool interrupted() noexcept;
// Throws Interrupted once a signal has arrived. Call it wherever work can stop without leaving something half done.
void throw_if_interrupted();

}  // namespace loopgauge::harness
