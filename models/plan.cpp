// SPDX-License-Identifier: Apache-2.0
// Legality of a plan, decided from the dependency rules alone: every planner's output and every hand-made order is judged by the same text.
#include "models/plan.hpp"

#include <algorithm>
#include <array>
#include <set>
#include <sstream>

#include "models/error.hpp"

namespace loopgauge {
namespace {

// The k-th window of a prompt as far as reuse can tell windows apart: all tokens up to its end.
using WindowTokens = std::vector<std::int32_t>;

// How far one request has come. Windows complete a loop in ascending order, rows complete one after the other.
struct Progress {
  int prompt_length = 0;
  int decode_rows = 0;
  std::vector<int> window_loops;  // completed loops of each window
  std::vector<int> window_part;   // positions of the window that have also completed the loop after those
  int rows_done = 0;              // decode rows with all their loops
  int row_loops = 0;              // completed loops of the row after those
  int drafted = 0;                // of a speculation round: rows with loops 1..d
  int round_loops = 0;            // completed loops: of the row after those while drafting, otherwise of all rows of the round
  bool verifying = false;         // the round's verification has begun
  std::vector<int> stages;        // of a pipeline: loops of the cycle that each stage has run, newest cycle
  int cycles = 0;                 // complete ones since the last commit that is certain
  bool started = false;
  bool preempted = false;
  bool cancelled = false;
  bool handed_off = false;
  bool dirty = false;             // a failed submission touched it

  bool prompt_complete(int loops) const { return window_loops.back() == loops; }
  bool complete(int loops) const { return prompt_complete(loops) && rows_done == decode_rows; }
};

std::string describe(const WorkItem& item) {
  std::ostringstream text;
  text << to_string(item.kind) << " of request " << item.request << ", ";
  if (item.kind == RowKind::stage) {
    text << "stage " << item.begin;
  } else {
    text << (item.kind == RowKind::prefill || item.kind == RowKind::decode ? "positions [" : "rows [") << item.begin << ", " << item.end << ")";
  }
  text << ", loops " << item.loop_first << ".." << item.loop_last;
  return text.str();
}

std::string describe(const Action& action) {
  std::string text = std::string(to_string(action.kind)) + " of request " + std::to_string(action.request);
  if (action.windows != 0) text += ", windows " + std::to_string(action.windows);
  return text;
}

class Checker {
 public:
  Checker(const Trace& trace, const EffectiveConfig& config) : trace_(trace), config_(config) {
    for (const TraceRequest& request : trace.requests) {
      Progress progress;
      progress.prompt_length = request.prompt_length();
      progress.decode_rows = fed_tokens(request);
      const auto windows = static_cast<std::size_t>(window_count(progress.prompt_length, config.window()));
      progress.window_loops.assign(windows, 0);
      progress.window_part.assign(windows, 0);
      requests_.push_back(std::move(progress));
    }
  }

  std::string check(const Plan& plan) {
    handoff_ = plan.handoff;
    if (plan.submissions_in_flight < 1) return "at least one submission is in flight, not " + std::to_string(plan.submissions_in_flight);
    if (plan.submissions_in_flight > 1 && config_.exit().mode == ExitMode::threshold) {
      return "exit threshold decides on a gate before the next loop is issued, which " + std::to_string(plan.submissions_in_flight) +
             " submissions in flight exclude: use exit delayed";
    }
    speculation_ = plan.speculation;
    if (std::string fault = check_speculation(); !fault.empty()) return fault;
    for (std::size_t i = 0; i < plan.submissions.size(); ++i) {
      const std::string fault = check_submission(plan.submissions[i]);
      if (!fault.empty()) return "submission " + std::to_string(i) + ": " + fault;
    }
    return incomplete();
  }

 private:
  Progress& of(int request) { return requests_[static_cast<std::size_t>(request)]; }
  const Progress& of(int request) const { return requests_[static_cast<std::size_t>(request)]; }
  bool exists(int request) const { return request >= 0 && request < static_cast<int>(requests_.size()); }

  int depth() const { return speculation_.draft_depth; }
  int round_rows() const { return speculation_.draft_length + 1; }
  int stage_count() const { return speculation_.live_rows(); }
  int stage_loops(int stage) const { return std::min(config_.loops(), (stage + 1) * depth()) - stage * depth(); }

