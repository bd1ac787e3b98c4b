// SPDX-License-Identifier: Apache-2.0
#include "reference/run/speculation.hpp"

#include <algorithm>
#include <vector>

#include "models/error.hpp"
#include "reference/run/encoding.hpp"
#include "reference/run/observation.hpp"
#include "reference/run/recurrent_model.hpp"
#include "reference/run/request_life.hpp"
#include "reference/run/token_choice.hpp"

namespace loopgauge::reference {
namespace {

// The first position without a committed row.
template <class P>
int pending_position(const RequestState<P>& s) {
  return s.prompt_length + s.held->rows_finished;
}

// The live row that has completed so many loops, as an index; -1 without one.
template <class P>
int row_at_loop(const RequestState<P>& s, int completed_loops) {
  const auto& live = s.held->live;
  const auto row = std::find_if(live.begin(), live.end(), [&](const auto& r) { return r.completed_loops == completed_loops; });
  return row == live.end() ? -1 : static_cast<int>(row - live.begin());
}

// What a row of `position` sees encoded has to be there before it runs. Under `serial_aligned` these are positions of committed rows: the
// tail is as long as the rows that are on their way.
template <class P>
void encode_for_row(RunContext<P>& run, RequestState<P>& s, int position) {
  if (!run.config.q().enabled || run.config.q().timing != EncodingTiming::serial_aligned) return;
  const int committed = pending_position(s) / kGroupSize * kGroupSize;  // of a planted fault alone the frontier lies beyond it
  encode_to(run, s, std::min(frontier_rule(run, s, position), std::max(s.held->encoded, committed)));
}

template <class P>
void begin_live_row(RunContext<P>& run, RequestState<P>& s, int position, Choice<typename P::Real> fed) {
  DecodeRow<P> row;
  row.position = position;
  row.incarnation = s.held->incarnations++;
  row.token = fed.token;
  row.draft = std::move(fed.distribution);
  row.last_loop = run.config.loops();
  s.held->live.push_back(std::move(row));
  encode_for_row(run, s, position);
}

template <class P>
void begin_pending_row(RunContext<P>& run, RequestState<P>& s) {
  const int position = pending_position(s);
  const std::size_t step = static_cast<std::size_t>(position - s.prompt_length);
  std::int32_t token = s.request->teacher_forced() ? s.request->forced.at(step) : s.held->tokens.at(step);
  if (s.held->token_lost) token = (token + 1) % run.model.vocab;
  s.held->token_lost = false;
  begin_live_row(run, s, position, {token});
}

// The candidate for the position after a row that has left the draft (S-SPEC-1, S-SPEC-10).
template <class P>
void propose(RunContext<P>& run, RequestState<P>& s) {
  const int position = s.held->live.back().position + 1;
  const auto& given = s.request->draft_tokens;
  const std::size_t step = static_cast<std::size_t>(position - s.prompt_length);
  Choice<typename P::Real> candidate;
  if (!given.empty() && given.at(step) >= 0) {
    candidate.token = given[step];
  } else {
    const auto logits = logits_of(run, s, run.options.speculation.draft_depth, position - 1);
    candidate = choose_token<P>(*s.request, position, logits, SamplingPurpose::draft);
  }
  begin_live_row(run, s, position, std::move(candidate));
}

// Live rows [first, first + count) run one loop in one batch.
template <class P>
void run_live_rows(RunContext<P>& run, RequestState<P>& s, std::size_t first, std::size_t count, int loop) {
  std::vector<int> positions;
  for (std::size_t i = first; i < first + count; ++i) {
    DecodeRow<P>& row = s.held->live.at(i);
    if (row.completed_loops != loop - 1) {
      throw InternalError(name(s) + ": a speculative row at position " + std::to_string(row.position) + ", loop " + std::to_string(loop) +
                          " out of turn");
    }
    if (loop == 2 && run.config.s().enabled) row.reference = run.references.acquire(s.generation, row.incarnation);
    positions.push_back(row.position);
  }
  run_rows(run, s, positions, loop, RowKind::decode);
  for (std::size_t i = first; i < first + count; ++i) s.held->live[i].completed_loops = loop;
  const bool drafting = loop <= run.options.speculation.draft_depth;
  (drafting ? run.counters.draft_rows : run.counters.verify_rows) += static_cast<std::int64_t>(count);
}

template <class P>
void draft(RunContext<P>& run, RequestState<P>& s, const WorkItem& item) {
  const Speculation& speculation = run.options.speculation;
  auto& live = s.held->live;
  for (int j = item.begin; j < item.end; ++j) {
    if (live.empty()) begin_pending_row(run, s);
    const std::size_t index = static_cast<std::size_t>(j);
    if (index >= live.size()) return;  // beyond the last position of the request
    for (int loop = item.loop_first; loop <= item.loop_last; ++loop) run_live_rows(run, s, index, 1, loop);
    const bool proposes = item.loop_last == speculation.draft_depth && j < speculation.draft_length;
    if (proposes && live[index].position + 1 < s.capacity) propose(run, s);
  }
}

// Positions that later live rows see encoded and the oldest does not are held in both forms.
template <class P>
void count_doubled_bytes(RunContext<P>& run, const RequestState<P>& s) {
  if (run.config.q().timing != EncodingTiming::serial_aligned) return;
  const int positions = std::max(0, s.held->encoded - frontier_rule(run, s, s.held->live.front().position));
  constexpr std::int64_t kBytes = 2 * 2;  // BF16, K and V
  const std::int64_t bytes = kBytes * positions * run.model.layers * run.config.loops() * run.model.projection_width();
  run.counters.most_doubled_bytes = std::max(run.counters.most_doubled_bytes, bytes);
}

// The oldest live row has all its loops and belongs to the sequence.
template <class P>
void commit_oldest(RunContext<P>& run, RequestState<P>& s, std::size_t index, std::vector<typename P::Real> logits, std::int32_t token) {
  RequestStorage<P>& h = *s.held;
  DecodeRow<P>& row = h.live.at(index);
  if (row.reference >= 0) run.references.retire(row.reference);
  row.reference = -1;
  ++h.rows_finished;
  for (int loop = 1; loop <= run.config.loops(); ++loop) count_execution(s, row.position, loop);
  observe_position(run, s, row.position);
  emit(run, s, row.position, run.config.loops(), std::move(logits), token);
}

// Fault::stale_reference_at_position, Fault::plane_not_truncated and Fault::candidate_sealed: what a row that is given up leaves behind.
// Returns whether its K/V stays.
template <class P>
bool leave_behind(RunContext<P>& run, RequestState<P>& s, const DecodeRow<P>& row) {
  RequestStorage<P>& h = *s.held;
  if (run.planted(Fault::stale_reference_at_position) && row.reference >= 0 && row.completed_loops >= 2) {
    h.stale_references.emplace(row.position, run.references.at(row.reference));
  }
  const bool plane = run.planted(Fault::plane_not_truncated) && row.completed_loops >= 3;
  if (plane) h.stale_rows.insert(row.position);
  return plane || run.planted(Fault::candidate_sealed);
}

// What the logits of a row say of the candidate after it; without one they choose a token.
template <class P>
Verdict judge(const RequestState<P>& s, const std::vector<typename P::Real>& logits, const DecodeRow<P>& row, const DecodeRow<P>* child) {
  const int position = row.position + 1;
  if (child == nullptr) return {choose_token<P>(*s.request, position, logits).token, false};
  return judge_candidate<P>(*s.request, position, logits, child->token, child->draft);
}

// A round has run all its loops: the longest confirmed prefix is committed, the rest was never there.
template <class P>
void decide_round(RunContext<P>& run, RequestState<P>& s) {
  RequestStorage<P>& h = *s.held;
  const auto& q = run.config.q();
  const bool eager = q.enabled && q.timing == EncodingTiming::execution_dependent && q.flush == FlushRule::eager;
  const int rows_end = h.live.back().position + 1;
  count_doubled_bytes(run, s);
  if (run.planted(Fault::candidate_sealed) && q.policy != EncodingPolicy::fixed_prompt)
    encode_to(run, s, rows_end / kGroupSize * kGroupSize);
  if (eager) {
    encode_again(run, s, rows_end);
    encode_to(run, s, frontier_rule(run, s, rows_end));
  }
  SpeculationRound round{h.live.front().position, static_cast<std::int32_t>(h.live.size()) - 1, 0, 0};
  bool one_too_many = run.planted(Fault::acceptance_off_by_one);
  for (bool goes_on = true; goes_on;) {
    const std::size_t index = static_cast<std::size_t>(round.emitted);
    const DecodeRow<P>* child = index + 1 < h.live.size() ? &h.live[index + 1] : nullptr;
    auto logits = logits_of(run, s, run.config.loops(), h.live[index].position);
    Verdict verdict = judge(s, logits, h.live[index], child);
    if (one_too_many && !verdict.confirmed && child != nullptr) {
      verdict = {child->token, true};
      one_too_many = false;
    }
    commit_oldest(run, s, index, std::move(logits), verdict.token);
    ++round.emitted;
    if (verdict.confirmed) ++round.accepted;
    goes_on = verdict.confirmed && !h.ended;
  }
  run.ticket.results.back().round = round;
  ++run.counters.speculation_rounds;
  give_up_rows(run, s, static_cast<std::size_t>(round.emitted));
  h.live.clear();
  if (h.encoded > pending_position(s)) h.unreadable = pending_position(s);
  commit_known_rows(run, s);
}

template <class P>
void verify(RunContext<P>& run, RequestState<P>& s, const WorkItem& item) {
  auto& live = s.held->live;
  for (int loop = item.loop_first; loop <= item.loop_last; ++loop) run_live_rows(run, s, 0, live.size(), loop);
  if (item.loop_last == run.config.loops()) decide_round(run, s);
}

template <class P>
void advance_stage(RunContext<P>& run, RequestState<P>& s, const WorkItem& item) {
  if (item.loop_first == 1 && s.held->live.empty()) begin_pending_row(run, s);
  const auto index = static_cast<std::size_t>(row_at_loop(s, item.loop_first - 1));
  for (int loop = item.loop_first; loop <= item.loop_last; ++loop) run_live_rows(run, s, index, 1, loop);
}

}  // namespace

template <class P>
bool is_speculative_work(const RequestState<P>& s, const WorkItem& item) {
  if (s.held == nullptr || s.held->ended || pending_position(s) >= s.capacity) return false;
  const auto& live = s.held->live;
  if (item.kind == RowKind::draft) return item.begin == 0 || item.begin < static_cast<int>(live.size());
  if (item.kind == RowKind::verify) return !live.empty();
  return row_at_loop(s, item.loop_first - 1) >= 0 || (item.loop_first == 1 && live.empty());
}

template <class P>
void speculate(RunContext<P>& run, RequestState<P>& s, const WorkItem& item) {
  switch (item.kind) {
    case RowKind::draft:
      return draft(run, s, item);
    case RowKind::verify:
      return verify(run, s, item);
    case RowKind::stage:
      return advance_stage(run, s, item);
    default:
      throw InternalError("an item that does not speculate");
  }
}

template <class P>
void settle_pipeline(RunContext<P>& run, RequestState<P>& s) {
  auto& live = s.held->live;
  if (live.front().completed_loops == run.config.loops()) {
    count_doubled_bytes(run, s);
    const DecodeRow<P>* child = live.size() > 1 ? &live[1] : nullptr;
    auto logits = logits_of(run, s, run.config.loops(), live.front().position);
    Verdict verdict = judge(s, logits, live.front(), child);
    if (run.planted(Fault::acceptance_off_by_one) && child != nullptr) verdict = {child->token, true};
    const SpeculationRound round{live.front().position, child == nullptr ? 0 : 1, verdict.confirmed ? 1 : 0, 1};
    commit_oldest(run, s, 0, std::move(logits), verdict.token);
    run.ticket.results.back().round = round;
    ++run.counters.speculation_rounds;
    if (!verdict.confirmed || s.held->ended) give_up_rows(run, s, 1);
    live.erase(live.begin());
    commit_known_rows(run, s);
  }
  const bool has_left_draft = !live.empty() && live.back().completed_loops == run.options.speculation.draft_depth;
  if (has_left_draft && live.back().position + 1 < s.capacity) propose(run, s);
}

template <class P>
void break_off_speculation(RunContext<P>& run, RequestState<P>& s, const WorkItem& item, int layers) {
  auto& live = s.held->live;
  if (item.loop_first == 1 && live.empty()) begin_pending_row(run, s);
  std::size_t first = static_cast<std::size_t>(item.begin), count = 1;
  if (item.kind == RowKind::verify) count = live.size();
  if (item.kind == RowKind::stage) first = static_cast<std::size_t>(row_at_loop(s, item.loop_first - 1));
  std::vector<int> positions;
  for (std::size_t i = first; i < first + count; ++i) {
    if (item.loop_first == 2 && run.config.s().enabled) live.at(i).reference = run.references.acquire(s.generation, live[i].incarnation);
    positions.push_back(live.at(i).position);
  }
  run_rows(run, s, positions, item.loop_first, RowKind::decode, layers);
  s.held->kv.poison({positions.front(), positions.back() + 1}, item.loop_first);
}

template <class P>
void give_up_rows(RunContext<P>& run, RequestState<P>& s, std::size_t first) {
  RequestStorage<P>& h = *s.held;
  for (std::size_t i = first; i < h.live.size(); ++i) {
    const DecodeRow<P>& row = h.live[i];
    if (row.reference >= 0) run.references.retire(row.reference);
    run.counters.rejected_rows += row.completed_loops;
    const PositionRange position{row.position, row.position + 1};
    if (!leave_behind(run, s, row)) h.kv.poison(position, 1);
    h.executed_loops[static_cast<std::size_t>(row.position)] = 0;
    s.row_keys.erase(row.position);
  }
  if (first < h.live.size()) h.live.erase(h.live.begin() + static_cast<std::ptrdiff_t>(first), h.live.end());
}

#define LOOPGAUGE_INSTANTIATE(P)                                                                  \
  template bool is_speculative_work<P>(const RequestState<P>&, const WorkItem&);                  \
  template void speculate<P>(RunContext<P>&, RequestState<P>&, const WorkItem&);                  \
  template void settle_pipeline<P>(RunContext<P>&, RequestState<P>&);                             \
  template void break_off_speculation<P>(RunContext<P>&, RequestState<P>&, const WorkItem&, int); \
  template void give_up_rows<P>(RunContext<P>&, RequestState<P>&, std::size_t);
LOOPGAUGE_FOR_EACH_PROFILE(LOOPGAUGE_INSTANTIATE)
#undef LOOPGAUGE_INSTANTIATE

}  // namespace loopgauge::reference
