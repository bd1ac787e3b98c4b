// SPDX-License-Identifier: Apache-2.0
#include "harness/handoff/pump.hpp"

#include <thread>

#include "harness/interrupt.hpp"

namespace loopgauge::harness {

bool pump_until(const std::function<bool()>& move_on, const std::function<bool()>& done, std::chrono::milliseconds lease, std::chrono::microseconds pause) {
  using Clock = std::chrono::steady_clock;
  auto last = Clock::now();
  while (!done()) {
    throw_if_interrupted();
    if (move_on()) {
      last = Clock::now();
    } else if (Clock::now() - last > lease) {
      return false;
    } else if (pause.count() == 0) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(pause);
    }
  }
  return true;
}

void HandoffClocks::prompt_complete(int request) {
  sender_.prompt_complete(request);
  open_[request] = std::chrono::steady_clock::now();
}

void HandoffClocks::note_closed() {
  std::erase_if(open_, [this](const auto& clock) {
    if (!sender_.closed(clock.first)) return false;
    sender_.set_seconds(clock.first, std::chrono::duration<double>(std::chrono::steady_clock::now() - clock.second).count());
    return true;
  });
}

}  // namespace loopgauge::harness