  std::string check_speculation() {
    if (speculation_.kind == SpeculationKind::none) return {};
    const bool block = speculation_.kind == SpeculationKind::block;
    const int deepest = block ? 2 : config_.loops() - 1;
    if (depth() < 1 || depth() > deepest) return "a draft of " + std::to_string(depth()) + " loops is not within 1.." + std::to_string(deepest);
    if (block && (speculation_.draft_length < 1 || speculation_.draft_length > kMostDraftLength)) {
      return "a round drafts 1.." + std::to_string(kMostDraftLength) + " tokens, not " + std::to_string(speculation_.draft_length);
    }
    if (config_.exit().mode != ExitMode::full) return "speculation verifies all loops: it needs exit full";
    const auto& q = config_.q();
    if (q.enabled && q.timing == EncodingTiming::serial_aligned && q.tail < speculation_.live_rows()) {
      return "serial_aligned encoding with a tail of " + std::to_string(q.tail) + " positions could encode a row that is not verified: " +
             std::to_string(speculation_.live_rows()) + " rows of a request are on their way, so the tail needs as many";
    }
    for (Progress& r : requests_) r.stages.assign(static_cast<std::size_t>(block ? 0 : stage_count()), 0);
    return {};
  }

  std::string check_submission(const Submission& submission) {
    for (const Action& action : submission.actions) {
      const std::string fault = act(action);
      if (!fault.empty()) return describe(action) + ": " + fault;
    }
    std::set<int> prefilling, decoding;
    bool saw_prefill = false;
    for (const WorkItem& item : submission.items) {
      if (!exists(item.request)) return describe(item) + ": no such request in the trace";
      if (item.loop_first < 1 || item.loop_last > config_.loops() || item.loop_first > item.loop_last) {
        return describe(item) + ": loops are not an ascending range within 1.." + std::to_string(config_.loops());
      }
      if (submission.items.size() > 1 && item.loop_first != item.loop_last) {
        return describe(item) + ": an item of a submission with several items advances exactly one loop";
      }
      if (std::string fault = check_kind(item); !fault.empty()) return describe(item) + ": " + fault;
      (item.kind == RowKind::prefill ? prefilling : decoding).insert(item.request);
      if (prefilling.contains(item.request) && decoding.contains(item.request)) {
        return describe(item) + ": one request gives prefill or decode rows to a submission, never both";
      }
      if (item.kind != RowKind::prefill && saw_prefill) return describe(item) + ": decode rows stand before prefill rows";
      saw_prefill |= item.kind == RowKind::prefill;
      if (speculation_.kind != SpeculationKind::none && !prefilling.empty() && !decoding.empty()) {
        return describe(item) + ": rows that speculate and prefill rows stand in submissions of their own";
      }
    }
    // Items are independent: each is judged against the state before the submission, then all of them are applied.
    for (const WorkItem& item : submission.items) {
      std::string fault = at_rest(item.request);
      if (fault.empty()) fault = start(item.request);
      if (fault.empty() && handoff_ && item.kind != RowKind::prefill && !of(item.request).handed_off) fault = "the request has not been handed off";
      if (fault.empty()) fault = check_item(item);
      if (!fault.empty()) return describe(item) + ": " + fault;
    }
    if (submission.failure != PlannedFailure::none && submission.items.empty()) return "a planned failure needs an item that fails";
    const std::vector<Progress> before = submission.failure == PlannedFailure::none ? std::vector<Progress>{} : requests_;
    for (const WorkItem& item : submission.items) {
      if (!apply(item)) return describe(item) + ": its positions stand in two items of the submission";
    }
    if (submission.failure == PlannedFailure::none) return {};
    requests_ = before;  // it advances nothing
    for (const WorkItem& item : submission.items) of(item.request).dirty = true;
    return {};
  }

  std::string check_kind(const WorkItem& item) const {
    const auto needs = [&](SpeculationKind kind) { return speculation_.kind == kind; };
    switch (item.kind) {
      case RowKind::prefill: return {};
      case RowKind::decode: return needs(SpeculationKind::none) ? "" : "a plan that speculates has no decode items";
      case RowKind::draft:
      case RowKind::verify: return needs(SpeculationKind::block) ? "" : "the plan has no block speculation";
      case RowKind::stage: return needs(SpeculationKind::pipeline) ? "" : "the plan has no token pipeline";
    }
    throw InternalError("unknown kind of rows");
  }

