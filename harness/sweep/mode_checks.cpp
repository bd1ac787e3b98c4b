// SPDX-License-Identifier: Apache-2.0
#include "harness/sweep/mode_checks.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>

#include "harness/sweep/acceptance.hpp"
#include "harness/sweep/checks.hpp"
#include "models/cut_rows.hpp"
#include "models/handoff/protocol.hpp"

namespace loopgauge::harness {
namespace {

std::string counted(std::int64_t count, std::string_view singular, std::string_view plural) {
  return std::to_string(count) + " " + std::string(count == 1 ? singular : plural);
}

// What the plan asks for.
struct PlannedWork {
  std::int64_t preemptions = 0, reused_windows = 0, evictions = 0, failures = 0, decode_items = 0, handoffs = 0;
  bool several_chunks = false;       // of one request in a submission
  bool several_requests = false;     // in a submission
  bool ended_early = false;          // of the record: some request fed fewer tokens than the plan has rows for
  std::vector<int> reused, rewinds;  // by request
};

PlannedWork planned_work(const Plan& plan, std::size_t requests) {
  PlannedWork work;
  work.reused.assign(requests, 0);
  work.rewinds.assign(requests, 0);
  for (const Submission& submission : plan.submissions) {
    for (const Action& action : submission.actions) {
      const auto request = static_cast<std::size_t>(action.request);
      work.preemptions += action.kind == ActionKind::preempt ? 1 : 0;
      work.evictions += action.kind == ActionKind::evict ? 1 : 0;
      work.handoffs += action.kind == ActionKind::hand_off ? 1 : 0;
      if (action.kind == ActionKind::rewind) ++work.rewinds[request];
      if (action.kind != ActionKind::reuse) continue;
      work.reused_windows += action.windows;
      work.reused[request] = action.windows;
    }
    work.failures += submission.failure == PlannedFailure::none ? 0 : 1;
    std::map<int, int> chunks;
    for (const WorkItem& item : submission.items) {
      work.decode_items += item.kind == RowKind::prefill ? 0 : 1;
      work.several_chunks |= ++chunks[item.request] > 1;
    }
    work.several_requests |= chunks.size() > 1;
  }
  return work;
}

// Collects what was shown, what was missing and what the trace left nothing to show for.
class Evidence {
 public:
  void shown(bool holds, const std::string& what) { (holds ? shown_ : missing_).push_back(what); }
  void nothing_to_do(const std::string& why) { idle_.push_back(why); }

  CheckRow check() const {
    if (!missing_.empty()) return failed_check(kModeCheck, joined(missing_));
    if (!idle_.empty()) return not_run_check(kModeCheck, joined(idle_));
    return passed_check(kModeCheck, joined(shown_));
  }

