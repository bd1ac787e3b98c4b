// SPDX-License-Identifier: Apache-2.0
// The driver: time, the trace's events, failures and the modifiers. What runs is the schedule's choice.
#include "harness/planner/planner.hpp"

#include <algorithm>
#include <charconv>
#include <limits>
#include <set>

#include "harness/planner/preempt.hpp"
#include "harness/planner/prefix.hpp"
#include "harness/planner/schedule.hpp"
#include "models/error.hpp"

namespace loopgauge::harness {
namespace {

std::unique_ptr<Schedule> make_schedule(const ModeSpec& mode, const Trace& trace) {
  if (mode.schedule == "serial") return make_serial_schedule(trace);
  if (mode.schedule == "split") return make_split_schedule(mode.piece_tokens);
  if (mode.schedule == "mixed") return make_mixed_schedule(mode.token_budget);
  if (mode.schedule == "wcpb") return make_wcpb_schedule(mode.chunk_windows);
  if (mode.speculates()) return make_speculation_schedule(trace);
  throw UnsupportedError("mode " + mode_text(mode) + " has no planner in this version (available: " + available_modes() + ")");
}

Speculation speculation_of(const ModeSpec& mode) {
  if (mode.schedule == "block_spec") return {SpeculationKind::block, mode.draft_depth, mode.draft_length};
  if (mode.schedule == "pipeline_spec") return {SpeculationKind::pipeline, mode.draft_depth, 0};
  return {};
}

// Two submissions; two rounds, each as long as it is for several requests; two cycles.
int asynchronous_submissions(const Speculation& speculation, std::size_t requests) {
  constexpr int kDeep = 2;
  switch (speculation.kind) {
    case SpeculationKind::none: return kDeep;
    case SpeculationKind::pipeline: return kDeep * speculation.draft_depth;
    case SpeculationKind::block:
      return kDeep * (requests == 1 ? 2 : speculation.live_rows() * speculation.draft_depth + kLoops - speculation.draft_depth);
  }
  throw InternalError("unknown speculation");
}

class Driver {
 public:
  Driver(const ModeSpec& mode, const Trace& trace, const EffectiveConfig& config, const PlanOptions& options)
      : trace_(trace), failure_(options.failure), schedule_(make_schedule(mode, trace)) {
    if (mode.prefix) prefix_.emplace(trace, config, mode.published_windows);
    if (mode.preempt) preempt_.emplace(mode.preempt_loops, trace.requests.size());
    for (std::size_t i = 0; i < trace.requests.size(); ++i) {
      requests_.push_back({RequestProgress(static_cast<int>(i), trace.requests[i], config, speculation_of(mode))});
      requests_.back().handed_off = !mode.pd;
    }
    for (const TraceEvent& event : trace.events) {
      if (event.kind == TraceEventKind::reuse_id) of(event.request).awaited = true;
    }
    plan_.mode = mode_text(mode);
    plan_.speculation = speculation_of(mode);
    plan_.submissions_in_flight = mode.async ? asynchronous_submissions(plan_.speculation, trace.requests.size()) : 1;
    plan_.graph_replay = mode.graph;
    plan_.handoff = mode.pd;
  }

  Plan run() {
    while (!ended()) {
      Submission submission;
      follow_events(submission.actions);
      settle(submission.actions);
      const std::vector<Candidate> candidates = runnable();
      if (candidates.empty() && submission.actions.empty()) {
        go_on();
        continue;
      }
      if (!candidates.empty()) choose(submission, candidates);
      submit(std::move(submission));
    }
    if (failure_ && failure_->submission >= static_cast<int>(plan_.submissions.size())) {
      throw ConfigError("submission " + std::to_string(failure_->submission) + " cannot fail: the plan of mode " + plan_.mode +
                        " for trace " + trace_.name + " has " + std::to_string(plan_.submissions.size()) + " of them, counted from 0");
    }
    return std::move(plan_);
  }

 private:
  struct State {
    RequestProgress progress;
    bool awaited = false;  // a reuse_id event has to come first
    bool started = false;
    bool cancelled = false;
    bool held = false;       // between a preempt event and its resume
    bool preempted = false;  // a snapshot is on the host
    bool failed = false;     // its last submission failed
    bool handed_off = true;  // or nobody wants it to be

    bool live() const { return started && !over(); }
    bool over() const { return cancelled || (progress.complete() && handed_off); }
  };

  State& of(int request) { return requests_[static_cast<std::size_t>(request)]; }
  const TraceRequest& traced(const State& state) const { return trace_.requests[static_cast<std::size_t>(state.progress.index())]; }
  bool ended() const {
    return std::all_of(requests_.begin(), requests_.end(), [](const State& state) { return state.over(); });
  }
  // A request with an open round stays until it is decided.
  bool away(const State& state) const {
    return !state.progress.round_open() && (state.held || (preempt_ && preempt_->away(state.progress.index(), clock_)));
  }

  // What the trace asks for by now. An event of a request that is over asks for nothing.
  void follow_events(std::vector<Action>& actions) {
    for (; next_event_ < trace_.events.size() && trace_.events[next_event_].submission <= clock_; ++next_event_) {
      const TraceEvent& event = trace_.events[next_event_];
      State& state = of(event.request);
      switch (event.kind) {
        case TraceEventKind::cancel:
          if (!state.over()) actions.push_back({ActionKind::cancel, event.request});
          state.cancelled |= !state.over();
          break;
        case TraceEventKind::preempt:
          state.held = true;
          break;
        case TraceEventKind::resume:
          state.held = false;
          break;
        case TraceEventKind::reuse_id:
          state.awaited = false;
          break;
      }
    }
  }

