// SPDX-License-Identifier: Apache-2.0
// The finest order: one loop per submission, windows optionally in pieces, requests taking turns. Where serial never leaves a window or
// a token half done, this plan leaves every one of them so, several requests at a time.
#include <limits>
#include <string>

#include "harness/planner/schedule.hpp"
#include "models/error.hpp"

namespace loopgauge::harness {
namespace {

class SplitSchedule : public Schedule {
 public:
  explicit SplitSchedule(int piece_tokens) : most_tokens_(piece_tokens == 0 ? std::numeric_limits<int>::max() : piece_tokens) {}

  std::vector<WorkItem> next(std::span<const Candidate> candidates) override {
    const Candidate& chosen = candidates[turns_.find(candidates)];
    turns_.served(chosen);
    return {chosen.progress->next_item(most_tokens_, 1)};
  }
  void pause() override { turns_.restart(); }

 private:
  int most_tokens_;
  Turns turns_;
};

}  // namespace

std::unique_ptr<Schedule> make_split_schedule(int piece_tokens) {
  if (piece_tokens < 0) throw ConfigError("piece size " + std::to_string(piece_tokens) + " is negative; 0 means whole windows");
  return std::make_unique<SplitSchedule>(piece_tokens);
}

}  // namespace loopgauge::harness