  std::string check_item(const WorkItem& item) const {
    if (item.kind == RowKind::prefill) return check_prefill(item);
    const Progress& r = of(item.request);
    for (std::size_t w = 0; w < r.window_loops.size(); ++w) {
      if (r.window_loops[w] < config_.loops()) {
        return "needs the complete prompt; window " + std::to_string(w) + " has completed " + std::to_string(r.window_loops[w]) + " loops";
      }
    }
    if (item.kind != RowKind::decode && r.decode_rows == 0) return "the request has no decode rows";
    switch (item.kind) {
      case RowKind::draft: return check_draft(item);
      case RowKind::verify: return check_verify(item);
      case RowKind::stage: return check_stage(item);
      default: return check_decode(item);
    }
  }

  std::string check_draft(const WorkItem& item) const {
    const Progress& r = of(item.request);
    if (item.begin < 0 || item.begin >= item.end || item.end > round_rows()) {
      return "rows are not a non-empty range of the round [0, " + std::to_string(round_rows()) + ")";
    }
    if (item.loop_last > depth()) return "a draft has loops 1.." + std::to_string(depth());
    if (item.end - item.begin > 1 && (item.loop_first != 1 || item.loop_last != depth())) {
      return "covers a part of the loops of several rows: a candidate is known when the row before it has all loops of its draft";
    }
    if (r.verifying) return "the round is being verified";
    if (item.begin != r.drafted) return "row " + std::to_string(r.drafted) + " of the round is next";
    if (item.loop_first != r.round_loops + 1) {
      return "has completed " + std::to_string(r.round_loops) + " loops, so loop " + std::to_string(r.round_loops + 1) + " is next";
    }
    return {};
  }

  std::string check_verify(const WorkItem& item) const {
    const Progress& r = of(item.request);
    if (item.begin != 0 || item.end != round_rows()) return "a verification covers all rows of the round [0, " + std::to_string(round_rows()) + ")";
    if (r.drafted < round_rows()) return "needs row " + std::to_string(r.drafted) + " of the round with loops 1.." + std::to_string(depth());
    const int done = r.verifying ? r.round_loops : depth();
    if (item.loop_first != done + 1) return "has completed " + std::to_string(done) + " loops, so loop " + std::to_string(done + 1) + " is next";
    return {};
  }

  std::string check_stage(const WorkItem& item) const {
    const Progress& r = of(item.request);
    if (item.begin < 0 || item.begin >= stage_count() || item.end != item.begin + 1) {
      return "a stage item is one stage in [0, " + std::to_string(stage_count()) + ")";
    }
    const int done = r.stages[static_cast<std::size_t>(item.begin)], first = item.begin * depth() + 1;
    const int last = item.begin * depth() + stage_loops(item.begin);
    if (item.loop_last > last) return "the stage has loops " + std::to_string(first) + ".." + std::to_string(last);
    if (done == stage_loops(item.begin)) return "the stage has run in this cycle, others have not";
    if (item.loop_first != first + done) return "loop " + std::to_string(first + done) + " is next";
    return {};
  }

  // Why no row of the request may run now.
  std::string at_rest(int request) const {
    const Progress& r = of(request);
    if (r.cancelled) return "the request is cancelled";
    if (r.preempted) return "the request is preempted and not resumed";
    if (r.dirty) return "an earlier submission of the request failed: it needs a rewind";
    return {};
  }

  // A request begins when nobody else uses its id.
  std::string start(int request) {
    Progress& r = of(request);
    if (r.started) return {};
    const auto id = [&](int i) { return trace_.requests[static_cast<std::size_t>(i)].id; };
    for (int other = 0; other < static_cast<int>(requests_.size()); ++other) {
      const Progress& o = of(other);
      if (other != request && id(other) == id(request) && o.started && !o.cancelled && !o.complete(config_.loops())) {
        return "request " + std::to_string(other) + " has the id " + std::to_string(id(request)) + " and is live";
      }
    }
    r.started = true;
    return {};
  }

