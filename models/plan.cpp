// SPDX-License-Identifier: Apache-2.0
// Legality of a plan, decided from the dependency rules alone: every planner's output and every hand-made order is judged by the same text.
#include "models/plan.hpp"

#include <algorithm>
#include <set>
#include <sstream>

namespace loopgauge {
namespace {

// Progress of one request, in completed loops per prompt position and per decode position.
struct Progress {
  int prompt_length = 0;
  int decode_rows = 0;
  std::vector<int> prompt_loops;   // [P] loops completed by each position
  std::vector<int> decode_loops;   // [decode_rows]
};

std::string describe(const WorkItem& item) {
  std::ostringstream text;
  text << (item.kind == RowKind::prefill ? "prefill" : "decode") << " of request " << item.request << ", positions [" << item.begin << ", "
       << item.end << "), loops " << item.loop_first << ".." << item.loop_last;
  return text.str();
}

class Checker {
 public:
  Checker(const Trace& trace, const EffectiveConfig& config) : config_(config) {
    for (const TraceRequest& request : trace.requests) {
      Progress progress;
      progress.prompt_length = request.prompt_length();
      progress.decode_rows = fed_tokens(request);
      progress.prompt_loops.assign(static_cast<std::size_t>(progress.prompt_length), 0);
      progress.decode_loops.assign(static_cast<std::size_t>(progress.decode_rows), 0);
      requests_.push_back(std::move(progress));
    }
  }

  std::string check(const Plan& plan) {
    for (std::size_t i = 0; i < plan.submissions.size(); ++i) {
      const std::string fault = check_submission(plan.submissions[i]);
      if (!fault.empty()) return "submission " + std::to_string(i) + ": " + fault;
    }
    return incomplete();
  }

 private:
  std::string check_submission(const Submission& submission) {
    std::set<int> prefilling, decoding;
    bool saw_prefill = false;
    for (const WorkItem& item : submission.items) {
      if (item.request < 0 || item.request >= static_cast<int>(requests_.size())) return describe(item) + ": no such request in the trace";
      if (item.loop_first < 1 || item.loop_last > config_.loops() || item.loop_first > item.loop_last) {
        return describe(item) + ": loops are not an ascending range within 1.." + std::to_string(config_.loops());
      }
      if (submission.items.size() > 1 && item.loop_first != item.loop_last) {
        return describe(item) + ": an item of a submission with several items advances exactly one loop";
      }
      (item.kind == RowKind::prefill ? prefilling : decoding).insert(item.request);
      if (prefilling.contains(item.request) && decoding.contains(item.request)) {
        return describe(item) + ": one request gives prefill or decode rows to a submission, never both";
      }
      if (item.kind == RowKind::decode && saw_prefill) return describe(item) + ": decode rows stand before prefill rows";
      saw_prefill |= item.kind == RowKind::prefill;
    }
    // Items are independent: each is judged against the state before the submission, then all of them are applied.
    for (const WorkItem& item : submission.items) {
      const std::string fault = item.kind == RowKind::prefill ? check_prefill(item) : check_decode(item);
      if (!fault.empty()) return describe(item) + ": " + fault;
    }
    for (const WorkItem& item : submission.items) {
      const std::string fault = apply(item);
      if (!fault.empty()) return describe(item) + ": " + fault;
    }
    return {};
  }

