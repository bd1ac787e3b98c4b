// SPDX-License-Identifier: Apache-2.0
// Speculation with several submissions in flight: rows are found, proposed and decided on the device (ops/speculative_rows), and the host issues
// rounds whose place it does not know. What it needs are bounds: every round that was issued and not read has committed between one row and all
// of its rows, so that pages are reserved for every position that a row may have, and blocks for every position that may be sealed. Which of these
// are sealed the device decides too.
#include <algorithm>
#include <set>
#include <string>
#include <utility>

#include "models/error.hpp"
#include "optimized/cuda_run.hpp"
#include "optimized/ops/compact_rows.cuh"
#include "optimized/ops/exit_gate.cuh"
#include "optimized/record_reader.hpp"

namespace loopgauge::optimized {

// What is given of every token that a request may feed, of all requests one after the other.
void CudaRun::prepare_speculation() {
  const auto slots = static_cast<std::size_t>(std::min(static_cast<int>(trace_.requests.size()), kMaxRequests));
  const auto rows = slots * static_cast<std::size_t>(live_rows());
  std::vector<SpeculationStep> steps;
  for (RequestState& s : requests_) {
    s.first_step = static_cast<int>(steps.size());
    for (int step = 0; step <= s.fed_limit(); ++step) {
      const auto index = static_cast<std::size_t>(step);
      const int position = s.prompt_length + step;
      SpeculationStep& next = steps.emplace_back();
      if (index < s.request->forced.size()) next.forced = s.request->forced[index];
      if (index < s.request->draft_tokens.size()) next.draft = s.request->draft_tokens[index];
      next.draw = uniform(s, position, SamplingPurpose::target);
      next.draw_of_draft = uniform(s, position, SamplingPurpose::draft);
      next.acceptance = uniform(s, position, SamplingPurpose::acceptance);
      next.residual = uniform(s, position, SamplingPurpose::residual);
    }
  }
  speculation_states_ = allocator_.allocate_array<SpeculationState>(MemoryCategory::workspace, slots);
  live_tokens_ = allocator_.allocate_array<std::int32_t>(MemoryCategory::workspace, rows);
  live_references_ = allocator_.allocate_array<std::int32_t>(MemoryCategory::workspace, rows);
  speculation_steps_ = allocator_.allocate_array<SpeculationStep>(MemoryCategory::workspace, steps.size());
  copy_to_device<SpeculationStep>(speculation_steps_.as<SpeculationStep>(), steps, ticket_->arena, stream_);

  const auto& q = config_.q();
  speculation_.states = speculation_states_.as<SpeculationState>();
  speculation_.tokens = live_tokens_.as<std::int32_t>();
  speculation_.references = references_ ? live_references_.as<std::int32_t>() : nullptr;
  speculation_.steps = speculation_steps_.as<SpeculationStep>();
  speculation_.draft_distributions = draft_distributions_ ? draft_distributions_.as<float>() : nullptr;
  speculation_.live_rows = live_rows();
  speculation_.draft_depth = options_.speculation.draft_depth;
  speculation_.pipeline = options_.speculation.kind == SpeculationKind::pipeline;
  speculation_.tail = q.enabled && q.policy != EncodingPolicy::fixed_prompt ? q.tail : -1;
  speculation_.serial_aligned = q.timing == EncodingTiming::serial_aligned;
  speculation_.eager = seals_unverified();
  speculation_.vocab = model_.vocab;
}

// The prompts whose logits have chosen speculate from there.
void CudaRun::start_speculating(const std::vector<Emission>& emissions, const HeadChoice* choices) {
  std::vector<std::int32_t> slots;
  std::vector<SpeculationState> states;
  for (const Emission& emission : emissions) {
    RequestState& s = *emission.request;
    // What the rows of the first round see encoded are positions of the prompt: the tail is as long as they are.
    if (speculation_.tail >= 0 && speculation_.serial_aligned != 0) seal_ahead(s, frontier_rule(s, s.prompt_length + live_rows() - 1));
    SpeculationState& state = states.emplace_back();
    state.sealed = std::max(s.encoded, s.encoded_ahead);
    state.prompt_length = s.prompt_length;
    state.capacity = s.capacity;
    state.first_step = s.first_step;
    state.forced = s.request->teacher_forced();
    state.end_token = s.request->teacher_forced() ? -1 : s.request->eos_token_id;
    state.frontier_of_prompt = frontier_rule(s, s.prompt_length);
    state.temperature = s.request->temperature;
    slots.push_back(s.slot);
  }
  encode_pending();
  start_speculation(speculation_, started_slots_.upload<std::int32_t>(slots, ticket_->arena, stream_),
                    started_states_.upload<SpeculationState>(states, ticket_->arena, stream_), choices, static_cast<int>(slots.size()), stream_);
}

// False for rows that the host knows not to exist. Of others only the device may know.
bool CudaRun::may_be_speculative_work(const RequestState& s, const WorkItem& item) const {
  if (s.finished || s.stopped) return false;
  if (s.slot < 0 || s.committed == 0) throw InternalError(s.name() + ": speculation before the prompt is complete");
  if (s.settled && (s.settled->ended != 0 || s.settled->committed >= s.capacity)) return false;
  if (s.committed + s.unread_rounds >= s.capacity && options_.speculation.kind == SpeculationKind::block) return false;
  const int rows = static_cast<int>(s.live.size()) + (item.loop_first == 1);  // a row begins with its draft
  if (item.kind == RowKind::draft) return item.begin < rows;
  return item.kind == RowKind::stage || !s.live.empty();
}

// Positions that row `index` of the round, or any token of the pipeline, may have; empty where there is none.
PositionRange CudaRun::possible_positions(const RequestState& s, int index) const {
  const bool block = options_.speculation.kind == SpeculationKind::block;
  const int first = s.committed + (block ? s.unread_rounds + index : 0);
  const int last = s.committed + s.unread_rounds * (block ? live_rows() : 1) + (block ? index : live_rows() - 1);
  return {std::min(first, s.capacity), std::min(last + 1, s.capacity)};
}

// One slot for each row that may be on its way: which of them a row takes follows from its place.
void CudaRun::hold_references(RequestState& s) {
  std::vector<std::int32_t> slots;
  for (int place = 0; place < live_rows(); ++place) {
    const ReferenceStore::Key key{s.generation, s.incarnations++};
    const int slot = references_->acquire(key);
    references_->mark_source_ready(slot, key);
    references_->mark_reusable(slot, key);
    s.live_references.emplace_back(slot, key);
    slots.push_back(slot);
  }
  copy_to_device<std::int32_t>(speculation_.references + s.slot * live_rows(), slots, ticket_->arena, stream_);
}

// Blocks that the request may have due are made and their encoding is issued; the device carries out what is due (admit_blocks). The round of
// `rows` rows is not counted as unread yet.
void CudaRun::seal_if_due(RequestState& s, int rows, RoundOutcome* outcome) {
  if (speculation_.tail < 0) return;
  const int decided = options_.speculation.kind == SpeculationKind::block ? live_rows() : 1;
  const int longest = std::min(s.capacity, s.committed + (s.unread_rounds + 1) * decided);
  const int ahead = speculation_.serial_aligned != 0 ? live_rows() - 1 : 0;
  std::vector<EncodeTask> blocks;
  for (const PositionRange& block : block_cuts(config_, s.prompt_length, std::max(s.encoded, s.encoded_ahead), frontier_rule(s, longest + ahead))) {
    blocks.push_back(kv_.prepare_encode(s.slot, block, 1, config_.loops(), largest_streams(s, block), false));
  }
  if (blocks.empty() && speculation_.eager == 0) return;
  kv_.upload(ticket_->arena);
  auto* tasks = due_blocks_.upload<EncodeTask>(blocks, ticket_->arena, stream_);
  auto* again = speculation_.eager != 0 ? due_again_.reserve<EncodeTask>(1) : nullptr;
  admit_blocks(speculation_, s.slot, rows, tasks, static_cast<int>(blocks.size()), again, outcome, stream_);
  launch_encoding(tasks, blocks.size());
  if (again != nullptr) residual_encode_again(encoding_of(again, 1), stream_);
}

void CudaRun::speculate_ahead(const std::vector<WorkItem>& items) {
  std::vector<const WorkItem*> work;
  for (const WorkItem& item : items) {
    if (may_be_speculative_work(requests_.at(static_cast<std::size_t>(item.request)), item)) work.push_back(&item);
  }
  if (work.empty()) return;
  const auto state_of = [this](const WorkItem* item) -> RequestState& { return requests_[static_cast<std::size_t>(item->request)]; };
  const Speculation& speculation = options_.speculation;
  if (work.size() == 1 && work.front()->kind == RowKind::draft) {
    WorkItem row = *work.front();
    RequestState& s = state_of(&row);
    for (int j = row.begin, last = row.end; j < last; ++j) {
      row.begin = j, row.end = j + 1;
      for (int loop = row.loop_first; loop <= row.loop_last; ++loop) advance_ahead(ahead_parts(s, row, loop));
      if (row.loop_last == speculation.draft_depth && j < speculation.draft_length) propose_ahead(s, j);
    }
    return;
  }
  const int steps = work.size() == 1 ? work.front()->loop_last - work.front()->loop_first + 1 : 1;
  for (int step = 0; step < steps; ++step) {
    std::vector<Part> parts;
    for (const WorkItem* item : work) {
      const std::vector<Part> rows = ahead_parts(state_of(item), *item, item->loop_first + step);
      parts.insert(parts.end(), rows.begin(), rows.end());
    }
    advance_ahead(std::move(parts));
  }
  std::set<int> decided, proposing;
  for (const WorkItem* item : work) {
    const bool complete = item->loop_last == config_.loops(), drafted = item->loop_last == speculation.draft_depth;
    if (item->kind == RowKind::draft && drafted && item->begin < speculation.draft_length) propose_ahead(state_of(item), item->begin);
    if (item->kind == RowKind::verify && complete) decide_ahead(state_of(item));
    if (item->kind == RowKind::stage && complete) decided.insert(item->request);
    if (item->kind == RowKind::stage && drafted) proposing.insert(item->request);
  }
  for (const int index : decided) decide_ahead(requests_[static_cast<std::size_t>(index)]);
  for (const int index : proposing) propose_ahead(requests_[static_cast<std::size_t>(index)], 0);
}

// The rows of the item that may exist: of a draft one, of a verification all that were drafted, of a stage its token.
std::vector<CudaRun::Part> CudaRun::ahead_parts(RequestState& s, const WorkItem& item, int loop) {
  const bool block = item.kind != RowKind::stage;
  const int begin = item.kind == RowKind::draft ? item.begin : 0, end = item.kind == RowKind::verify ? static_cast<int>(s.live.size()) : begin + 1;
  std::vector<Part> parts;
  for (int index = begin; index < end; ++index) {
    const PositionRange positions = possible_positions(s, index);
    if (positions.begin >= positions.end) break;  // beyond the last position of the request
    if (block) {
      if (loop == 1 && index == static_cast<int>(s.live.size())) s.live.emplace_back();
      LiveRow& row = s.live.at(static_cast<std::size_t>(index));
      if (row.completed != loop - 1) throw InternalError(s.name() + ": row " + std::to_string(index) + " of a round, loop " + std::to_string(loop) + " out of turn");
    }
    if (references_ && loop == 2 && s.live_references.empty()) hold_references(s);
    Part part{&s, RowKind::decode, positions, loop};
    part.live = index;
    parts.push_back(part);
  }
  return parts;
}

// What makes a row of it is on the device; the host brings bounds.
void CudaRun::add_ahead_row(RowBatch& batch, const Part& part) {
  const RequestState& s = *part.request;
  RowSource row;
  row.request = s.slot;
  row.position = part.piece.end - 1;  // at most
  row.loop = part.loop;
  row.live = part.live;
  const StepKeys* keys = nullptr;
  // Recorded decisions go by position, so that a run which is to repeat them waits for it.
  if (const RequestRecord* forced = decisions(s); forced != nullptr && references_ && part.loop >= 2) {
    const SpeculationState state = read(speculation_.states + s.slot, 1).front();
    ++counters_.host_reads;
    const LivePlace found = live_place(speculation_, state, part.live, part.loop - 1);
    const auto step = static_cast<std::size_t>(found.position - s.prompt_length);
    if (found.exists != 0 && step < forced->keys.size() && !forced->keys[step].layers.empty()) {
      keys = &forced->keys[step];
      row.reference = s.live_references[static_cast<std::size_t>(found.place)].first;
    }
  }
  batch.rows.push_back(row);
  ++batch.decode_rows;
  batch.forced_keys.push_back(keys);
}

void CudaRun::advance_ahead(std::vector<Part> parts) {
  if (parts.empty()) return;
  const auto rows = std::ssize(parts);
  const auto drafts = std::count_if(parts.begin(), parts.end(), [this](const Part& part) { return part.loop <= options_.speculation.draft_depth; });
  begin_span();
  run_step(parts);
  const double share = static_cast<double>(drafts) / static_cast<double>(rows);
  end_span(share, 1 - share, 0);

  const QueryRow* found = download(forward_.rows(), static_cast<std::size_t>(rows));
  std::map<RequestState*, unsigned> stages;
  for (const Part& part : parts) {
    record_ahead(part, found + part.first_row);
    if (options_.speculation.kind == SpeculationKind::pipeline) {
      stages[part.request] |= 1u << (part.loop - 1);
    } else {
      part.request->live.at(static_cast<std::size_t>(part.live)).completed = part.loop;
    }
  }
  for (const auto& [s, loops] : stages) advance_stages(speculation_, s->slot, loops, stream_);
}

// What the record keeps of a row, if it turns out to exist; `found` is there from delivery on.
void CudaRun::record_ahead(const Part& part, const QueryRow* found) {
  RequestState& s = *part.request;
  const int loop = part.loop;
  on_delivery([this, found, drafting = loop <= options_.speculation.draft_depth] {
    if (found->request >= 0) ++(drafting ? counters_.draft_rows : counters_.verify_rows);
  });
  const auto hidden = static_cast<std::size_t>(model_.hidden);
  const Bfloat16* output = forward_.output() + static_cast<std::size_t>(part.first_row) * hidden;
  if (options_.record.hidden) {
    on_delivery([&s, found, loop, row = download(output, hidden), hidden] {
      if (found->request < 0 || s.drops_results()) return;
      widen_row(std::span(row, hidden), s.record.hidden[static_cast<std::size_t>(loop - 1)].row(found->position).data());
    });
  }
  if (options_.record.gate) {
    float* gate = state_gates_.reserve<float>(static_cast<std::size_t>(config_.window()));
    exit_gate(output, weights_.early_exit_gate.as<Bfloat16>(), weights_.early_exit_bias.as<Bfloat16>(), gate, 1, model_.hidden, stream_);
    on_delivery([&s, found, loop, value = download(gate, 1)] {
      if (found->request >= 0 && !s.drops_results()) s.record.gate.row(found->position)[static_cast<std::size_t>(loop - 1)] = *value;
    });
  }
  if (!references_ || loop != 2 || !options_.record.keys) return;
  // Which slot a token of a pipeline has follows from its position.
  for (std::size_t place = 0; place < s.live_references.size(); ++place) {
    const int slot = s.live_references[place].first;
    if (options_.speculation.kind == SpeculationKind::block && static_cast<int>(place) != part.live) continue;
    const auto [masks, mass] = download_keys(slot);
    on_delivery([this, &s, found, slot, masks, mass] {
      if (found->request >= 0 && found->reference == slot) keep_keys(s, found->position, masks, mass);
    });
  }
}

// The states of rows that the device finds, one after the other; what is no row is zero.
const float* CudaRun::logits_ahead(int count) {
  const auto bytes = static_cast<std::size_t>(count) * static_cast<std::size_t>(model_.hidden) * sizeof(Bfloat16);
  Bfloat16* states = emitted_states_.reserve<Bfloat16>(static_cast<std::size_t>(count) * static_cast<std::size_t>(model_.hidden));
  LOOPGAUGE_CUDA_CHECK(cudaMemsetAsync(states, 0, bytes, stream_));
  gather_rows(decode_states_.as<Bfloat16>(), live_indices_.as<std::int32_t>(), states, count, model_.hidden, stream_);
  return forward_.logits(states, count);
}

// The candidate after row `index` of a round, or after the token of a pipeline that has left the draft (S-SPEC-1, S-SPEC-10).
void CudaRun::propose_ahead(RequestState& s, int index) {
  begin_span();
  auto* draws = token_draws_.reserve<TokenDraw>(1);
  find_drafting_row(speculation_, s.slot, index, live_indices_.reserve<std::int32_t>(1), draws, stream_);
  const float* logits = logits_ahead(1);
  auto* choice = emitted_choices_.reserve<HeadChoice>(1);
  head_argmax(logits, choice, 1, model_.vocab, stream_);
  if (s.request->temperature != 0.0f) draw_tokens(logits, draws, choice, nullptr, 1, model_.vocab, stream_);
  auto* outcome = draft_outcomes_.reserve<DraftOutcome>(1);
  propose_token(speculation_, s.slot, index, choice, outcome, stream_);
  on_delivery([&s, drafted = download(outcome, 1)] {
    if (drafted->position < 0 || drafted->first_non_finite < 0 || s.finished) return;
    throw NumericError(s.name() + ", position " + std::to_string(drafted->position) + ": draft logit of token " + std::to_string(drafted->first_non_finite) +
                       " is not finite");
  });
  end_span(1, 0, 0);
}

// The rows of the round, or the oldest token of the pipeline if it has all its loops.
void CudaRun::decide_ahead(RequestState& s) {
  begin_span();
  const bool block = options_.speculation.kind == SpeculationKind::block;
  const auto vocab = static_cast<std::size_t>(model_.vocab);
  const int count = block ? static_cast<int>(s.live.size()) : 1;
  if (speculation_.eager != 0) seal_if_due(s, count, nullptr);
  const auto rows = static_cast<std::size_t>(count);
  const bool sampling = samples(s);
  float* scratch = sampling ? distributions_.reserve<float>(rows * vocab) : nullptr;
  auto* draws = token_draws_.reserve<TokenDraw>(rows);
  find_decided_rows(speculation_, s.slot, count, scratch, live_indices_.reserve<std::int32_t>(rows), draws, stream_);
  const float* logits = logits_ahead(count);
  auto* choices = emitted_choices_.reserve<HeadChoice>(rows);
  head_argmax(logits, choices, count, model_.vocab, stream_);
  std::int32_t* confirmed = sampling ? confirmed_.reserve<std::int32_t>(rows) : nullptr;
  if (sampling) draw_tokens(logits, draws, choices, confirmed, count, model_.vocab, stream_);
  auto* outcome = round_outcomes_.reserve<RoundOutcome>(1);
  decide_rows(speculation_, kv_.view(), s.slot, count, choices, confirmed, outcome, stream_);
  if (speculation_.eager == 0) seal_if_due(s, count, outcome);

  DecidedRound round;
  round.outcome = download(outcome, 1);
  round.choices = download(choices, rows);
  round.logits = options_.record.logits || options_.tap != nullptr ? download(logits, rows * vocab) : nullptr;
  ++s.unread_rounds;
  s.live.clear();
  on_delivery([this, &s, round] { deliver_round(s, round); });
  end_span(0, 0, 1);
}

// Rounds are read in their order, so that this one begins where the record ends.
void CudaRun::deliver_round(RequestState& s, const DecidedRound& decided) {
  --s.unread_rounds;
  const RoundOutcome& outcome = *decided.outcome;
  if (outcome.rows == 0) return;
  if (!s.finished && outcome.position != s.prompt_length + s.record.fed) {
    throw InternalError(s.name() + ": a round at position " + std::to_string(outcome.position) + " follows " + std::to_string(s.record.fed) + " fed tokens");
  }
  ++counters_.speculation_rounds;
  counters_.rejected_rows += outcome.rejected;
  counters_.executed_rows += outcome.rejected;
  counters_.rewritten_rows += outcome.rewritten;
  count_doubled_bytes(outcome.seen - frontier_rule(s, outcome.position));
  const PositionRange rows{outcome.position, outcome.position + outcome.emitted};
  if (!s.finished) {
    s.record.rounds.push_back({outcome.position, outcome.rows - 1, outcome.accepted, outcome.emitted});
    if (s.slot >= 0) {
      for (int loop = 1; loop <= config_.loops(); ++loop) kv_.note_active(s.slot, loop, rows);
      s.committed = rows.end;
      s.encoded_ahead = std::max(s.encoded_ahead, outcome.sealed);
      flush(s, frontier_rule(s, s.committed));
      encode_pending();
    }
  }
  for (int position = rows.begin; position < rows.end; ++position) {
    const auto row = static_cast<std::size_t>(position - rows.begin);
    for (int loop = 1; loop <= config_.loops(); ++loop) count_execution(s, position, loop);
    deliver_emission({&s, position, config_.loops()}, config_.loops(), decided.choices[row],
                     decided.logits == nullptr ? nullptr : decided.logits + row * static_cast<std::size_t>(model_.vocab));
  }
}

// What the device has decided of the requests that are open. Everything that was issued has run, and the host's copy of the maps has rows that
// may be given up later, by the device.
void CudaRun::read_speculation() {
  for (RequestState& s : requests_) {
    s.settled.reset();
    if (s.slot < 0 || s.committed == 0) continue;
    s.settled = read(speculation_.states + s.slot, 1).front();
    kv_.forget_noted(s.slot, s.settled->committed);
  }
}

// Rows on their way never were, and blocks that nothing was sealed in are not kept for them. Without a settled state nothing of the request is on
// its way any more: it has ended.
void CudaRun::give_up_ahead(RequestState& s) {
  if (s.settled && s.slot >= 0) {
    SpeculationState& state = *s.settled;
    int rejected = 0;
    for (std::size_t i = 0; i < s.live.size(); ++i) {
      if (state.ended == 0 && state.committed + static_cast<int>(i) < s.capacity) rejected += s.live[i].completed;
    }
    for (int loop = 0; loop <= kLoops; ++loop) {
      if (state.at_loop[loop] >= 0) rejected += loop;
      state.at_loop[loop] = -1;
    }
    counters_.rejected_rows += rejected;
    counters_.executed_rows += rejected;
    kv_.drop_blocks(s.slot, state.sealed);
    s.encoded_ahead = state.sealed;
    kv_.truncate(s.slot, state.committed, keeps_sealed_candidates() ? KvCache::Sealed::kept : KvCache::Sealed::refused);
    copy_to_device<SpeculationState>(speculation_.states + s.slot, std::span<const SpeculationState>(&state, 1), ticket_->arena, stream_);
  }
  s.live.clear();
  for (const auto& [slot, key] : std::exchange(s.live_references, {})) references_->release(slot, key);
}

}  // namespace loopgauge::optimized