  std::string act(const Action& action) {
    if (!exists(action.request)) return "no such request in the trace";
    Progress& r = of(action.request);
    if (r.cancelled && action.kind != ActionKind::evict) return "the request is cancelled";
    switch (action.kind) {
      case ActionKind::cancel: r.cancelled = true; return {};
      case ActionKind::preempt:
        if (!r.started) return "the request holds nothing yet";
        if (r.preempted) return "the request is preempted already";
        if (handoff_ && !r.handed_off) return "what a handoff reads stays where it is";
        if (r.dirty) return "an earlier submission of the request failed: its state is undefined until a rewind";
        give_up_rows(r);
        r.preempted = true;
        return {};
      case ActionKind::resume:
        if (!r.preempted) return "the request is not preempted";
        r.preempted = false;
        return {};
      case ActionKind::rewind: return rewind(r);
      case ActionKind::publish: return publish(action);
      case ActionKind::reuse: return reuse(action);
      case ActionKind::evict: return evict(action);
      case ActionKind::hand_off: return hand_off(action);
    }
    throw InternalError("unknown action");
  }

  std::string hand_off(const Action& action) {
    Progress& r = of(action.request);
    if (!handoff_) return "the plan is not one of handoffs";
    if (std::string fault = at_rest(action.request); !fault.empty()) return fault;
    if (r.handed_off) return "the request has been handed off already";
    if (!r.prompt_complete(config_.loops())) return "the prompt is not complete";
    r.handed_off = true;
    return {};
  }

  // Speculative rows on their way are not kept by a preemption (S-SPEC-7).
  static void give_up_rows(Progress& r) {
    r.drafted = r.round_loops = r.cycles = 0;
    r.verifying = false;
    std::fill(r.stages.begin(), r.stages.end(), 0);
  }

  std::string rewind(Progress& r) const {
    if (!r.started) return "the request holds nothing yet";
    if (r.preempted) return "the request is preempted";
    for (std::size_t w = 0; w < r.window_loops.size(); ++w) {
      r.window_part[w] = 0;
      if (r.window_loops[w] < config_.loops()) r.window_loops[w] = 0;
    }
    r.row_loops = 0;
    give_up_rows(r);
    r.dirty = false;
    return {};
  }

  // Windows that may be shared lie before the one with the last prompt position (S-PFX-3).
  std::string sharable(const Action& action) const {
    const int most = (of(action.request).prompt_length - 1) / config_.window();
    if (action.windows >= 1 && action.windows <= most) return {};
    return std::to_string(action.windows) + " windows are not in 1.." + std::to_string(most) +
           ": whole windows before the one that holds the last prompt position";
  }

  WindowTokens tokens(int request, int window) const {
    const auto& prompt = trace_.requests[static_cast<std::size_t>(request)].prompt;
    return {prompt.begin(), prompt.begin() + static_cast<std::ptrdiff_t>(window + 1) * config_.window()};
  }

  std::string publish(const Action& action) {
    const Progress& r = of(action.request);
    if (std::string fault = at_rest(action.request); !fault.empty()) return fault;
    if (std::string fault = sharable(action); !fault.empty()) return fault;
    for (int w = 0; w < action.windows; ++w) {
      const int done = r.window_loops[static_cast<std::size_t>(w)];
      if (done < config_.loops()) {
        return "needs (window " + std::to_string(w) + ", loop " + std::to_string(config_.loops()) + "), which has completed " +
               std::to_string(done) + " loops";
      }
    }
    if (r.prompt_complete(config_.loops())) {
      return "the prompt is complete: the blocks that encode it may depend on its length, and the request may have ended with its first token";
    }
    for (int w = 0; w < action.windows; ++w) published_.insert(tokens(action.request, w));
    return {};
  }

  std::string reuse(const Action& action) {
    Progress& r = of(action.request);
    if (r.started) return "the request has begun without published windows";
    if (std::string fault = sharable(action); !fault.empty()) return fault;
    for (int w = 0; w < action.windows; ++w) {
      if (!published_.contains(tokens(action.request, w))) return "window " + std::to_string(w) + " with these tokens is not published";
    }
    if (std::string fault = start(action.request); !fault.empty()) return fault;
    std::fill_n(r.window_loops.begin(), action.windows, config_.loops());
    return {};
  }

  std::string evict(const Action& action) {
    if (action.windows < 0) return std::to_string(action.windows) + " is no window";
    const int most = (of(action.request).prompt_length - 1) / config_.window();
    for (int w = action.windows; w < most; ++w) published_.erase(tokens(action.request, w));
    return {};
  }

