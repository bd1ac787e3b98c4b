// SPDX-License-Identifier: Apache-2.0
// What an online server runs next: admission by memory, prompts in chunks of whole windows, decode rows of all requests together. Decisions follow
// from what has arrived, what has run and what has been read alone; it knows no clock and no executor. What it submits is legal by plan_fault.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "harness/planner/request_progress.hpp"
#include "models/executor.hpp"
#include "models/plan.hpp"

namespace loopgauge::harness {

struct SchedulerOptions {
  int most_live = 64;            // requests that hold memory at once
  int most_decode_rows = 64;     // of a round; the others wait their turn
  int prefill_tokens = 1024;     // of a round, in whole windows, at least one window
  int prefill_requests = 1;      // prompts that share them
  bool mixed = false;            // decode rows and prompt windows in the same submissions; otherwise rounds of either kind in turn
  bool hold_decode = false;      // no decode row while there is a prompt that can run
  Stage stage = Stage::whole;    // prefill: requests leave when their prompt is complete; decode: they come from activate()
};

// Device bytes that a request holds at most.
struct RequestBytes {
  std::int64_t until_prompt_complete = 0;
  std::int64_t afterwards = 0;
};

// Token `token` of the request, counted from 0, is the result of a submission.
struct EmittedToken {
  int request = 0;
  int token = 0;
  bool operator==(const EmittedToken&) const = default;
};

class ServingScheduler {
 public:
  // `bytes`: by request; `budget`: that all requests may hold together. Throws ConfigError for options out of range. `trace` and `config` must outlive it.
  ServingScheduler(const Trace& trace, const EffectiveConfig& config, SchedulerOptions options, std::vector<RequestBytes> bytes, std::int64_t budget);

  // Queues the request, first come, first served. Where it could not run even alone, it is refused and the reason returned; otherwise empty.
  std::string arrive(int request);
  // The request exists with a complete prompt (Stage::decode).
  void activate(int request);
  // The request ends, in the queue or at work; nothing happens to one that has ended.
  void cancel(int request);
  // What the request held is free: its last token was read, or it was handed over.
  void release(int request);

  // Submissions that belong together: one loop after the other of the same rows, the first one with the actions that are due. Empty: nothing can run.
  std::vector<Submission> next_round();
  // A submission of the round has been issued; the tokens that it emits.
  std::vector<EmittedToken> issued(const Submission& submission);
  // It was refused or broke off: what it touched starts over with the next round.
  void failed(const Submission& submission);

  bool queued(int request) const { return at(request).state == State::queued; }
  bool holds(int request) const { return at(request).state == State::live; }
  // All its rows have been issued.
  bool complete(int request) const { return at(request).progress.complete(); }
  bool prompt_complete(int request) const { return at(request).progress.prompt_complete(); }
  int live() const { return live_; }
  std::int64_t held_bytes() const { return held_; }

 private:
  enum class State { away, queued, live, ended };
  struct Request {
    explicit Request(RequestProgress p) : progress(std::move(p)) {}
    RequestProgress progress;
    State state = State::away;
    std::int64_t held = 0;
    bool rewinds = false;        // before anything of it runs again
  };

  Request& at(int request) { return requests_.at(static_cast<std::size_t>(request)); }
  const Request& at(int request) const { return requests_.at(static_cast<std::size_t>(request)); }
  void begin(int request, std::int64_t bytes);
  void admit();
  std::vector<int> prefilling() const;
  std::vector<WorkItem> decode_items();
  std::vector<WorkItem> prefill_items() const;

  const Trace& trace_;
  const EffectiveConfig& config_;
  const SchedulerOptions options_;
  const std::vector<RequestBytes> bytes_;
  const std::int64_t budget_;
  std::vector<Request> requests_;
  std::deque<int> queue_;
  std::vector<int> order_;         // live requests, as they began
  std::vector<Action> actions_;    // that are due
  int live_ = 0;
  int last_decoded_ = -1;          // where the turn of decode rows goes on
  std::int64_t held_ = 0;
  bool prompts_next_ = true;       // whose turn it is where both kinds can run
};

}  // namespace loopgauge::harness
