// SPDX-License-Identifier: Apache-2.0
// The finest order: one loop per submission, windows optionally in pieces, requests taking turns. Where serial never leaves a window or
// a token half done, this plan leaves every one of them so, several requests at a time.
#include <algorithm>
#include <limits>

#include "harness/planner/planner.hpp"
#include "models/error.hpp"

namespace loopgauge::harness {
namespace {

// Everything one request will ever submit, in its own order.
std::vector<WorkItem> steps_of_request(int index, const TraceRequest& request, const EffectiveConfig& config, int piece_tokens) {
  std::vector<WorkItem> steps;
  const int prompt_length = request.prompt_length();
  for (int w = 0; w < window_count(prompt_length, config.window()); ++w) {
    const PositionRange window = window_range(w, prompt_length, config.window());
    const int piece = piece_tokens == 0 ? window.size() : std::min(piece_tokens, window.size());
    for (int loop = 1; loop <= config.loops(); ++loop) {
      for (int begin = window.begin; begin < window.end; begin += piece) {
        steps.push_back({index, RowKind::prefill, begin, std::min(begin + piece, window.end), loop, loop});
      }
    }
  }
  for (int j = 0; j < fed_tokens(request); ++j) {
    for (int loop = 1; loop <= config.loops(); ++loop) {
      steps.push_back({index, RowKind::decode, prompt_length + j, prompt_length + j + 1, loop, loop});
    }
  }
  return steps;
}

struct Pending {
  int arrival = 0;
  std::vector<WorkItem> steps;
  std::size_t next = 0;
  bool done() const { return next == steps.size(); }
};

}  // namespace

Plan make_split_plan(const Trace& trace, const EffectiveConfig& config, int piece_tokens) {
  if (piece_tokens < 0) throw ConfigError("piece size " + std::to_string(piece_tokens) + " is negative; 0 means whole windows");
  ModeSpec mode;
  mode.name = "split";
  mode.piece_tokens = piece_tokens;
  Plan plan{mode_text(mode), {}};

  std::vector<Pending> requests;
  for (std::size_t i = 0; i < trace.requests.size(); ++i) {
    const int index = static_cast<int>(i);
    requests.push_back({trace.requests[i].arrival, steps_of_request(index, trace.requests[i], config, piece_tokens), 0});
  }

  for (std::int64_t clock = 0;;) {
    bool submitted = false;
    std::int64_t next_arrival = std::numeric_limits<std::int64_t>::max();
    for (Pending& request : requests) {
      if (request.done()) continue;
      if (request.arrival > clock) {
        next_arrival = std::min<std::int64_t>(next_arrival, request.arrival);
        continue;
      }
      plan.submissions.push_back({{request.steps[request.next++]}});
      ++clock;
      submitted = true;
    }
    if (submitted) continue;
    if (next_arrival == std::numeric_limits<std::int64_t>::max()) return plan;
    clock = next_arrival;
  }
}

}  // namespace loopgauge::harness
