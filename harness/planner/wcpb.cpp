// SPDX-License-Identifier: Apache-2.0
// Wavefront chunked prefill batching: while a chunk runs loop r the next one runs loop r - 1, so that a long prompt takes
// chunks + loops - 1 submissions in place of chunks * loops.
#include <string>

#include "harness/planner/schedule.hpp"
#include "models/error.hpp"

namespace loopgauge::harness {
namespace {

class WcpbSchedule : public Schedule {
 public:
  explicit WcpbSchedule(int chunk_windows) : chunk_windows_(chunk_windows) {}

  std::vector<WorkItem> next(std::span<const Candidate> candidates) override {
    const Candidate& chosen = candidates[turns_.find(candidates)];
    turns_.served(chosen);
    if (chosen.progress->prompt_complete()) return {chosen.progress->next_item(1, chosen.most_loops)};
    return chosen.progress->ready_chunks(chunk_windows_);
  }
  void pause() override { turns_.restart(); }

 private:
  int chunk_windows_;
  Turns turns_;
};

}  // namespace

std::unique_ptr<Schedule> make_wcpb_schedule(int chunk_windows) {
  if (chunk_windows < 1) throw ConfigError("a chunk of " + std::to_string(chunk_windows) + " windows is none: at least one");
  return std::make_unique<WcpbSchedule>(chunk_windows);
}

}  // namespace loopgauge::harness
