// SPDX-License-Identifier: Apache-2.0
// Prompts as in serial; then rounds, or as many cycles as a pipeline has stages, of every request whose prompt is complete. Requests that
// begin a round together go through it together, one loop a submission; one alone takes its draft and its verification in a submission
// each.
#include <limits>

#include "harness/planner/schedule.hpp"

namespace loopgauge::harness {
namespace {

class SpeculationSchedule : public Schedule {
 public:
  explicit SpeculationSchedule(const Trace& trace) : prompts_(make_serial_schedule(trace)) {}

  std::vector<WorkItem> next(std::span<const Candidate> candidates) override {
    std::vector<Candidate> open, prompts, ready;
    for (const Candidate& candidate : candidates) {
      if (candidate.progress->round_open()) open.push_back(candidate);
      (candidate.progress->prompt_complete() ? ready : prompts).push_back(candidate);
    }
    if (open.empty() && !prompts.empty()) return prompts_->next(prompts);
    const std::vector<Candidate>& chosen = open.empty() ? ready : open;
    std::vector<WorkItem> items;
    for (const Candidate& candidate : chosen) {
      const std::vector<WorkItem> next = candidate.progress->next_speculative_items(chosen.size() > 1);
      items.insert(items.end(), next.begin(), next.end());
    }
    return items;
  }

 private:
  std::unique_ptr<Schedule> prompts_;
};

}  // namespace

std::unique_ptr<Schedule> make_speculation_schedule(const Trace& trace) { return std::make_unique<SpeculationSchedule>(trace); }

}  // namespace loopgauge::harness
