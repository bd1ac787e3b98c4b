// SPDX-License-Identifier: Apache-2.0
// Speculation: rows that are drafted, verified, and committed or given up (S-SPEC, S-PIPE). A row runs like any decode row, with its own state
// and attention reference. The host waits for every candidate that the model chooses and for every decision; where it does not wait:
// cuda_run_speculation_ahead.
#include <algorithm>
#include <set>
#include <string>
#include <utility>

#include "models/error.hpp"
#include "optimized/cuda_run.hpp"

namespace loopgauge::optimized {
namespace {

// The live row that has completed so many loops, as an index; -1 without one.
int row_at_loop(const RequestState& s, int completed) {
  const auto row = std::find_if(s.live.begin(), s.live.end(), [&](const LiveRow& r) { return r.completed == completed; });
  return row == s.live.end() ? -1 : static_cast<int>(row - s.live.begin());
}

}  // namespace

// The rows of all items share a batch where they advance by one loop. Which they are is settled before any of them runs.
void CudaRun::speculate(const std::vector<WorkItem>& items) {
  std::vector<const WorkItem*> work;
  for (const WorkItem& item : items) {
    if (is_speculative_work(requests_.at(static_cast<std::size_t>(item.request)), item)) work.push_back(&item);
  }
  if (work.empty()) return;
  const auto state_of = [this](const WorkItem* item) -> RequestState& { return requests_[static_cast<std::size_t>(item->request)]; };
  const Speculation& speculation = options_.speculation;
  const auto propose_after = [&](RequestState& s, int row, int loop) {
    if (loop == speculation.draft_depth && row < speculation.draft_length && s.live[static_cast<std::size_t>(row)].position + 1 < s.capacity)
      propose(s);
  };

  if (work.size() == 1 && work.front()->kind == RowKind::draft) {
    const WorkItem& item = *work.front();
    RequestState& s = state_of(&item);
    if (s.live.empty()) begin_pending_row(s);
    for (int j = item.begin; j < item.end; ++j) {
      const auto index = static_cast<std::size_t>(j);
      if (index >= s.live.size()) return;  // beyond the last position of the request
      for (int loop = item.loop_first; loop <= item.loop_last; ++loop) advance_live_rows({live_part(s, index, loop)});
      propose_after(s, j, item.loop_last);
    }
    return;
  }
  for (const WorkItem* item : work) {
    RequestState& s = state_of(item);
    if (item->loop_first == 1 && s.live.empty()) begin_pending_row(s);
    if (planted(Fault::draft_hidden_shared) && item->kind == RowKind::verify && item->loop_first == speculation.draft_depth + 1) share_draft_states(s);
  }
  const int steps = work.size() == 1 ? work.front()->loop_last - work.front()->loop_first + 1 : 1;
  for (int step = 0; step < steps; ++step) {
    std::vector<Part> parts;
    for (const WorkItem* item : work) {
      const std::vector<Part> rows = live_parts(state_of(item), *item, item->loop_first + step);
      parts.insert(parts.end(), rows.begin(), rows.end());
    }
    advance_live_rows(std::move(parts));
  }
  std::set<int> pipelines;
  for (const WorkItem* item : work) {
    if (item->kind == RowKind::draft) propose_after(state_of(item), item->begin, item->loop_last);
    if (item->kind == RowKind::verify && item->loop_last == config_.loops()) decide_round(state_of(item));
    if (item->kind == RowKind::stage) pipelines.insert(item->request);
  }
  for (const int index : pipelines) settle_pipeline(requests_[static_cast<std::size_t>(index)]);
}

// Whether the item has a row that exists and is at the item's loop.
bool CudaRun::is_speculative_work(const RequestState& s, const WorkItem& item) const {
  if (s.finished || s.stopped || s.committed >= s.capacity) return false;
  if (s.slot < 0 || s.committed == 0) throw InternalError(s.name() + ": speculation before the prompt is complete");
  if (item.kind == RowKind::draft) return item.begin == 0 || item.begin < static_cast<int>(s.live.size());
  if (item.kind == RowKind::verify) return !s.live.empty();
  return row_at_loop(s, item.loop_first - 1) >= 0 || (item.loop_first == 1 && s.live.empty());
}

// What the row sees encoded is encoded before it runs. Under `serial_aligned` these are committed positions: the tail is as long as the rows
// that are on their way.
void CudaRun::begin_live_row(RequestState& s, std::int32_t token, bool drawn) {
  if (std::ssize(s.live) >= live_rows()) throw InternalError(s.name() + ": more than " + std::to_string(live_rows()) + " speculative rows on their way");
  LiveRow row;
  row.position = s.committed + static_cast<int>(s.live.size());
  row.token = token;
  row.key = {s.generation, s.incarnations++};
  // States of a round lie one after the other from its first row on; those of a pipeline stay where they are while the rows shift.
  row.state = options_.speculation.kind == SpeculationKind::block ? static_cast<int>(s.live.size()) : row.position % live_rows();
  row.drawn = drawn;
  if (config_.q().enabled && config_.q().timing == EncodingTiming::serial_aligned) {
    if (s.live.empty()) flush(s, frontier_rule(s, row.position));
    seal_ahead(s, frontier_rule(s, row.position));
    encode_pending();  // the round may be given up, and its storage saved or freed, before the row runs
  }
  s.live.push_back(row);
}

void CudaRun::begin_pending_row(RequestState& s) {
  const auto step = static_cast<std::size_t>(s.committed - s.prompt_length);
  begin_live_row(s, s.request->teacher_forced() ? s.request->forced.at(step) : s.record.tokens.at(step));
}

std::vector<CudaRun::Part> CudaRun::live_parts(RequestState& s, const WorkItem& item, int loop) {
  if (item.kind == RowKind::draft) return {live_part(s, static_cast<std::size_t>(item.begin), loop)};
  if (item.kind == RowKind::stage) return {live_part(s, static_cast<std::size_t>(row_at_loop(s, loop - 1)), loop)};
  std::vector<Part> parts;
  for (std::size_t i = 0; i < s.live.size(); ++i) parts.push_back(live_part(s, i, loop));
  return parts;
}

CudaRun::Part CudaRun::live_part(RequestState& s, std::size_t index, int loop) {
  LiveRow& row = s.live.at(index);
  if (row.completed != loop - 1) {
    throw InternalError(s.name() + ": a speculative row at position " + std::to_string(row.position) + ", loop " + std::to_string(loop) + " out of turn");
  }
  if (references_ && loop == 2) row.reference = references_->acquire(row.key);
  if (references_ && loop >= 3) references_->require_reusable(row.reference, row.key);
  Part part{&s, RowKind::decode, {row.position, row.position + 1}, loop};
  part.live = static_cast<int>(index);
  return part;
}

void CudaRun::advance_live_rows(std::vector<Part> parts) {
  const auto rows = std::ssize(parts);
  const auto drafts = std::count_if(parts.begin(), parts.end(), [this](const Part& part) { return part.loop <= options_.speculation.draft_depth; });
  begin_span();
  run_step(parts);
  const double share = static_cast<double>(drafts) / static_cast<double>(rows);
  end_span(share, 1 - share, 0);
  counters_.draft_rows += drafts;
  counters_.verify_rows += rows - drafts;
}

// A span that a failure breaks off counts for nothing.
void CudaRun::begin_span() {
  if (ticket_->timed == ticket_->spans.size()) ticket_->spans.push_back(std::make_unique<TimedSpan>());
  ticket_->spans[ticket_->timed]->begin.record(stream_);
}

void CudaRun::end_span(double draft, double verify, double accept) {
  TimedSpan& span = *ticket_->spans[ticket_->timed++];
  span.end.record(stream_);
  span.draft = draft;
  span.verify = verify;
  span.accept = accept;
}

void CudaRun::add_times(Ticket& ticket) {
  for (std::size_t i = 0; i < ticket.timed; ++i) {
    const TimedSpan& span = *ticket.spans[i];
    const double seconds = 1e-3 * span.end.milliseconds_since(span.begin);
    times_.draft += span.draft * seconds;
    times_.verify += span.verify * seconds;
    times_.accept += span.accept * seconds;
  }
  ticket.timed = 0;
}

void CudaRun::complete_live_loop(RequestState& s, const Part& part) {
  LiveRow& row = s.live.at(static_cast<std::size_t>(part.live));
  row.completed = part.loop;
  // Values of rows that are given up are overwritten by whoever comes to stand there, or cut.
  record_states(s, decode_state(s, row.state), part.piece, part.loop);
  if (!references_ || part.loop != 2) return;
  references_->mark_source_ready(row.reference, row.key);
  references_->mark_reusable(row.reference, row.key);
  record_keys(s, row.position, row.reference);
}

// The candidate for the position after the youngest row, which has left the draft (S-SPEC-1, S-SPEC-10).
void CudaRun::propose(RequestState& s) {
  const LiveRow& youngest = s.live.back();
  const int position = youngest.position;
  const auto step = static_cast<std::size_t>(position + 1 - s.prompt_length);
  const std::vector<std::int32_t>& given = s.request->draft_tokens;
  if (!given.empty() && given.at(step) >= 0) return begin_live_row(s, given[step]);
  begin_span();
  const float* logits = forward_.logits(decode_state(s, youngest.state), 1);
  auto* choices = emitted_choices_.reserve<HeadChoice>(1);
  head_argmax(logits, choices, 1, model_.vocab, stream_);
  const bool drawn = s.request->temperature != 0.0f;
  if (drawn) {
    TokenDraw from_draft;
    from_draft.temperature = s.request->temperature;
    from_draft.draw = uniform(s, position + 1, SamplingPurpose::draft);
    from_draft.distribution = draft_distribution(s, (youngest.state + 1) % live_rows());
    draw(logits, choices, nullptr, std::span(&from_draft, 1));
  }
  const HeadChoice choice = read(choices, 1).front();
  ++counters_.host_reads;
  end_span(1, 0, 0);
  if (choice.first_non_finite >= 0) {
    throw NumericError(s.name() + ", position " + std::to_string(position) + ": draft logit of token " + std::to_string(choice.first_non_finite) +
                       " is not finite");
  }
  begin_live_row(s, choice.token, drawn);
}

// Positions that later live rows see encoded and the oldest does not are held in both forms.
int CudaRun::doubled_positions(const RequestState& s) const {
  return std::max(s.encoded, s.encoded_ahead) - frontier_rule(s, s.live.front().position);
}

void CudaRun::count_doubled_bytes(int positions) {
  if (config_.q().timing != EncodingTiming::serial_aligned) return;
  constexpr std::int64_t kBytes = 2 * sizeof(Bfloat16);  // K and V
  counters_.most_doubled_bytes =
      std::max(counters_.most_doubled_bytes, kBytes * positions * model_.layers * config_.loops() * model_.heads * model_.head_dim);
}

// Of the first `count` live rows, which have run all their loops and whose states lie one after the other (S-SPEC-3, S-SAMP-4).
std::vector<CudaRun::Verdict> CudaRun::judge_rows(RequestState& s, std::size_t count) {
  const TraceRequest& request = *s.request;
  const int rows = static_cast<int>(count);
  const float* logits = forward_.logits(decode_state(s, s.live.front().state), rows);
  auto* device_choices = emitted_choices_.reserve<HeadChoice>(count);
  head_argmax(logits, device_choices, rows, model_.vocab, stream_);
  std::vector<std::int32_t> stands(count, 0);
  const std::int32_t* confirmed = nullptr;
  if (samples(s)) {
    std::vector<TokenDraw> draws(count);
    for (std::size_t i = 0; i < count; ++i) {
      const int position = s.live[i].position + 1;
      TokenDraw& d = draws[i];
      d.temperature = request.temperature;
      d.draw = uniform(s, position, SamplingPurpose::target);
      if (i + 1 >= s.live.size()) continue;
      const LiveRow& child = s.live[i + 1];
      d.acceptance = uniform(s, position, SamplingPurpose::acceptance);
      d.residual = uniform(s, position, SamplingPurpose::residual);
      d.candidate = child.token;
      d.draft = child.drawn ? draft_distribution(s, child.state) : nullptr;
    }
    auto* device_confirmed = confirmed_.reserve<std::int32_t>(count);
    draw(logits, device_choices, device_confirmed, draws);
    confirmed = download(device_confirmed, count);
  }
  const std::vector<HeadChoice> choices = read(device_choices, count);
  ++counters_.host_reads;

  std::vector<Verdict> verdicts(count);
  for (std::size_t i = 0; i < count; ++i) {
    Verdict& verdict = verdicts[i];
    verdict.choice = choices[i];
    verdict.logits = logits + i * static_cast<std::size_t>(model_.vocab);
    const LiveRow* child = i + 1 < s.live.size() ? &s.live[i + 1] : nullptr;
    const auto next = static_cast<std::size_t>(s.live[i].position + 1 - s.prompt_length);
    if (request.teacher_forced() && next < request.forced.size()) verdict.choice.token = request.forced[next];
    verdict.ends = !request.teacher_forced() && verdict.choice.token == request.eos_token_id;
    verdict.confirmed = child != nullptr && (confirmed != nullptr ? confirmed[i] != 0 : child->token == verdict.choice.token);
    // A logit that is not finite ends the walk, and its row's delivery reports it.
    verdict.confirmed = verdict.confirmed && verdict.choice.first_non_finite < 0;
  }
  if (!planted(Fault::acceptance_off_by_one)) return verdicts;
  const auto first = std::find_if(verdicts.begin(), verdicts.end(), [](const Verdict& verdict) { return !verdict.confirmed; });
  const auto index = static_cast<std::size_t>(first - verdicts.begin());
  if (index >= count || index + 1 >= s.live.size()) return verdicts;
  first->choice.token = s.live[index + 1].token;
  first->confirmed = true;
  first->ends = !request.teacher_forced() && first->choice.token == request.eos_token_id;
  return verdicts;
}

// The first rows of `live`, as many as the round emits, belong to the sequence; those after them never were (S-SPEC-3, S-SPEC-4).
void CudaRun::commit_rows(RequestState& s, const SpeculationRound& round, const std::vector<Verdict>& verdicts) {
  const auto emitted = static_cast<std::size_t>(round.emitted);
  for (std::size_t i = 0; i < emitted; ++i) {
    LiveRow& row = s.live[i];
    if (row.reference >= 0) references_->release(row.reference, row.key);
    row.reference = -1;
    if (const auto stale = s.stale_references.find(row.position); stale != s.stale_references.end()) {
      references_->release(stale->second.first, stale->second.second);
      s.stale_references.erase(stale);
    }
  }
  s.committed = round.position + round.emitted;
  const bool goes_on = options_.speculation.kind == SpeculationKind::pipeline && verdicts.front().confirmed && !verdicts.front().ends;
  if (!goes_on) give_up_rows(s, emitted);
  s.live.erase(s.live.begin(), s.live.begin() + round.emitted);
  if (seals_unverified() && std::max(s.encoded, s.encoded_ahead) > s.committed) s.unreadable = s.committed;
  flush(s, frontier_rule(s, s.committed));
  encode_pending();

  ++counters_.speculation_rounds;
  on_delivery([&s, round] { s.record.rounds.push_back(round); });
  const bool wanted = options_.record.logits || options_.tap != nullptr;
  for (std::size_t i = 0; i < emitted; ++i) {
    const float* row = wanted ? download(verdicts[i].logits, static_cast<std::size_t>(model_.vocab)) : nullptr;
    on_delivery([this, &s, position = round.position + static_cast<int>(i), choice = verdicts[i].choice, row] {
      for (int loop = 1; loop <= config_.loops(); ++loop) count_execution(s, position, loop);
      deliver_emission({&s, position, config_.loops()}, config_.loops(), choice, row);
    });
  }
}

// A round has run all its loops: the longest confirmed prefix is committed.
void CudaRun::decide_round(RequestState& s) {
  begin_span();
  count_doubled_bytes(doubled_positions(s));
  const int rows_end = s.live.back().position + 1;
  if (seals_unverified()) seal_unverified(s, rows_end);
  if (planted(Fault::candidate_sealed) && config_.q().policy != EncodingPolicy::fixed_prompt) {
    seal_ahead(s, rows_end / kGroupSize * kGroupSize);
    encode_pending();
  }
  const std::vector<Verdict> verdicts = judge_rows(s, s.live.size());
  SpeculationRound round{s.live.front().position, static_cast<std::int32_t>(s.live.size()) - 1, 0, 0};
  for (bool goes_on = true; goes_on;) {
    const Verdict& verdict = verdicts[static_cast<std::size_t>(round.emitted)];
    ++round.emitted;
    round.accepted += verdict.confirmed;
    goes_on = verdict.confirmed && !verdict.ends;
  }
  commit_rows(s, round, verdicts);
  end_span(0, 0, 1);
}

// All stage items of a submission have run: the token that has loop 4 commits, then the one that has left the draft proposes (S-PIPE-4).
void CudaRun::settle_pipeline(RequestState& s) {
  if (s.live.front().completed == config_.loops()) {
    begin_span();
    count_doubled_bytes(doubled_positions(s));
    const std::vector<Verdict> verdicts = judge_rows(s, 1);
    commit_rows(s, {s.live.front().position, s.live.size() > 1 ? 1 : 0, verdicts.front().confirmed ? 1 : 0, 1}, verdicts);
    end_span(0, 0, 1);
  }
  const bool has_left_draft = !s.live.empty() && s.live.back().completed == options_.speculation.draft_depth;
  if (has_left_draft && s.live.back().position + 1 < s.capacity) propose(s);
}

// Live rows from `first` (an index) on never were: invalid in every plane, their references retired.
void CudaRun::give_up_rows(RequestState& s, std::size_t first) {
  if (runs_ahead()) return give_up_ahead(s);
  if (first >= s.live.size()) return;
  kv_.truncate(s.slot, s.live[first].position, keeps_sealed_candidates() ? KvCache::Sealed::kept : KvCache::Sealed::refused);
  for (std::size_t i = first; i < s.live.size(); ++i) {
    LiveRow& row = s.live[i];
    leave_behind(s, row);
    if (row.reference >= 0) references_->release(row.reference, row.key);
    counters_.rejected_rows += row.completed;
    counters_.executed_rows += row.completed;
  }
  s.live.resize(first);
}

// Fault::stale_reference_at_position and Fault::plane_not_truncated: what a row that is given up keeps for whoever comes to stand there.
void CudaRun::leave_behind(RequestState& s, LiveRow& row) {
  if (planted(Fault::stale_reference_at_position) && row.reference >= 0 && row.completed >= 2 &&
      s.stale_references.emplace(row.position, std::pair(row.reference, row.key)).second) {
    row.reference = -1;
  }
  if (planted(Fault::plane_not_truncated) && row.completed >= 3) s.stale_rows.insert(row.position);
}

// Fault::draft_hidden_shared: every row is verified from the hidden row that the last draft left.
void CudaRun::share_draft_states(RequestState& s) {
  const auto bytes = static_cast<std::size_t>(model_.hidden) * sizeof(Bfloat16);
  for (const LiveRow& row : s.live) {
    if (row.state == s.live.back().state) continue;
    LOOPGAUGE_CUDA_CHECK(cudaMemcpyAsync(decode_state(s, row.state), decode_state(s, s.live.back().state), bytes, cudaMemcpyDeviceToDevice, stream_));
  }
}

}  // namespace loopgauge::optimized
