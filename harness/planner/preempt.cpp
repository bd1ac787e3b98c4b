// SPDX-License-Identifier: Apache-2.0
#include "harness/planner/preempt.hpp"

#include <algorithm>
#include <map>
#include <string>

#include "models/error.hpp"

namespace loopgauge::harness {

PreemptRule::PreemptRule(int period_loops, std::size_t requests) : period_loops_(period_loops), steps_(requests, 0), back_(requests, 0) {
  if (period_loops < 1)
    throw ConfigError("a preemption after every " + std::to_string(period_loops) + " loops lets nothing run: at least 1");
}

void PreemptRule::ran(std::span<const WorkItem> items, std::int64_t clock, const std::function<bool(int request)>& round_open) {
  std::map<int, int> loops;  // by request; several windows of one request advance together
  for (const WorkItem& item : items) loops[item.request] = std::max(loops[item.request], item.loop_last - item.loop_first + 1);
  for (const auto& [request, advanced] : loops) {
    int& steps = steps_[static_cast<std::size_t>(request)];
    steps += advanced;
    if (steps < period_loops_ || round_open(request)) continue;
    steps = 0;
    back_[static_cast<std::size_t>(request)] = clock + kAwaySubmissions;
  }
}

}  // namespace loopgauge::harness
