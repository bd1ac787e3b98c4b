// SPDX-License-Identifier: Apache-2.0
// The undisturbed order: nothing interleaves, every window and every token runs all its loops in one submission.
#include <limits>

#include "harness/planner/schedule.hpp"

namespace loopgauge::harness {
namespace {

class SerialSchedule : public Schedule {
 public:
  explicit SerialSchedule(const Trace& trace) : trace_(trace) {}

  std::vector<WorkItem> next(std::span<const Candidate> candidates) override {
    const auto arrival = [&](const Candidate& c) { return trace_.requests[static_cast<std::size_t>(c.index())].arrival; };
    const auto earliest = std::min_element(candidates.begin(), candidates.end(),
                                           [&](const Candidate& a, const Candidate& b) { return arrival(a) < arrival(b); });
    return {earliest->progress->next_item(std::numeric_limits<int>::max(), earliest->most_loops)};
  }

 private:
  const Trace& trace_;
};

}  // namespace

std::unique_ptr<Schedule> make_serial_schedule(const Trace& trace) { return std::make_unique<SerialSchedule>(trace); }

}  // namespace loopgauge::harness