  std::string check_prefill(const WorkItem& item) const {
    const Progress& r = of(item.request);
    if (item.begin < 0 || item.begin >= item.end || item.end > r.prompt_length) {
      return "positions are not a non-empty range of the prompt [0, " + std::to_string(r.prompt_length) + ")";
    }
    const int first_window = item.begin / config_.window();
    const int last_window = (item.end - 1) / config_.window();
    for (int w = 0; w < first_window; ++w) {
      const int done = r.window_loops[static_cast<std::size_t>(w)];
      if (done < item.loop_last) {
        return "needs (window " + std::to_string(w) + ", loop " + std::to_string(item.loop_last) + "), which has completed " +
               std::to_string(done) + " loops";
      }
    }
    for (int w = first_window; w <= last_window; ++w) {
      const PositionRange range = window_range(w, r.prompt_length, config_.window());
      const PositionRange piece{std::max(range.begin, item.begin), std::min(range.end, item.end)};
      const int done = r.window_loops[static_cast<std::size_t>(w)];
      const int next = range.begin + r.window_part[static_cast<std::size_t>(w)];  // first position that has not completed loop done + 1
      if (item.loop_first != item.loop_last && !(piece == range)) {
        return "covers several loops of a part of window " + std::to_string(w) + ": a piece of a window advances one loop at a time";
      }
      if (piece.begin < next || done != item.loop_first - 1) {
        const int completed = piece.begin < next ? done + 1 : done;
        std::string text = "position " + std::to_string(piece.begin) + " has completed " + std::to_string(completed) + " loops, so loop " +
                           std::to_string(completed + 1) + " is next, not " + std::to_string(item.loop_first);
        // Loops beyond the first need the whole window at the previous loop, since selection reads all of it.
        if (completed + 1 == item.loop_first && done < item.loop_first - 1) {
          text = "needs (window " + std::to_string(w) + ", loop " + std::to_string(item.loop_first - 1) + "), which position " +
                 std::to_string(next) + " has not reached";
        }
        return text;
      }
      if (piece.begin > next) {
        return "needs loop " + std::to_string(item.loop_first) + " of window " + std::to_string(w) + " up to its begin, which position " +
               std::to_string(next) + " has not reached";
      }
    }
    return {};
  }

  std::string check_decode(const WorkItem& item) const {
    const Progress& r = of(item.request);
    const int index = item.begin - r.prompt_length;
    if (item.end != item.begin + 1 || index < 0 || index >= r.decode_rows) {
      return "a decode item is one position in [" + std::to_string(r.prompt_length) + ", " + std::to_string(r.prompt_length + r.decode_rows) + ")";
    }
    if (index > r.rows_done) return "needs position " + std::to_string(r.prompt_length + r.rows_done) + " with all its loops";
    const int done = index < r.rows_done ? config_.loops() : r.row_loops;
    if (done != item.loop_first - 1) return "has completed " + std::to_string(done) + " loops, so loop " + std::to_string(done + 1) + " is next";
    return {};
  }

  // False when another item of the submission has advanced the same rows.
  bool apply(const WorkItem& item) {
    Progress& r = of(item.request);
    if (item.kind == RowKind::draft) return apply_draft(r, item);
    if (item.kind == RowKind::verify) return apply_verify(r, item);
    if (item.kind == RowKind::stage) return apply_stage(r, item);
    if (item.kind == RowKind::decode) {
      if (item.begin != r.prompt_length + r.rows_done || r.row_loops != item.loop_first - 1) return false;
      r.row_loops = item.loop_last;
      if (r.row_loops == config_.loops()) {
        ++r.rows_done;
        r.row_loops = 0;
      }
      return true;
    }
    for (int w = item.begin / config_.window(); w * config_.window() < item.end; ++w) {
      const PositionRange range = window_range(w, r.prompt_length, config_.window());
      const PositionRange piece{std::max(range.begin, item.begin), std::min(range.end, item.end)};
      int& done = r.window_loops[static_cast<std::size_t>(w)];
      int& part = r.window_part[static_cast<std::size_t>(w)];
      if (done != item.loop_first - 1 || range.begin + part != piece.begin) return false;
      part += piece.size();
      if (part == range.size()) {
        done = item.loop_last;
        part = 0;
      }
    }
    return true;
  }

  bool apply_draft(Progress& r, const WorkItem& item) const {
    if (r.verifying || item.begin != r.drafted || item.loop_first != r.round_loops + 1) return false;
    r.round_loops = item.loop_last;
    if (r.round_loops == depth()) {
      r.drafted = item.end;
      r.round_loops = 0;
    }
    return true;
  }

