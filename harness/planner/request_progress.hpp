// SPDX-License-Identifier: Apache-2.0
// How far one request has come while a plan is being made: what may run next of it, and what running that does.
#pragma once

#include <vector>

#include "models/plan.hpp"
#include "models/trace.hpp"

namespace loopgauge::harness {

class RequestProgress {
 public:
  RequestProgress(int index, const TraceRequest& request, const EffectiveConfig& config, const Speculation& speculation = {});

  int index() const { return index_; }
  bool prompt_complete() const;
  bool complete() const { return prompt_complete() && rows_done_ == decode_rows_; }
  // Leading windows with all their loops, and how many of them may be shared with other requests (S-PFX-3).
  int completed_windows() const;
  int sharable_windows() const;

  // What is next, in the request's own order: the rest of its first unfinished window at the window's next loop, or its next decode row.
  // At most `most_tokens` positions (of a window) and, for whatever is whole, at most `most_loops` loops: a part of a window advances one.
  WorkItem next_item(int most_tokens, int most_loops) const;
  // Every chunk of `chunk_windows` windows that may advance by one loop now (S-PLAN-4), in ascending order; not for a complete prompt.
  // Windows of one chunk that stand at different loops give items of their own.
  std::vector<WorkItem> ready_chunks(int chunk_windows) const;

  // Of a complete prompt under speculation, what is next of the round or of the cycle: the whole draft or the whole verification, or with
  // `one_loop` one loop of one row or of the verification; of a pipeline one step of every stage that has as many loops.
  std::vector<WorkItem> next_speculative_items(bool one_loop) const;
  // Whether a round is open, or fewer cycles have run than are certain to commit a row.
  bool round_open() const { return drafted_ > 0 || round_loops_ > 0 || cycle_steps_ > 0; }

  void advance(const WorkItem& item);
  // Back to the completed frontier (S-ACT-5).
  void rewind();
  // The first `count` windows count as complete, or as untouched again: only before anything of the request has run.
  void set_reused_windows(int count);

 private:
  PositionRange window(int index) const { return window_range(index, prompt_length_, window_); }

  int index_;
  int window_, loops_;
  int prompt_length_, decode_rows_;
  std::vector<int> window_loops_;  // completed loops
  std::vector<int> window_part_;   // positions that have also completed the loop after those
  int rows_done_ = 0;              // decode rows with all their loops
  int row_loops_ = 0;              // completed loops of the row after those
  Speculation speculation_;
  int drafted_ = 0;                // rows of the round with loops 1..d
  int round_loops_ = 0;            // completed loops of the row after those, or of all rows under verification
  int cycle_steps_ = 0;            // loops that stage 0 has run since the last commit that is certain
};

}  // namespace loopgauge::harness