 private:
  static std::string joined(const std::vector<std::string>& texts) {
    std::string text;
    for (const std::string& part : texts) text += (text.empty() ? "" : "; ") + part;
    return text;
  }
  std::vector<std::string> shown_, missing_, idle_;
};

int most_rows_fed(const RunRecord& record) {
  int most = 0;
  for (const RequestRecord& request : record.requests) most = std::max(most, request.fed);
  return most;
}

CheckRow mode_check(const ModeSpec& mode, const Plan& plan, const PlannedWork& work, const Trace& trace, const RunRecord& record) {
  const RunCounters& c = record.counters;
  Evidence evidence;
  const auto submissions = static_cast<std::int64_t>(plan.submissions.size());
  evidence.shown(c.submissions == submissions, std::to_string(c.submissions) + " of " + counted(submissions, "submission", "submissions"));
  if (mode.schedule == "wcpb") {
    if (work.several_chunks) {
      evidence.shown(true, "several chunks of one prompt in a submission");
    } else {
      evidence.nothing_to_do("wcpb has nothing to do: no prompt of the trace has two chunks");
    }
  }
  if (mode.speculates() && most_rows_fed(record) == 0) {
    evidence.nothing_to_do("speculation has nothing to do: no request feeds a token");
  } else if (mode.speculates()) {
    const std::string fault = rounds_fault(plan, trace, record);
    evidence.shown(fault.empty(), fault.empty() ? rounds_text(record) : fault);
  }
  if (mode.schedule == "mixed") {
    if (work.several_requests) {
      evidence.shown(true, "several requests in a submission");
    } else {
      evidence.nothing_to_do("mixed has nothing to do: the trace never has two requests at once");
    }
  }
  if (mode.prefix && work.reused_windows == 0) {
    evidence.nothing_to_do("prefix has nothing to do: no request of the trace begins with a window that is published by then");
  }
  if (work.reused_windows > 0 || c.reused_windows > 0) {
    evidence.shown(c.reused_windows == work.reused_windows,
                   std::to_string(c.reused_windows) + " of " + counted(work.reused_windows, "window", "windows") + " reused");
  }
  if (work.evictions > 0 || c.evicted_windows > 0) {
    evidence.shown(c.evicted_windows == work.evictions,
                   std::to_string(c.evicted_windows) + " of " + counted(work.evictions, "window", "windows") + " evicted");
  }
  if (mode.preempt && work.preemptions == 0) evidence.nothing_to_do("preempt has nothing to do: no request runs long enough");
  // A request that ends early is not preempted any more.
  if (work.preemptions > 0 && c.preemptions == 0 && work.ended_early) {
    evidence.nothing_to_do("preempt has nothing to do: no request lives until the plan preempts it");
  } else if (work.preemptions > 0 || c.preemptions > 0) {
    evidence.shown(c.preemptions > 0 && c.preemptions <= work.preemptions,
                   std::to_string(c.preemptions) + " of " + counted(work.preemptions, "preemption", "preemptions"));
  }
  if (mode.async && submissions < 2) {
    evidence.nothing_to_do("async has nothing to do: the plan has one submission");
  } else if (mode.async) {
    evidence.shown(c.most_in_flight >= 2, counted(c.most_in_flight, "submission", "submissions") + " in flight at most");
    evidence.shown(c.host_reads == 0, counted(c.host_reads, "value", "values") + " read back to prepare a submission");
  } else {
    evidence.shown(c.most_in_flight <= 1, counted(c.most_in_flight, "submission", "submissions") + " in flight at most");
  }
  if (mode.graph && work.decode_items == 0) {
    evidence.nothing_to_do("graph has nothing to do: the trace has no decode rows");
  } else if (mode.graph && most_rows_fed(record) < 2) {
    evidence.nothing_to_do("graph has nothing to do: no request feeds a second token, so that no step comes twice");
  } else if (mode.graph && record.executor.starts_with("optimized")) {
    evidence.shown(c.graph_replays > 0,
                   counted(c.graph_replays, "step", "steps") + " replayed, " + std::to_string(c.graph_fallbacks) + " run eagerly");
  } else if (mode.graph) {
    evidence.shown(true, "nothing captured: replay is of the optimized runtime");
  }
  if (mode.pd && work.handoffs == 0) evidence.nothing_to_do("pd has nothing to do: every request is cancelled before its prompt is complete");
  if (work.handoffs > 0 || !record.handoffs.empty()) {
    std::int64_t handed = 0, bytes = 0, dense = 0;
    for (const HandoffRecord& handoff : record.handoffs) {
      if (handoff.outcome != to_string(handoff::Outcome::handed_over)) continue;
      ++handed, bytes += handoff.bytes, dense += handoff.dense_bytes;
    }
    evidence.shown(handed == work.handoffs, std::to_string(handed) + " of " + counted(work.handoffs, "request", "requests") + " handed off with " +
                                                counted(bytes, "byte", "bytes") + ", dense " + std::to_string(dense));
  }
  evidence.shown(c.failures == work.failures, std::to_string(c.failures) + " of " + counted(work.failures, "failure", "failures"));
  return evidence.check();
}

// Whether the row of that position executes that loop (S-TSEL-4, S-EXIT-5).
bool executes(const RequestRecord& record, const EffectiveConfig& config, int position, int loop) {
  if (loop > config.loops()) return false;
  if (position >= record.prompt_length) return loop <= record.exit_depths[static_cast<std::size_t>(position - record.prompt_length)];
  if (loop <= 2 || !config.selects_tokens()) return true;
  const auto& active = record.active[static_cast<std::size_t>(loop - 3)];
  return std::binary_search(active.begin(), active.end(), position);
}

CheckRow executions_check(const PlannedWork& work, const EffectiveConfig& config, const RunRecord& record) {
  std::int64_t executed = 0, repeated = 0, cells = 0;
  bool all_completed = true;
  for (std::size_t i = 0; i < record.requests.size(); ++i) {
    const RequestRecord& request = record.requests[i];
    if (request.outcome != RequestOutcome::completed) {
      all_completed = false;
      continue;
    }
    const int positions = request.prompt_length + request.fed;
    if (request.executions.size() != static_cast<std::size_t>(positions) * kLoops) {
      return failed_check(kExecutionsCheck, "request " + std::to_string(i) + " has " + std::to_string(request.executions.size()) +
                                                " counts of executions, expected " + std::to_string(positions) + " positions of 4 loops");
    }
    const int reused = work.reused[i] * config.window();
    for (int position = 0; position < positions; ++position) {
      for (int loop = 1; loop <= kLoops; ++loop, ++cells) {
        const int count = request.executions[static_cast<std::size_t>(position * kLoops + loop - 1)];
        const int least = position >= reused && executes(request, config, position, loop) ? 1 : 0;
        const int most = least * (1 + work.rewinds[i]);
        if (count < least || count > most) {
          return failed_check(kExecutionsCheck, "request " + std::to_string(i) + " position " + std::to_string(position) + " loop " +
                                                    std::to_string(loop) + " was executed " + std::to_string(count) + " times, expected " +
                                                    std::to_string(least) + (most > least ? " to " + std::to_string(most) : ""));
        }
        executed += count;
        repeated += std::max(0, count - 1);
      }
    }
  }
  const RunCounters& c = record.counters;
  const std::int64_t total = executed + c.discarded_rows + c.rejected_rows;
  // Rows of a cancelled request are in the totals but, past what it kept, in no record.
  const bool agree =
      all_completed ? c.executed_rows == total && c.recomputed_rows == repeated : c.executed_rows >= total && c.recomputed_rows >= repeated;
  const std::string totals = std::to_string(c.executed_rows) + " rows executed, " + std::to_string(c.recomputed_rows) + " of them again, " +
                             std::to_string(c.discarded_rows) + " discarded" +
                             (c.rejected_rows > 0 ? ", " + std::to_string(c.rejected_rows) + " rejected" : "");
  if (!agree) {
    return failed_check(kExecutionsCheck, "the counters say " + totals + "; the requests' own counts are " + std::to_string(executed) +
                                              " and " + std::to_string(repeated) + " of them again");
  }
  if (cells == 0) return not_run_check(kExecutionsCheck, "no request completed");
  return passed_check(kExecutionsCheck, totals);
}

}  // namespace

std::vector<CheckRow> mode_checks(const ModeSpec& mode, const Plan& plan, const Trace& trace, const EffectiveConfig& config,
                                  const RunRecord& record) {
  if (record.counters.submissions == 0 && !plan.submissions.empty()) {
    const std::string reason = "executor " + record.executor + " counts nothing";
    return {not_run_check(kModeCheck, reason), not_run_check(kExecutionsCheck, reason), not_run_check(kDrainCheck, reason)};
  }
  PlannedWork work = planned_work(plan, trace.requests.size());
  for (std::size_t i = 0; i < std::min(trace.requests.size(), record.requests.size()); ++i) {
    work.ended_early |= record.requests[i].fed < fed_tokens(trace.requests[i]);
  }
  const std::string held = describe(record.held_at_drain);
  return {mode_check(mode, plan, work, trace, record), executions_check(work, config, record),
          held.empty() ? passed_check(kDrainCheck, "nothing is held") : failed_check(kDrainCheck, "held at the end: " + held)};
}

Trace undisturbed(const Trace& trace) {
  Trace result = trace;
  std::erase_if(result.events, [](const TraceEvent& event) { return event.kind != TraceEventKind::reuse_id; });
  return result;
}

bool disturbs(const Trace& trace) {
  return std::any_of(trace.events.begin(), trace.events.end(),
                     [](const TraceEvent& event) { return event.kind != TraceEventKind::reuse_id; });
}

namespace {

template <class T>
void cut(std::vector<T>& values, std::size_t count) {
  if (values.size() > count) values.resize(count);
}

}  // namespace

RequestRecord cut_to(const RequestRecord& whole, const RequestRecord& cancelled, int window) {
  RequestRecord result = whole;
  result.outcome = RequestOutcome::cancelled;
  const std::size_t rows = std::min(cancelled.encoded_frontier.size(), whole.encoded_frontier.size());  // of the logits
  const bool prompt_complete = rows > 0;
  result.fed = prompt_complete ? static_cast<int>(rows) - 1 : 0;
  cut(result.tokens, prompt_complete ? cancelled.tokens.size() : 0);
  cut(result.exit_depths, result.tokens.size());
  for (std::size_t j = static_cast<std::size_t>(result.fed); j < result.exit_depths.size(); ++j) result.exit_depths[j] = 0;
  cut_rows(result.logits, static_cast<std::int64_t>(rows));
  const std::int64_t positions = prompt_complete ? result.prompt_length + result.fed : 0;
  for (auto& hidden : result.hidden) cut_rows(hidden, positions);
  cut_rows(result.gate, positions);
  cut(result.keys, static_cast<std::size_t>(result.fed));
  cut(result.encoded_frontier, rows);
  result.kv.clear();
  result.blocks.clear();
  for (std::size_t r = 0; r < 2 && !whole.scores[r].empty(); ++r) {
    const std::vector<float>& kept = cancelled.scores[r];
    for (int w = 0; w < window_count(whole.prompt_length, window); ++w) {
      const PositionRange range = window_range(w, whole.prompt_length, window);
      const bool scored =
          std::any_of(kept.begin() + std::min<std::ptrdiff_t>(range.begin, std::ssize(kept)),
                      kept.begin() + std::min<std::ptrdiff_t>(range.end, std::ssize(kept)), [](float score) { return !std::isnan(score); });
      if (scored) continue;
      std::fill(result.scores[r].begin() + range.begin, result.scores[r].begin() + range.end, std::numeric_limits<float>::quiet_NaN());
      std::erase_if(result.active[r], [&](std::int32_t position) { return position >= range.begin && position < range.end; });
    }
  }
  return result;
}

std::vector<std::string> cut_to_common(RunRecord& expected, RunRecord& actual, int window) {
  const auto scored = [](const RequestRecord& request) {
    return std::count_if(request.scores[0].begin(), request.scores[0].end(), [](float score) { return !std::isnan(score); });
  };
  const auto end = [&](const RequestRecord& request) {
    const auto rows = std::ssize(request.encoded_frontier);
    return std::string(to_string(request.outcome)) + " with " +
           (rows > 0 ? counted(rows, "logits row", "logits rows") : counted(scored(request), "scored position", "scored positions") + " of its prompt");
  };
  std::vector<std::string> lines;
  for (std::size_t i = 0; i < std::min(expected.requests.size(), actual.requests.size()); ++i) {
    RequestRecord& e = expected.requests[i];
    RequestRecord& a = actual.requests[i];
    const bool one_cancelled = e.outcome == RequestOutcome::cancelled || a.outcome == RequestOutcome::cancelled;
    const bool comparable_scores = !e.scores[0].empty() && !a.scores[0].empty();
    const bool as_far = e.outcome == a.outcome && e.encoded_frontier.size() == a.encoded_frontier.size() &&
                        (!comparable_scores || scored(e) == scored(a));
    if (!one_cancelled || as_far || e.prompt_length != a.prompt_length) continue;
    lines.push_back("request " + std::to_string(i) + ": " + end(a) + ", expected " + end(e));
    RequestRecord cut = cut_to(e, a, window);
    a = cut_to(a, e, window);
    e = std::move(cut);
  }
  return lines;
}

std::string cancellation_fault(const Plan& plan, const EffectiveConfig& config, const TraceRequest& request, int index,
                               const RequestRecord& whole, const RequestRecord& actual) {
  const auto is_cancel = [&](const Action& action) { return action.kind == ActionKind::cancel && action.request == index; };
  const auto at = std::find_if(plan.submissions.begin(), plan.submissions.end(), [&](const Submission& submission) {
    return std::any_of(submission.actions.begin(), submission.actions.end(), is_cancel);
  });
  const bool cancelled = actual.outcome == RequestOutcome::cancelled;
  if (at == plan.submissions.end()) return cancelled ? "it is cancelled, which the plan does not ask for" : "";

  // Results are read up to `submissions_in_flight` submissions before the cancelling one.
  const auto read = at - plan.submissions.begin() - plan.submissions_in_flight;
  int finished = 0, begun = 0;  // logits rows: after the prompt, then after every decode row
  int rounds = 0, cycles = 0;   // of a speculating plan
  for (std::ptrdiff_t i = 0; i <= read; ++i) {
    const Submission& submission = plan.submissions[static_cast<std::size_t>(i)];
    if (submission.failure != PlannedFailure::none) continue;
    for (const WorkItem& item : submission.items) {
      if (item.request != index) continue;
      const bool whole_prompt = !plan.handoff && item.kind == RowKind::prefill && item.end == request.prompt_length() && item.loop_last == config.loops();
      const bool last_loop = item.loop_last == config.loops();
      rounds += item.kind == RowKind::verify && last_loop ? 1 : 0;
      cycles += item.kind == RowKind::stage && last_loop ? 1 : 0;
      const int row = item.kind == RowKind::decode ? item.begin - request.prompt_length() + 2 : whole_prompt ? 1 : 0;
      begun = std::max(begun, row);
      if (item.loop_last == config.loops()) finished = std::max(finished, row);
    }
  }
  // The logits after a prompt that is handed off are formed before the submission that begins with its handoff.
  for (std::ptrdiff_t i = 0; i <= std::min(read + 1, at - plan.submissions.begin()); ++i) {
    for (const Action& action : plan.submissions[static_cast<std::size_t>(i)].actions) {
      if (action.kind == ActionKind::hand_off && action.request == index) begun = std::max(begun, 1), finished = std::max(finished, 1);
    }
  }
  // A round commits one row at least and all of its rows at most, a cycle of a pipeline one at most and one in as many as it has stages.
  if (rounds > 0) begun = 1 + rounds * plan.speculation.live_rows(), finished = 1 + rounds;
  if (cycles > 0) begun = 1 + cycles, finished = 1 + cycles / plan.speculation.live_rows();
  const int possible = static_cast<int>(whole.encoded_frontier.size());
  const int least = std::min(finished, possible), most = std::min(begun, possible);
  const std::string extent = std::to_string(least) + (most > least ? " to " + std::to_string(most) : "") + " of " +
                             counted(possible, "logits row", "logits rows") + " had been read when the plan cancelled it";
  if (!cancelled) return most < possible ? "it is not cancelled, but " + extent : "";
  const int rows = static_cast<int>(actual.encoded_frontier.size());
  if (rows < least || rows > most) return "it kept " + counted(rows, "logits row", "logits rows") + ", but " + extent;
  // A logits row of a free run decides a token, which is emitted with it; a forced token counts when it was forwarded.
  const int tokens = request.teacher_forced() ? std::max(0, rows - 1) : std::min(rows, request.max_new_tokens);
  if (std::ssize(actual.tokens) != tokens) {
    return "it kept " + counted(std::ssize(actual.tokens), "token", "tokens") + " with " + counted(rows, "logits row", "logits rows") +
           ", expected " + std::to_string(tokens);
  }
  return {};
}

}  // namespace loopgauge::harness
