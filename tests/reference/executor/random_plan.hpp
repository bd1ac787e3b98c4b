// SPDX-License-Identifier: Apache-2.0
// Random legal plans: any order that the dependencies and arrivals allow, several requests in a submission, pieces of windows, and actions
// and failures at the rates that a test asks for. The generator keeps its own account of what is legal; tests judge its plans by
// plan_fault.
#pragma once

#include <algorithm>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "models/plan.hpp"
#include "tests/reference/support.hpp"

namespace loopgauge::test {

// Chances in percent, each for every submission.
struct PlanMix {
  int several = 75;  // items of several requests, one loop each; otherwise one item through one or more loops
  int piece = 25;    // of a window instead of the whole, for each prefill item
  int preempt = 0;   // of a random request; it is resumed later with the same chance
  int rewind = 0;
  int failure = 0;
  int publish = 0;  // of every complete window of a random request whose prompt is not complete
  int reuse = 0;    // by a request that begins, of everything that fits
  int evict = 0;
};

class RandomPlan {
 public:
  RandomPlan(const Trace& trace, const EffectiveConfig& config, std::uint64_t seed, PlanMix mix = {})
      : trace_(trace), config_(config), random_(seed), mix_(mix) {
    for (const TraceRequest& request : trace.requests) {
      Progress p;
      p.window_loops.assign(static_cast<std::size_t>(window_count(request.prompt_length(), config.window())), 0);
      p.window_part.assign(p.window_loops.size(), 0);
      p.decode_rows = fed_tokens(request);
      requests_.push_back(std::move(p));
    }
  }

  bool complete() const {
    return std::all_of(requests_.begin(), requests_.end(),
                       [](const Progress& p) { return p.cancelled || (p.complete() && !p.preempted && !p.dirty); });
  }
  bool cancelled(int request) const { return at(request).cancelled; }
  bool live(int request) const { return at(request).started && !at(request).cancelled && !at(request).complete(); }

  // Actions, then at least one item where there is one to run. Failing, it advances nothing and the next submission rewinds.
  Submission next(PlannedFailure failure = PlannedFailure::none, std::optional<int> cancel = {}) {
    Submission submission;
    ++submissions_;
    if (cancel) {
      submission.actions.push_back({ActionKind::cancel, *cancel});
      at(*cancel).cancelled = true;
    }
    for (int i = 0; i < count(); ++i) {
      if (at(i).dirty && !at(i).cancelled) act(submission, {ActionKind::rewind, i});
    }
    random_actions(submission);
    while (submission.items.empty() && !complete()) {
      if (chance(mix_.several))
        several_items(submission);
      else
        one_item(submission);
      if (submission.items.empty() && !anything_runnable()) {
        resume_one(submission);
        ++submissions_;  // nobody to run: the next arrival may be due
      }
    }
    if (failure == PlannedFailure::none && chance(mix_.failure)) failure = chance(50) ? PlannedFailure::allocation : PlannedFailure::launch;
    for (const WorkItem& item : submission.items) at(item.request).started = true;
    if (failure != PlannedFailure::none && !submission.items.empty()) {
      submission.failure = failure;
      for (const WorkItem& item : submission.items) at(item.request).dirty = true;
    } else {
      for (const WorkItem& item : submission.items) apply(item);
    }
    return submission;
  }

  Plan finish(std::string mode, int submissions_in_flight = 1) {
    Plan plan{std::move(mode), {}};
    plan.submissions_in_flight = submissions_in_flight;
    while (!complete()) plan.submissions.push_back(next());
    return plan;
  }

 private:
  struct Progress {
    std::vector<int> window_loops, window_part;
    int decode_rows = 0, rows_done = 0, row_loops = 0;
    bool started = false, preempted = false, cancelled = false, dirty = false;
    bool prompt_complete() const { return window_loops.back() == kLoops; }
    bool complete() const { return prompt_complete() && rows_done == decode_rows; }
  };

