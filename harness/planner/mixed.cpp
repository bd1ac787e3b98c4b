// SPDX-License-Identifier: Apache-2.0
// Several requests in every submission, each at its own depth: what a serving engine does with a token budget.
#include <string>

#include "harness/planner/schedule.hpp"
#include "models/error.hpp"

namespace loopgauge::harness {
namespace {

class MixedSchedule : public Schedule {
 public:
  explicit MixedSchedule(int token_budget) : token_budget_(token_budget) {}

  std::vector<WorkItem> next(std::span<const Candidate> candidates) override {
    std::vector<Candidate> decoding, prefilling;
    for (const Candidate& candidate : candidates) (candidate.progress->prompt_complete() ? decoding : prefilling).push_back(candidate);

    std::vector<WorkItem> items;
    int budget = token_budget_;
    const int left_to_prompts = prefilling.empty() ? 0 : 1;
    const std::size_t first_row = decode_turns_.find(decoding);
    for (std::size_t i = 0; i < decoding.size() && budget > left_to_prompts; ++i, --budget) {
      const Candidate& chosen = decoding[(first_row + i) % decoding.size()];
      items.push_back(chosen.progress->next_item(1, 1));
      decode_turns_.served(chosen);  // rows that the budget cut off come first in the next submission
    }
    const std::size_t first_prompt = prefill_turns_.find(prefilling);
    for (std::size_t i = 0; i < prefilling.size() && budget > 0; ++i) {
      const Candidate& chosen = prefilling[(first_prompt + i) % prefilling.size()];
      items.push_back(chosen.progress->next_item(budget, 1));
      budget -= items.back().end - items.back().begin;
      if (i == 0) prefill_turns_.served(chosen);  // the first one may have taken everything, the others got what was left
    }
    return items;
  }
  void pause() override {
    decode_turns_.restart();
    prefill_turns_.restart();
  }

 private:
  int token_budget_;
  Turns decode_turns_, prefill_turns_;
};

}  // namespace

std::unique_ptr<Schedule> make_mixed_schedule(int token_budget) {
  if (token_budget < 2) {
    throw ConfigError("token budget " + std::to_string(token_budget) +
                      " of a mixed submission is below 2, one decode row and one prompt position");
  }
  return std::make_unique<MixedSchedule>(token_budget);
}

}  // namespace loopgauge::harness