  // A round that is decided commits one row at least.
  bool apply_verify(Progress& r, const WorkItem& item) const {
    if ((r.verifying ? r.round_loops : depth()) != item.loop_first - 1) return false;
    r.verifying = true;
    r.round_loops = item.loop_last;
    if (r.round_loops < config_.loops()) return true;
    give_up_rows(r);
    ++r.rows_done;
    return true;
  }

  // A cycle is complete when every stage has run all its loops. At the latest a token that begins in one cycle is committed after as many
  // cycles as there are stages.
  bool apply_stage(Progress& r, const WorkItem& item) const {
    int& done = r.stages[static_cast<std::size_t>(item.begin)];
    if (done != item.loop_first - 1 - item.begin * depth()) return false;
    done += item.loop_last - item.loop_first + 1;
    for (int stage = 0; stage < stage_count(); ++stage) {
      if (r.stages[static_cast<std::size_t>(stage)] < stage_loops(stage)) return true;
    }
    std::fill(r.stages.begin(), r.stages.end(), 0);
    if (++r.cycles < stage_count()) return true;
    r.cycles = 0;
    ++r.rows_done;
    return true;
  }

  std::string incomplete() const {
    for (std::size_t i = 0; i < requests_.size(); ++i) {
      const Progress& r = requests_[i];
      const std::string who = "the plan ends with request " + std::to_string(i);
      if (r.cancelled) continue;
      if (r.preempted) return who + " preempted";
      if (r.dirty) return who + " after a failed submission, without a rewind";
      const auto at = [&](int position, int done) {
        return who + ", position " + std::to_string(position) + " at " + std::to_string(done) + " of " + std::to_string(config_.loops()) + " loops";
      };
      for (std::size_t w = 0; w < r.window_loops.size(); ++w) {
        const int next = static_cast<int>(w) * config_.window() + r.window_part[w];
        if (r.window_loops[w] < config_.loops()) return at(next, r.window_loops[w]);
      }
      if (handoff_ && !r.handed_off) return who + " not handed off";
      if (r.rows_done >= r.decode_rows) continue;
      if (speculation_.kind == SpeculationKind::none) return at(r.prompt_length + r.rows_done, r.row_loops);
      return who + ", which is certain to have " + std::to_string(r.rows_done) + " of its " + std::to_string(r.decode_rows) +
             " decode rows: a round, or as many cycles as a pipeline has stages, may commit one row only";
    }
    return {};
  }

  const Trace& trace_;
  const EffectiveConfig& config_;
  Speculation speculation_;
  std::vector<Progress> requests_;
  std::set<WindowTokens> published_;
  bool handoff_ = false;          // of the plan
};

}  // namespace

int Speculation::live_rows() const {
  switch (kind) {
    case SpeculationKind::none: return 1;
    case SpeculationKind::block: return draft_length + 1;
    case SpeculationKind::pipeline: return (kLoops + draft_depth - 1) / draft_depth;
  }
  throw InternalError("unknown speculation");
}

std::string_view to_string(RowKind kind) {
  switch (kind) {
    case RowKind::prefill: return "prefill";
    case RowKind::decode: return "decode";
    case RowKind::draft: return "draft";
    case RowKind::verify: return "verify";
    case RowKind::stage: return "stage";
  }
  throw InternalError("unknown kind of rows");
}

std::string_view to_string(ActionKind kind) {
  switch (kind) {
    case ActionKind::cancel: return "cancel";
    case ActionKind::preempt: return "preempt";
    case ActionKind::resume: return "resume";
    case ActionKind::rewind: return "rewind";
    case ActionKind::publish: return "publish";
    case ActionKind::reuse: return "reuse";
    case ActionKind::evict: return "evict";
    case ActionKind::hand_off: return "hand_off";
  }
  throw InternalError("unknown action");
}

std::string_view to_string(PlannedFailure failure) {
  switch (failure) {
    case PlannedFailure::none: return "none";
    case PlannedFailure::allocation: return "allocation";
    case PlannedFailure::launch: return "launch";
  }
  throw InternalError("unknown failure");
}

PlannedFailure parse_planned_failure(std::string_view text) {
  for (const PlannedFailure failure : {PlannedFailure::none, PlannedFailure::allocation, PlannedFailure::launch}) {
    if (to_string(failure) == text) return failure;
  }
  throw ConfigError("failure '" + std::string(text) + "' is not one of: none, allocation, launch");
}

std::string plan_fault(const Plan& plan, const Trace& trace, const EffectiveConfig& config) { return Checker(trace, config).check(plan); }

}  // namespace loopgauge
