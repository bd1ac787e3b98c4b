// SPDX-License-Identifier: Apache-2.0
// preempt: every request is preempted after every `period_loops` of its loop steps (submissions that advance it by one loop; a submission
// that advances it by several is cut short) and resumed kAwaySubmissions later, or at once when nothing else can run. With a period that is
// no multiple of 4 every boundary between two loops comes up, of windows and of decode rows, again and again.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "models/plan.hpp"

namespace loopgauge::harness {

class PreemptRule {
 public:
  static constexpr int kAwaySubmissions = 2;

  // Throws ConfigError for a period below 1.
  PreemptRule(int period_loops, std::size_t requests);

  int most_loops(int request) const { return period_loops_ - steps_[static_cast<std::size_t>(request)]; }
  bool away(int request, std::int64_t clock) const { return clock < back_[static_cast<std::size_t>(request)]; }
  // The submission index at which the request comes back.
  std::int64_t back(int request) const { return back_[static_cast<std::size_t>(request)]; }
  // `items` have run; `clock` is the index of the next submission. A request whose speculation round is open goes when it is not.
  void ran(std::span<const WorkItem> items, std::int64_t clock, const std::function<bool(int request)>& round_open);

 private:
  int period_loops_;
  std::vector<int> steps_;  // since the last preemption
  std::vector<std::int64_t> back_;
};

}  // namespace loopgauge::harness
