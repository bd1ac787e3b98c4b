// SPDX-License-Identifier: Apache-2.0
// What whoever runs the ends of handoffs does with them: move everything on, as far as it goes or until something has happened.
#pragma once

#include <chrono>
#include <functional>
#include <map>

#include "harness/handoff/endpoint.hpp"

namespace loopgauge::harness {

// Steps every endpoint (SenderEndpoint, ReceiverEndpoint) until none of them has anything to do. Whether there was anything.
template <class... Endpoints>
bool pump(Endpoints&... endpoints) {
  bool any = false;
  for (bool progress = true; progress;) {
    progress = (static_cast<int>(endpoints.step()) + ...) > 0;
    any |= progress;
  }
  return any;
}

// Calls `move_on` until `done`, with a pause wherever it finds nothing to do. False when nothing has moved for a lease. Throws Interrupted.
bool pump_until(const std::function<bool()>& move_on, const std::function<bool()>& done, std::chrono::milliseconds lease, std::chrono::microseconds pause);

// What handoffs take from the end of their prompts to the acknowledgement, whenever they are asked for.
class HandoffClocks {
 public:
  explicit HandoffClocks(SenderEndpoint& sender) : sender_(sender) {}
  // The prompt is complete, as far as this side knows: under asynchronous execution its last work has been issued.
  void prompt_complete(int request);
  // Call after every step of the sender.
  void note_closed();

 private:
  SenderEndpoint& sender_;
  std::map<int, std::chrono::steady_clock::time_point> open_;  // by request: since when
};

}  // namespace loopgauge::harness