  std::string check_prefill(const WorkItem& item) const {
    const Progress& r = requests_[static_cast<std::size_t>(item.request)];
    if (item.begin < 0 || item.begin >= item.end || item.end > r.prompt_length) {
      return "positions are not a non-empty range of the prompt [0, " + std::to_string(r.prompt_length) + ")";
    }
    const int first_window = item.begin / config_.window();
    const int last_window = (item.end - 1) / config_.window();
    for (int p = 0; p < item.begin; ++p) {
      // Earlier windows and earlier pieces of this window have reached every loop that this item runs.
      if (r.prompt_loops[static_cast<std::size_t>(p)] < item.loop_last) {
        return "needs (window " + std::to_string(p / config_.window()) + ", loop " + std::to_string(item.loop_last) + "), which position " +
               std::to_string(p) + " has not reached";
      }
    }
    for (int p = item.begin; p < item.end; ++p) {
      const int done = r.prompt_loops[static_cast<std::size_t>(p)];
      if (done != item.loop_first - 1) {
        return "position " + std::to_string(p) + " has completed " + std::to_string(done) + " loops, so loop " + std::to_string(done + 1) +
               " is next, not " + std::to_string(item.loop_first);
      }
    }
    // Loops beyond the first need the whole window at the previous loop, since selection reads all of it.
    for (int w = first_window; w <= last_window; ++w) {
      const PositionRange range = window_range(w, r.prompt_length, config_.window());
      for (int p = range.begin; p < range.end; ++p) {
        if (r.prompt_loops[static_cast<std::size_t>(p)] < item.loop_first - 1) {
          return "needs (window " + std::to_string(w) + ", loop " + std::to_string(item.loop_first - 1) + "), which position " +
                 std::to_string(p) + " has not reached";
        }
      }
      if (item.loop_first != item.loop_last && (range.begin < item.begin || range.end > item.end)) {
        return "covers several loops of a part of window " + std::to_string(w) + ": a piece of a window advances one loop at a time";
      }
    }
    return {};
  }

  std::string check_decode(const WorkItem& item) const {
    const Progress& r = requests_[static_cast<std::size_t>(item.request)];
    const int index = item.begin - r.prompt_length;
    if (item.end != item.begin + 1 || index < 0 || index >= r.decode_rows) {
      return "a decode item is one position in [" + std::to_string(r.prompt_length) + ", " + std::to_string(r.prompt_length + r.decode_rows) + ")";
    }
    for (int p = 0; p < r.prompt_length; ++p) {
      if (r.prompt_loops[static_cast<std::size_t>(p)] < config_.loops()) {
        return "needs the complete prompt; position " + std::to_string(p) + " has completed " +
               std::to_string(r.prompt_loops[static_cast<std::size_t>(p)]) + " loops";
      }
    }
    for (int i = 0; i < index; ++i) {
      if (r.decode_loops[static_cast<std::size_t>(i)] < config_.loops()) {
        return "needs position " + std::to_string(r.prompt_length + i) + " with all its loops";
      }
    }
    const int done = r.decode_loops[static_cast<std::size_t>(index)];
    if (done != item.loop_first - 1) return "has completed " + std::to_string(done) + " loops, so loop " + std::to_string(done + 1) + " is next";
    return {};
  }

  std::string apply(const WorkItem& item) {
    Progress& r = requests_[static_cast<std::size_t>(item.request)];
    auto& loops = item.kind == RowKind::prefill ? r.prompt_loops : r.decode_loops;
    const int offset = item.kind == RowKind::prefill ? 0 : r.prompt_length;
    for (int p = item.begin; p < item.end; ++p) {
      int& done = loops[static_cast<std::size_t>(p - offset)];
      if (done != item.loop_first - 1) return "position " + std::to_string(p) + " stands in two items of the submission";
      done = item.loop_last;
    }
    return {};
  }

  std::string incomplete() const {
    for (std::size_t i = 0; i < requests_.size(); ++i) {
      const Progress& r = requests_[i];
      for (int p = 0; p < r.prompt_length + r.decode_rows; ++p) {
        const int done = p < r.prompt_length ? r.prompt_loops[static_cast<std::size_t>(p)] : r.decode_loops[static_cast<std::size_t>(p - r.prompt_length)];
        if (done < config_.loops()) {
          return "the plan ends with request " + std::to_string(i) + ", position " + std::to_string(p) + " at " + std::to_string(done) + " of " +
                 std::to_string(config_.loops()) + " loops";
        }
      }
    }
    return {};
  }

  const EffectiveConfig& config_;
  std::vector<Progress> requests_;
};

}  // namespace

std::string plan_fault(const Plan& plan, const Trace& trace, const EffectiveConfig& config) { return Checker(trace, config).check(plan); }

}  // namespace loopgauge
