// SPDX-License-Identifier: Apache-2.0
// A schedule says what runs next. The driver (planner.cpp) keeps the requests' progress, follows the trace's events and the modifiers, and
// asks the schedule for one submission after the other: a schedule never sees a request that cannot run.
#pragma once

#include <algorithm>
#include <memory>
#include <span>
#include <vector>

#include "harness/planner/request_progress.hpp"

namespace loopgauge::harness {

// A request that can run now.
struct Candidate {
  const RequestProgress* progress = nullptr;
  int most_loops = kLoops;  // that it may advance before its next preemption

  int index() const { return progress->index(); }
};

class Schedule {
 public:
  virtual ~Schedule() = default;
  // Items of the next submission, at least one. `candidates`: at least one, in index order.
  virtual std::vector<WorkItem> next(std::span<const Candidate> candidates) = 0;
  // Nothing could run, and time goes on to the next arrival or event.
  virtual void pause() {}
};

// Whose turn it is: the requests in index order, round and round.
class Turns {
 public:
  // The candidate whose turn it is: the first from `next_` on, else the first of all.
  std::size_t find(std::span<const Candidate> candidates) const {
    const auto found = std::find_if(candidates.begin(), candidates.end(), [&](const Candidate& c) { return c.index() >= next_; });
    return found == candidates.end() ? 0 : static_cast<std::size_t>(found - candidates.begin());
  }
  void served(const Candidate& candidate) { next_ = candidate.index() + 1; }
  void restart() { next_ = 0; }

 private:
  int next_ = 0;
};

// serial: the earliest request by (arrival, index); one window or one token, with all its loops. `trace` must outlive the schedule.
std::unique_ptr<Schedule> make_serial_schedule(const Trace& trace);

// split: requests take turns; one loop of a window, in consecutive pieces of at most `piece_tokens` positions (0: whole windows), or of a
// token. All pieces of (window, r) come before any of (window, r + 1), so that one request decodes while another is still in its prompt.
// Throws ConfigError for a negative piece size.
std::unique_ptr<Schedule> make_split_schedule(int piece_tokens);

// mixed: every submission takes one loop of as many requests as its budget of `token_budget` positions holds: decode rows first, then
// pieces of the prompts' windows. Requests take turns within each kind, and while a prompt waits decode rows leave one position of the
// budget, so that nobody starves. Throws ConfigError for a budget below 2.
std::unique_ptr<Schedule> make_mixed_schedule(int token_budget);

// block_spec, pipeline_spec: prompts as in serial while no round is open; otherwise the round, or the cycles, of all requests that have one open,
// or of all whose prompt is complete. `trace` must outlive the schedule.
std::unique_ptr<Schedule> make_speculation_schedule(const Trace& trace);

// wcpb: requests take turns. A prompt advances every chunk that may advance, by one loop: the anti-diagonals of (chunk, loop). A decode row
// runs as in serial. Throws ConfigError for a chunk without a window.
std::unique_ptr<Schedule> make_wcpb_schedule(int chunk_windows);

}  // namespace loopgauge::harness