  int count() const { return static_cast<int>(requests_.size()); }
  Progress& at(int request) { return requests_[static_cast<std::size_t>(request)]; }
  const Progress& at(int request) const { return requests_[static_cast<std::size_t>(request)]; }
  const TraceRequest& of(int request) const { return trace_.requests[static_cast<std::size_t>(request)]; }
  bool chance(int percent) { return random_.below(100) < percent; }

  bool runnable(int request) const {
    const Progress& p = at(request);
    if (p.complete() || p.cancelled || p.preempted || p.dirty || (!p.started && of(request).arrival > submissions_)) return false;
    for (int other = 0; other < count() && !p.started; ++other) {
      if (other != request && of(other).id == of(request).id && live(other)) return false;
      if (other < request && of(other).id == of(request).id && !at(other).started && !at(other).cancelled)
        return false;  // the earlier one first
    }
    return true;
  }
  bool anything_runnable() const {
    for (int i = 0; i < count(); ++i) {
      if (runnable(i)) return true;
    }
    return false;
  }

  // ---- actions ----
  void act(Submission& submission, Action action) {
    submission.actions.push_back(action);
    Progress& p = at(action.request);
    if (action.kind == ActionKind::preempt) p.preempted = true;
    if (action.kind == ActionKind::resume) p.preempted = false;
    if (action.kind == ActionKind::rewind) {
      p.dirty = false;
      p.row_loops = 0;
      for (std::size_t w = 0; w < p.window_loops.size(); ++w) {
        p.window_part[w] = 0;
        if (p.window_loops[w] < kLoops) p.window_loops[w] = 0;
      }
    }
  }
  void resume_one(Submission& submission) {
    for (int i = 0; i < count(); ++i) {
      if (at(i).preempted && !at(i).cancelled) return act(submission, {ActionKind::resume, i});
    }
  }
  std::vector<std::int32_t> tokens_of(int request, int window) const {
    const auto& prompt = of(request).prompt;
    return {prompt.begin(), prompt.begin() + static_cast<std::ptrdiff_t>(window + 1) * config_.window()};
  }
  void random_actions(Submission& submission) {
    const int r = random_.below(count());
    Progress& p = at(r);
    if (p.cancelled) return;
    if (p.preempted && chance(mix_.preempt))
      act(submission, {ActionKind::resume, r});
    else if (p.started && !p.preempted && !p.dirty && chance(mix_.preempt))
      act(submission, {ActionKind::preempt, r});
    if (p.started && !p.preempted && chance(mix_.rewind)) act(submission, {ActionKind::rewind, r});
    const int sharable = (of(r).prompt_length() - 1) / config_.window();
    if (p.started && !p.preempted && !p.dirty && !p.prompt_complete() && chance(mix_.publish)) {
      int windows = 0;
      while (windows < sharable && p.window_loops[static_cast<std::size_t>(windows)] == kLoops) published_.insert(tokens_of(r, windows++));
      if (windows > 0) act(submission, {ActionKind::publish, r, windows});
    }
    for (int i = 0; i < count(); ++i) {
      if (!at(i).started && runnable(i) && chance(mix_.reuse)) reuse(submission, i);
    }
    if (sharable > 0 && chance(mix_.evict)) {
      const int from = random_.below(sharable);
      for (int w = from; w < sharable; ++w) published_.erase(tokens_of(r, w));
      act(submission, {ActionKind::evict, r, from});
    }
  }

  void reuse(Submission& submission, int request) {
    Progress& p = at(request);
    const int sharable = (of(request).prompt_length() - 1) / config_.window();
    int windows = 0;
    while (windows < sharable && published_.contains(tokens_of(request, windows)))
      p.window_loops[static_cast<std::size_t>(windows++)] = kLoops;
    p.started = windows > 0;
    if (windows > 0) act(submission, {ActionKind::reuse, request, windows});
  }

