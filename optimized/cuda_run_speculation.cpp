// SPDX-License-Identifier: Apache-2.0
// Block speculation: rows of a round are drafted one after the other, verified in one batch, committed or given up (S-SPEC). A row runs like
// any decode row, with its own state and attention reference. The host waits for every candidate and for the decision.
#include <algorithm>
#include <string>

#include "models/error.hpp"
#include "optimized/cuda_run.hpp"

namespace loopgauge::optimized {

void CudaRun::speculate(RequestState& s, const WorkItem& item) {
  if (item.kind != RowKind::draft && item.kind != RowKind::verify) throw InternalError("an item that is not of block speculation");
  if (s.finished || s.stopped || s.committed >= s.capacity) return;
  if (s.slot < 0 || s.committed == 0) throw InternalError(s.name() + ": speculation before the prompt is complete");
  if (item.kind == RowKind::verify) {
    if (s.live.empty()) return;
    for (int loop = item.loop_first; loop <= item.loop_last; ++loop) run_live_rows(s, 0, s.live.size(), loop);
    if (item.loop_last == config_.loops()) decide_round(s);
    return;
  }
  if (item.begin == 0 && s.live.empty()) {
    const auto step = static_cast<std::size_t>(s.committed - s.prompt_length);
    begin_live_row(s, s.request->teacher_forced() ? s.request->forced.at(step) : s.record.tokens.at(step));
  }
  const Speculation& speculation = options_.speculation;
  for (int j = item.begin; j < item.end; ++j) {
    const auto index = static_cast<std::size_t>(j);
    if (index >= s.live.size()) return;  // beyond the last position of the request
    for (int loop = item.loop_first; loop <= item.loop_last; ++loop) run_live_rows(s, index, 1, loop);
    const bool proposes = item.loop_last == speculation.draft_depth && j < speculation.draft_length;
    if (proposes && s.live[index].position + 1 < s.capacity) propose(s);
  }
}

// What the row sees encoded is encoded before it runs. Under `serial_aligned` these are committed positions: the tail is as long as a round.
void CudaRun::begin_live_row(RequestState& s, std::int32_t token) {
  LiveRow row;
  row.position = s.committed + static_cast<int>(s.live.size());
  row.token = token;
  row.key = {s.generation, s.incarnations++};
  if (config_.q().enabled && config_.q().timing == EncodingTiming::serial_aligned) {
    if (s.live.empty()) flush(s, frontier_rule(s, row.position));
    seal_ahead(s, frontier_rule(s, row.position));
    encode_pending();  // the round may be given up, and its storage saved or freed, before the row runs
  }
  s.live.push_back(row);
}

void CudaRun::run_live_rows(RequestState& s, std::size_t first, std::size_t count, int loop) {
  std::vector<Part> parts;
  for (std::size_t i = first; i < first + count; ++i) {
    LiveRow& row = s.live.at(i);
    if (row.completed != loop - 1) {
      throw InternalError(s.name() + ": a speculative row at position " + std::to_string(row.position) + ", loop " + std::to_string(loop) +
                          " out of turn");
    }
    if (references_ && loop == 2) row.reference = references_->acquire(row.key);
    if (references_ && loop >= 3) references_->require_reusable(row.reference, row.key);
    Part part{&s, RowKind::decode, {row.position, row.position + 1}, loop};
    part.live = static_cast<int>(i);
    parts.push_back(part);
  }
  run_step(parts);
  (loop <= options_.speculation.draft_depth ? counters_.draft_rows : counters_.verify_rows) += static_cast<std::int64_t>(count);
}

void CudaRun::complete_live_loop(RequestState& s, const Part& part) {
  LiveRow& row = s.live.at(static_cast<std::size_t>(part.live));
  row.completed = part.loop;
  // Values of rows that are given up are overwritten by whoever comes to stand there, or cut.
  record_states(s, decode_state(s, part.live), part.piece, part.loop);
  if (!references_ || part.loop != 2) return;
  references_->mark_source_ready(row.reference, row.key);
  references_->mark_reusable(row.reference, row.key);
  record_keys(s, row.position, row.reference);
}

// The candidate for the position after the youngest row, which has left the draft (S-SPEC-1, S-SPEC-10).
void CudaRun::propose(RequestState& s) {
  const int position = s.live.back().position;
  const auto step = static_cast<std::size_t>(position + 1 - s.prompt_length);
  const std::vector<std::int32_t>& given = s.request->draft_tokens;
  if (!given.empty() && given.at(step) >= 0) return begin_live_row(s, given[step]);
  const float* logits = forward_.logits(decode_state(s, static_cast<int>(s.live.size()) - 1), 1);
  auto* choices = emitted_choices_.reserve<HeadChoice>(1);
  head_argmax(logits, choices, 1, model_.vocab, stream_);
  const HeadChoice choice = read(choices, 1).front();
  ++counters_.host_reads;
  if (choice.first_non_finite >= 0) {
    throw NumericError(s.name() + ", position " + std::to_string(position) + ": draft logit of token " + std::to_string(choice.first_non_finite) +
                       " is not finite");
  }
  begin_live_row(s, choice.token);
}

// A round has run all its loops: the longest confirmed prefix is committed, the rest was never there (S-SPEC-3, S-SPEC-4).
void CudaRun::decide_round(RequestState& s) {
  if (config_.q().timing == EncodingTiming::serial_aligned) {
    const int doubled = std::max(0, std::max(s.encoded, s.encoded_ahead) - frontier_rule(s, s.live.front().position));
    constexpr std::int64_t kBytes = 2 * sizeof(Bfloat16);  // K and V
    counters_.most_doubled_bytes =
        std::max(counters_.most_doubled_bytes, kBytes * doubled * model_.layers * config_.loops() * model_.heads * model_.head_dim);
  }
  const int rows = static_cast<int>(s.live.size());
  const float* logits = forward_.logits(decode_state(s), rows);  // states of a request's rows lie one after the other
  auto* device_choices = emitted_choices_.reserve<HeadChoice>(s.live.size());
  head_argmax(logits, device_choices, rows, model_.vocab, stream_);
  const std::vector<HeadChoice> choices = read(device_choices, s.live.size());
  ++counters_.host_reads;

  const TraceRequest& request = *s.request;
  SpeculationRound round{s.live.front().position, rows - 1, 0, 0};
  for (bool goes_on = true; goes_on;) {
    const auto index = static_cast<std::size_t>(round.emitted);
    const LiveRow& row = s.live[index];
    const LiveRow* child = index + 1 < s.live.size() ? &s.live[index + 1] : nullptr;
    const HeadChoice& choice = choices[index];
    const auto next = static_cast<std::size_t>(row.position + 1 - s.prompt_length);
    const std::int32_t target = request.teacher_forced() && next < request.forced.size() ? request.forced[next] : choice.token;
    const bool ends = !request.teacher_forced() && target == request.eos_token_id;
    // A logit that is not finite ends the walk, and its row's delivery reports it.
    const bool confirmed = choice.first_non_finite < 0 && child != nullptr && child->token == target;
    ++round.emitted;
    round.accepted += confirmed;
    goes_on = confirmed && !ends;
  }
  for (int i = 0; i < round.emitted; ++i) {
    LiveRow& row = s.live[static_cast<std::size_t>(i)];
    if (row.reference >= 0) references_->release(row.reference, row.key);
    row.reference = -1;
  }
  s.committed = round.position + round.emitted;
  give_up_rows(s, static_cast<std::size_t>(round.emitted));
  s.live.clear();
  flush(s, frontier_rule(s, s.committed));
  encode_pending();

  ++counters_.speculation_rounds;
  on_delivery([&s, round] { s.record.rounds.push_back(round); });
  const auto vocab = static_cast<std::size_t>(model_.vocab);
  for (int i = 0; i < round.emitted; ++i) {
    const bool wanted = options_.record.logits || options_.tap != nullptr;
    const float* row = wanted ? download(logits + static_cast<std::size_t>(i) * vocab, vocab) : nullptr;
    on_delivery([this, &s, position = round.position + i, choice = choices[static_cast<std::size_t>(i)], row] {
      for (int loop = 1; loop <= config_.loops(); ++loop) count_execution(s, position, loop);
      deliver_emission({&s, position, config_.loops()}, config_.loops(), choice, row);
    });
  }
}

// Live rows from `first` (an index) on never were: invalid in every plane, their references retired.
void CudaRun::give_up_rows(RequestState& s, std::size_t first) {
  if (first >= s.live.size()) return;
  kv_.truncate(s.slot, s.live[first].position);
  for (std::size_t i = first; i < s.live.size(); ++i) {
    const LiveRow& row = s.live[i];
    if (row.reference >= 0) references_->release(row.reference, row.key);
    counters_.rejected_rows += row.completed;
    counters_.executed_rows += row.completed;
  }
  s.live.resize(first);
}

}  // namespace loopgauge::optimized
