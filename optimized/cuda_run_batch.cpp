// SPDX-License-Identifier: Apache-2.0
// From the items of a submission to batches of rows, and through one loop of the model.
#include <algorithm>
#include <string>
#include <utility>

#include "models/error.hpp"
#include "optimized/cuda_run.hpp"
#include "optimized/ops/compact_rows.cuh"
#include "optimized/ops/embedding.cuh"
#include "optimized/ops/exit_gate.cuh"
#include "optimized/ops/exit_step.cuh"

namespace loopgauge::optimized {

// Nothing for a request that has ended: planned, never run.
std::optional<CudaRun::Part> CudaRun::prefill_part(RequestState& s, int window, PositionRange piece, int loop) {
  if (s.finished) return std::nullopt;
  open(s);
  const PositionRange range = window_range(window, s.prompt_length, config_.window());
  if (piece.begin == range.begin) begin_window_loop(s, window, loop);
  // Where the rows of a selection lie is not known here, so a piece takes its share of them by rank: of a loop that all rows execute,
  // exactly its positions. The order of rows is the same, and so are their results.
  const int rows = window_rows(s, window, loop);
  const auto share = [&](int position) {
    return static_cast<int>(static_cast<std::int64_t>(position - range.begin) * rows / range.size());
  };
  Part part{&s, RowKind::prefill, piece, loop, window};
  part.first_rank = share(piece.begin);
  part.rows = share(piece.end) - part.first_rank;
  return part;
}

// Nothing for a row past the end of the sequence, or after the row's last loop.
std::optional<CudaRun::Part> CudaRun::decode_part(RequestState& s, int position, int loop) {
  const int step = position - s.prompt_length;
  if (s.finished || s.stopped || step >= s.fed_limit()) return std::nullopt;
  if (loop == 1) {
    // What the row must see encoded is encoded before it runs. Below that frontier everything is verified: the tail is longer than what is in
    // flight (check_in_flight).
    flush(s, frontier_rule(s, config_.q().timing == EncodingTiming::serial_aligned ? position : s.verified()));
    s.row = DecodeRow{};
    s.row.position = position;
    s.row.key = {s.generation, s.incarnations++};
    s.row.last_loop = config_.loops();
    const auto index = static_cast<std::size_t>(step);
    if (config_.exit().mode == ExitMode::trace) s.row.last_loop = s.request->exit_depths.at(index);
    if (const RequestRecord* forced = decisions(s);
        has_exit_rule() && forced != nullptr && index < forced->exit_depths.size() && forced->exit_depths[index] != 0) {
      s.row.last_loop = forced->exit_depths[index];
      s.row.depth_given = true;
    }
    if (references_) s.row.reference = references_->acquire(s.row.key);
  }
  if (s.row.position != position) throw InternalError(s.name() + ": decode item at position " + std::to_string(position) + " out of turn");
  if (s.row.committed) return std::nullopt;
  if (references_ && loop == 2 && planted(Fault::slot_reused_early)) {  // takes whatever has been given away meanwhile
    references_->release(s.row.reference, s.row.key);
    s.row.reference = references_->acquire(s.row.key);
  }
  if (references_ && loop >= 3 && !s.row.reference_given_away) references_->require_reusable(s.row.reference, s.row.key);
  return Part{&s, RowKind::decode, {position, position + 1}, loop};
}

void CudaRun::run_step(std::vector<Part>& parts) {
  encode_pending();
  if (parts.empty()) return;
  RowBatch batch = make_batch(parts);
  if (batch.size() > 0) run_batch(parts, batch);
  if (std::exchange(failure_, PlannedFailure::none) != PlannedFailure::none) throw PlannedFailureHappened{};  // also of pieces without a row
  for (const Part& part : parts) {
    if (part.kind == RowKind::prefill) part.request->begun_loops[static_cast<std::size_t>(part.window)] = part.loop;
  }
  for (const Part& part : parts) {
    RequestState& s = *part.request;
    if (part.kind == RowKind::decode) {
      if (part.live < 0) complete_decode_loop(s, part);
      if (part.live >= 0 && !runs_ahead()) complete_live_loop(s, part);
      continue;
    }
    count_prefill(s, part);
    if (part.piece.end == window_range(part.window, s.prompt_length, config_.window()).end) complete_window_loop(s, part.window, part.loop);
  }
  encode_pending();
  emit_pending();
}

RowBatch CudaRun::make_batch(std::vector<Part>& parts) {
  // Decode rows first, then prefill rows, each in the order of the items.
  std::stable_partition(parts.begin(), parts.end(), [](const Part& part) { return part.kind == RowKind::decode; });
  if (failure_ == PlannedFailure::allocation) {
    failure_ = PlannedFailure::none;
    kv_.refuse_next_reservation();
  }
  RowBatch batch;
  std::vector<PageReservation> reservations;
  std::vector<std::vector<std::int32_t>> pages;  // one position of every page, until reserved
  for (Part& part : parts) {
    RequestState& s = *part.request;
    part.first_row = batch.size();
    if (part.rows == 0) continue;
    // A selection may find rows on any page of its window; pages without rows go back when it has been read.
    const bool selected = part.kind == RowKind::prefill && part.loop >= 3 && config_.selects_tokens();
    const PositionRange range = selected ? window_range(part.window, s.prompt_length, config_.window()) : part.piece;
    std::vector<std::int32_t>& first_rows = pages.emplace_back();
    for (int page = range.begin / kPageTokens; page < page_count(range.end); ++page)
      first_rows.push_back(std::max(page * kPageTokens, range.begin));
    reservations.push_back({s.slot, part.loop, {}});
    add_rows(batch, part);
  }
  for (std::size_t i = 0; i < pages.size(); ++i) reservations[i].positions = pages[i];
  kv_.reserve(reservations);
  return batch;
}

void CudaRun::add_rows(RowBatch& batch, const Part& part) {
  if (part.live >= 0 && runs_ahead()) return add_ahead_row(batch, part);
  RequestState& s = *part.request;
  RowSource row;
  row.request = s.slot;
  row.loop = part.loop;
  row.encoded_frontier = visible_frontier(s, part.piece.begin, part.kind);
  if (part.kind == RowKind::decode) {
    const int position = part.piece.begin, step = position - s.prompt_length;
    row.position = position;
    row.reference = reference_of(part);
    int state = 0;
    if (part.live >= 0) {
      const LiveRow& live = s.live[static_cast<std::size_t>(part.live)];
      row.token = live.token;
      state = live.state;
      row.unwritten = part.loop == 3 && s.stale_rows.contains(position);
    } else if (s.request->teacher_forced()) {
      row.token = s.request->forced[static_cast<std::size_t>(step)];
    }
    row.origin = position - (s.slot * live_rows() + state);
    row.last_loop = part.live < 0 ? s.row.last_loop : config_.loops();
    row.gate_decides = part.live < 0 && has_exit_rule() && !s.row.depth_given;
    batch.rows.push_back(row);
    ++batch.decode_rows;
    // Whether a delayed exit lets the row run this loop may not be known yet; the device knows.
    if (!asynchronous() || !row.gate_decides || part.loop <= 2)
      kv_.note_active(s.slot, part.loop, std::span<const std::int32_t>(&position, 1));
    // A step without recorded keys (the recorded run stopped or left before loop 2) selects for itself.
    const RequestRecord* forced = decisions(s);
    const auto index = static_cast<std::size_t>(step);
    const bool has_keys = forced != nullptr && index < forced->keys.size() && !forced->keys[index].layers.empty();
    batch.forced_keys.push_back(has_keys ? &forced->keys[index] : nullptr);
    return;
  }
  const PositionRange range = window_range(part.window, s.prompt_length, config_.window());
  row.origin = range.begin;
  row.positions = window_positions(s, part.window, part.loop);
  for (int rank = part.first_rank; rank < part.first_rank + part.rows; ++rank) {
    row.position = rank;
    if (part.loop == 1) row.token = s.request->prompt[static_cast<std::size_t>(range.begin + rank)];
    batch.rows.push_back(row);
  }
  if (part.loop <= 2 || !config_.selects_tokens()) kv_.note_active(s.slot, part.loop, part.piece);
  // Rows of successive windows are rows in ascending order: one segment, so that tiles of attention are full where windows have few rows.
  PrefillSegment* before = batch.segments.empty() ? nullptr : &batch.segments.back();
  if (before != nullptr && before->request == s.slot && before->loop == part.loop && before->encoded_frontier == row.encoded_frontier) {
    before->row_count += part.rows;
  } else {
    batch.segments.push_back({s.slot, part.loop, row.encoded_frontier, part.first_row, part.rows});
  }
  batch.take_scores |= config_.selects_tokens() && (part.loop == 2 || part.loop == 3);
}

// Of a part of decode rows at its loop. The planted fault: whoever comes to stand at a position reads what an earlier incarnation left there.
int CudaRun::reference_of(const Part& part) const {
  const RequestState& s = *part.request;
  if (part.live < 0) return reference_slot(s, part.loop);
  const auto stale = part.loop >= 3 ? s.stale_references.find(part.piece.begin) : s.stale_references.end();
  return stale != s.stale_references.end() ? stale->second.first : s.live.at(static_cast<std::size_t>(part.live)).reference;
}

// The planted fault: loops after the reference loop read what the token before left. Its slot has no mask of a page that it does not reach.
int CudaRun::reference_slot(const RequestState& s, int loop) const {
  const bool stale = loop >= 3 && s.previous_reference && s.row.position % kPageTokens != 0;
  return stale ? s.previous_reference->first : s.row.reference;
}

bool CudaRun::can_replay(const RowBatch& batch) const {
  const bool forced = std::any_of(batch.forced_keys.begin(), batch.forced_keys.end(), [](const StepKeys* keys) { return keys != nullptr; });
  return batch.segments.empty() && options_.tap == nullptr && !forced && failure_ == PlannedFailure::none;
}

void CudaRun::run_batch(const std::vector<Part>& parts, RowBatch& batch) {
  const bool replay = graphs_ && batch.decode_rows > 0 && can_replay(batch);
  if (replay) {
    // Rows up to the bucket are padding: they read nothing, write nothing and appear in no result.
    int longest = 0;
    for (const RowSource& row : batch.rows) longest = std::max(longest, row.position + 1);
    batch.decode_length = std::min(StepGraphs::bucket(longest, kSplitTokens), longest_);
    batch.rows.resize(static_cast<std::size_t>(StepGraphs::bucket(batch.size(), 1)));
    batch.decode_rows = batch.size();
    batch.forced_keys.resize(batch.rows.size(), nullptr);
  }
  if (failure_ == PlannedFailure::launch) batch.layers = model_.layers / 2;
  kv_.upload(ticket_->arena);
  forward_.input(batch.size());
  forward_.stage(batch, ticket_->arena);
  if (replay) {
    const StepGraphs::Key key{batch.size(), forward_.decode_length(), forward_.kinds()};
    const auto outcome = graphs_->run(key, forward_.address_version(), stream_, [&] { enqueue_batch(parts, batch); });
    counters_.graph_captures += outcome == StepGraphs::Outcome::captured_and_replayed;
    ++(outcome == StepGraphs::Outcome::ran_eagerly ? counters_.graph_fallbacks : counters_.graph_replays);
    return;
  }
  if (graphs_ && batch.decode_rows > 0) ++counters_.graph_fallbacks;
  enqueue_batch(parts, batch);
}

// What a captured step repeats when it holds decode rows alone: nothing here depends on the host but the extents of the batch.
void CudaRun::enqueue_batch(const std::vector<Part>& parts, const RowBatch& batch) {
  Bfloat16* const rows = forward_.input(batch.size());
  forward_.prepare(batch, kv_, exits_.as<ExitState>(), chosen_tokens_.as<std::int32_t>(), speculation_);
  load_inputs(parts, batch.decode_rows, rows);
  std::unique_ptr<RowObserver> observer;
  if (options_.tap != nullptr) {
    observer = make_tap_observer(parts, batch.size());
    if (std::any_of(parts.begin(), parts.end(), [](const Part& part) { return part.loop == 1; }))
      observer->observe("embedding", -1, rows, model_.hidden, model_.hidden);
  }
  forward_.run(batch, kv_, references_ ? &*references_ : nullptr, numeric_fault_.as<std::uint64_t>(), observer.get());
  if (batch.layers >= 0) return;
  store_outputs(parts, batch.decode_rows);
  step_exits(batch.decode_rows);
}

void CudaRun::load_inputs(const std::vector<Part>& parts, int decode_rows, Bfloat16* rows) {
  const Bfloat16* table = weights_.embed_tokens.as<Bfloat16>();
  const auto live = std::count_if(parts.begin(), parts.end(), [](const Part& part) { return part.kind == RowKind::decode; });
  if (poison_ && live < decode_rows) {
    // Padding that reached a result would show.
    const auto row_bytes = static_cast<std::size_t>(model_.hidden) * sizeof(Bfloat16);
    LOOPGAUGE_CUDA_CHECK(
        cudaMemsetAsync(rows + live * model_.hidden, 0xFF, static_cast<std::size_t>(decode_rows - live) * row_bytes, stream_));
  }
  // Decode rows may be at any loop: each of the two leaves the rows of the other alone.
  embedding(forward_.tokens(), table, rows, decode_rows, model_.hidden, stream_);
  gather_rows(decode_states_.as<Bfloat16>(), forward_.sources_of_states(), rows, decode_rows, model_.hidden, stream_);
  for (const Part& part : parts) {
    if (part.kind == RowKind::decode) continue;
    Bfloat16* target = rows + static_cast<std::size_t>(part.first_row) * model_.hidden;
    if (part.loop == 1) {
      embedding(forward_.tokens() + part.first_row, table, target, part.rows, model_.hidden, stream_);
    } else {
      gather_rows(part.request->windows[static_cast<std::size_t>(part.window)]->states.as<Bfloat16>(),
                  forward_.sources_of_states() + part.first_row, target, part.rows, model_.hidden, stream_);
    }
  }
}

// Scatters H[r] to the requests' states.
void CudaRun::store_outputs(const std::vector<Part>& parts, int decode_rows) {
  scatter_rows(forward_.output(), forward_.targets_of_states(), decode_states_.as<Bfloat16>(), decode_rows, model_.hidden, stream_);
  for (const Part& part : parts) {
    if (part.kind == RowKind::decode || part.rows == 0) continue;
    WindowState& window = *part.request->windows[static_cast<std::size_t>(part.window)];
    scatter_rows(forward_.output() + static_cast<std::size_t>(part.first_row) * model_.hidden,
                 forward_.targets_of_states() + part.first_row, window.states.as<Bfloat16>(), part.rows, model_.hidden, stream_);
    if (config_.selects_tokens() && (part.loop == 2 || part.loop == 3)) {
      const auto next = static_cast<std::size_t>(part.loop - 2);
      float* target = window.scores.as<float>() + next * static_cast<std::size_t>(config_.window()) + window.scored[next];
      LOOPGAUGE_CUDA_CHECK(cudaMemcpyAsync(target, forward_.scores() + part.first_row, static_cast<std::size_t>(part.rows) * sizeof(float),
                                           cudaMemcpyDeviceToDevice, stream_));
      window.scored[next] += part.rows;
    }
  }
}

// The exit rule's verdict after a loop, for every decode row of the batch.
void CudaRun::step_exits(int decode_rows) {
  if (!has_exit_rule() || decode_rows == 0) return;
  const ExitRule& rule = config_.exit();
  exit_gate(forward_.output(), weights_.early_exit_gate.as<Bfloat16>(), weights_.early_exit_bias.as<Bfloat16>(), gates_.as<float>(),
            decode_rows, model_.hidden, stream_);
  exit_step(gates_.as<float>(), forward_.rows(), exits_.as<ExitState>(), decode_rows, rule.threshold, rule.min_loops,
            rule.mode == ExitMode::delayed ? 1 : 0, stream_);
}

}  // namespace loopgauge::optimized