  // ---- items ----
  // Whether the window may run a loop, every item being judged by the state before the submission.
  bool ready(const Progress& p, std::size_t window, int loop_first, int loop_last) const {
    if (p.window_loops[window] != loop_first - 1) return false;
    for (std::size_t w = 0; w < window; ++w) {
      if (p.window_loops[w] < loop_last) return false;
    }
    return true;
  }
  void several_items(Submission& submission) {
    std::vector<WorkItem> prefill;
    for (int i = 0; i < count(); ++i) {
      if (!runnable(i) || !chance(70)) continue;
      const Progress& p = at(i);
      if (p.prompt_complete()) {
        const int position = of(i).prompt_length() + p.rows_done;
        submission.items.push_back({i, RowKind::decode, position, position + 1, p.row_loops + 1, p.row_loops + 1});
        continue;
      }
      for (std::size_t w = 0; w < p.window_loops.size(); ++w) {
        const int loop = p.window_loops[w] + 1;
        if (loop > kLoops || !ready(p, w, loop, loop) || !chance(75)) continue;
        const PositionRange range = window_range(static_cast<int>(w), of(i).prompt_length(), config_.window());
        const int begin = range.begin + p.window_part[w];
        const int end = chance(mix_.piece) ? begin + 1 + random_.below(range.end - begin) : range.end;
        prefill.push_back({i, RowKind::prefill, begin, end, loop, loop});
      }
      if (!startable_with_others(i)) break;
    }
    submission.items.insert(submission.items.end(), prefill.begin(), prefill.end());
  }
  // Two requests of one id never begin in one submission.
  bool startable_with_others(int request) const {
    if (at(request).started) return true;
    for (int other = 0; other < count(); ++other) {
      if (other != request && of(other).id == of(request).id) return false;
    }
    return true;
  }
  void one_item(Submission& submission) {
    std::vector<int> candidates;
    for (int i = 0; i < count(); ++i) {
      if (runnable(i)) candidates.push_back(i);
    }
    if (candidates.empty()) return;
    const int i = candidates[static_cast<std::size_t>(random_.below(static_cast<int>(candidates.size())))];
    const Progress& p = at(i);
    if (p.prompt_complete()) {
      const int position = of(i).prompt_length() + p.rows_done, first = p.row_loops + 1;
      submission.items.push_back({i, RowKind::decode, position, position + 1, first, first + random_.below(kLoops - first + 1)});
      return;
    }
    std::size_t w = 0;
    while (p.window_loops[w] == kLoops) ++w;  // the earliest unfinished window, and followers that have come as far
    const int first = p.window_loops[w] + 1;
    const PositionRange range = window_range(static_cast<int>(w), of(i).prompt_length(), config_.window());
    if (p.window_part[w] > 0) {
      submission.items.push_back({i, RowKind::prefill, range.begin + p.window_part[w], range.end, first, first});
      return;
    }
    std::size_t last = w;
    while (last + 1 < p.window_loops.size() && p.window_loops[last + 1] == first - 1 && p.window_part[last + 1] == 0 && chance(30)) ++last;
    const int end = window_range(static_cast<int>(last), of(i).prompt_length(), config_.window()).end;
    submission.items.push_back({i, RowKind::prefill, range.begin, end, first, first + random_.below(kLoops - first + 1)});
  }

  void apply(const WorkItem& item) {
    Progress& p = at(item.request);
    if (item.kind == RowKind::decode) {
      p.row_loops = item.loop_last;
      if (p.row_loops == kLoops) ++p.rows_done, p.row_loops = 0;
      return;
    }
    for (int w = item.begin / config_.window(); w * config_.window() < item.end; ++w) {
      const PositionRange range = window_range(w, of(item.request).prompt_length(), config_.window());
      int& part = p.window_part[static_cast<std::size_t>(w)];
      part += std::min(range.end, item.end) - std::max(range.begin, item.begin);
      if (part == range.size()) p.window_loops[static_cast<std::size_t>(w)] = item.loop_last, part = 0;
    }
  }

  const Trace& trace_;
  const EffectiveConfig& config_;
  Random random_;
  PlanMix mix_;
  std::vector<Progress> requests_;
  std::set<std::vector<std::int32_t>> published_;
  int submissions_ = -1;  // index of the one that is made
};

}  // namespace loopgauge::test
