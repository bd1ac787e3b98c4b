// SPDX-License-Identifier: Apache-2.0
#include "harness/interrupt.hpp"

#include <csignal>

namespace loopgauge::harness {
namespace {

volatile std::sig_atomic_t received_signal = 0;

extern "C" void remember_signal(int signal) { received_signal = signal; }

}  // namespace

void install_interrupt_handlers() {
  struct sigaction action {};
  action.sa_handler = remember_signal;
  action.sa_flags = static_cast<int>(SA_RESETHAND);  // the second signal takes the default action
  sigemptyset(&action.sa_mask);
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
  struct sigaction inherited {};
  // Past the shell's limit of a file's size writing fails and is reported, like a full disk.
  std::signal(SIGXFSZ, SIG_IGN);
  if (sigaction(SIGHUP, nullptr, &inherited) == 0 && inherited.sa_handler != SIG_IGN) sigaction(SIGHUP, &action, nullptr);
}

bool interrupted() noexcept { return received_signal != 0; }

void throw_if_interrupted() {
  if (received_signal != 0) throw Interrupted{received_signal};
}

}  // namespace loopgauge::harness