  // Rewinds, publications, handoffs, preemptions and resumptions that are due.
  void settle(std::vector<Action>& actions) {
    for (State& state : requests_) {
      const int request = state.progress.index();
      if (!state.live()) continue;
      if (state.failed) {
        actions.push_back({ActionKind::rewind, request});
        state.progress.rewind();
        state.failed = false;
      }
    }
    for (State& state : requests_) {
      if (prefix_ && state.started && !state.cancelled && !state.preempted) prefix_->publish(state.progress, clock_, actions);
    }
    for (State& state : requests_) {
      if (!state.live() || state.handed_off || !state.progress.prompt_complete()) continue;
      actions.push_back({ActionKind::hand_off, state.progress.index()});
      state.handed_off = true;
    }
    for (State& state : requests_) {
      if (!state.live() || !state.handed_off || away(state) == state.preempted) continue;
      state.preempted = !state.preempted;
      actions.push_back({state.preempted ? ActionKind::preempt : ActionKind::resume, state.progress.index()});
    }
  }

  std::vector<Candidate> runnable() const {
    std::set<int> ids;  // of requests that have begun or might begin now
    for (const State& state : requests_) {
      if (state.live()) ids.insert(traced(state).id);
    }
    std::vector<Candidate> candidates;
    for (const State& state : requests_) {
      if (state.over() || state.awaited || away(state) || traced(state).arrival > clock_) continue;
      if (!state.started && !ids.insert(traced(state).id).second) continue;
      candidates.push_back({&state.progress, preempt_ ? preempt_->most_loops(state.progress.index()) : kLoops});
    }
    return candidates;
  }

  // Every request that would begin is shown to the schedule as it would be with the windows that it can reuse.
  void choose(Submission& submission, const std::vector<Candidate>& candidates) {
    std::vector<std::pair<State*, int>> beginning;
    for (const Candidate& candidate : candidates) {
      State& state = of(candidate.index());
      if (state.started) continue;
      beginning.push_back({&state, prefix_ ? prefix_->published_windows(state.progress) : 0});
      state.progress.set_reused_windows(beginning.back().second);
    }
    submission.items = schedule_->next(candidates);
    for (const auto& [state, windows] : beginning) {
      const int request = state->progress.index();
      state->started =
          std::any_of(submission.items.begin(), submission.items.end(), [&](const WorkItem& item) { return item.request == request; });
      if (!state->started) {
        state->progress.set_reused_windows(0);
      } else if (windows > 0) {
        submission.actions.push_back({ActionKind::reuse, request, windows});
        prefix_->reused(request, windows, clock_);
      }
    }
  }

  void submit(Submission submission) {
    ++clock_;
    if (failure_ && failure_->submission == static_cast<int>(plan_.submissions.size())) {
      if (submission.items.empty()) {
        throw ConfigError("submission " + std::to_string(failure_->submission) + " of mode " + plan_.mode + " for trace " + trace_.name +
                          " cannot fail: it runs nothing, its actions stand alone");
      }
      submission.failure = failure_->kind;
      for (const WorkItem& item : submission.items) of(item.request).failed = true;
    } else {
      for (const WorkItem& item : submission.items) of(item.request).progress.advance(item);
      if (preempt_) preempt_->ran(submission.items, clock_, [this](int request) { return of(request).progress.round_open(); });
    }
    plan_.submissions.push_back(std::move(submission));
  }

  // Nothing can run now: on to the next arrival, event or return. Requests that no event will resume are resumed.
  void go_on() {
    schedule_->pause();
    constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();
    std::int64_t next = kNever;
    const auto consider = [&](std::int64_t time) {
      if (time > clock_) next = std::min(next, time);
    };
    if (next_event_ < trace_.events.size()) consider(trace_.events[next_event_].submission);
    bool held = false;
    for (State& state : requests_) {
      if (state.over()) continue;
      consider(traced(state).arrival);
      if (preempt_) consider(preempt_->back(state.progress.index()));
      held |= state.held;
    }
    if (next != kNever) {
      clock_ = next;
      return;
    }
    if (!held) throw InternalError("no request of trace " + trace_.name + " can run, and not all have ended");
    for (State& state : requests_) state.held = false;
  }

  const Trace& trace_;
  std::optional<PlanFailure> failure_;
  std::unique_ptr<Schedule> schedule_;
  std::optional<PrefixRule> prefix_;
  std::optional<PreemptRule> preempt_;
  std::vector<State> requests_;
  std::size_t next_event_ = 0;
  std::int64_t clock_ = 0;  // the index of the next submission, idle time included
  Plan plan_;
};

}  // namespace

PlanFailure parse_plan_failure(std::string_view text) {
  const std::size_t at = text.find('@');
  const std::string_view number = at == std::string_view::npos ? std::string_view{} : text.substr(at + 1);
  PlanFailure failure;
  const auto [end, status] = std::from_chars(number.data(), number.data() + number.size(), failure.submission);
  if (number.empty() || number[0] == '-' || status != std::errc{} || end != number.data() + number.size()) {
    throw ConfigError("planned failure '" + std::string(text) + "' is not of the form launch@17 or allocation@17, 17 a submission's index");
  }
  failure.kind = parse_planned_failure(text.substr(0, at));
  if (failure.kind == PlannedFailure::none) throw ConfigError("planned failure '" + std::string(text) + "' is none");
  return failure;
}

Plan make_plan(const ModeSpec& mode, const Trace& trace, const EffectiveConfig& config, const PlanOptions& options) {
  Plan plan = Driver(mode, trace, config, options).run();
  // Executors trust their plans (S-PLAN-11).
  if (const std::string fault = plan_fault(plan, trace, config); !fault.empty()) {
    throw InternalError("the planner of mode " + plan.mode + " made an illegal plan: " + fault);
  }
  return plan;
}

}  // namespace loopgauge::harness
