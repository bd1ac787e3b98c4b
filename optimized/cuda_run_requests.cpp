// SPDX-License-Identifier: Apache-2.0
// From the completed prompt to the end of a request: decode rows through their loops, commitment, what is counted, what is left behind.
#include <algorithm>
#include <limits>
#include <string>

#include "models/cut_rows.hpp"
#include "models/error.hpp"
#include "optimized/cuda_run_handoff.hpp"
#include "optimized/record_reader.hpp"

namespace loopgauge::optimized {

void CudaRun::complete_prompt(RequestState& s) {
  s.committed = s.prompt_length;
  if (options_.stage == Stage::prefill) {
    // What is handed over is what the descriptor says, whatever fault is planted; the state of the last row stays for the handoff.
    flush(s, encoded_frontier(config_, s.prompt_length, s.prompt_length));
    return;
  }
  flush(s, frontier_rule(s, s.verified()));
  pending_emissions_.push_back({&s, s.prompt_length - 1, config_.loops()});
}

void CudaRun::complete_decode_loop(RequestState& s, const Part& part) {
  const int loop = part.loop, position = s.row.position;
  record_states(s, decode_state(s), {position, position + 1}, loop);
  if (references_ && loop == 2) {
    references_->mark_source_ready(s.row.reference, s.row.key);
    references_->mark_reusable(s.row.reference, s.row.key);
    record_keys(s, position, s.row.reference);
  }
  s.row.completed = loop;
  if (references_ && loop == 3 && planted(Fault::slot_reused_early)) {
    references_->release(s.row.reference, s.row.key);
    s.row.reference_given_away = true;
  }
  take_exit(s, part);
  if (loop == s.row.last_loop) complete_row(s, loop);
}

// Rows that are given up are recorded too: whoever comes to stand at or before their position shortens the list.
void CudaRun::record_keys(RequestState& s, int position, int reference) {
  if (!options_.record.keys) return;
  const auto [masks, mass] = download_keys(reference);
  on_delivery([this, &s, position, masks, mass] { keep_keys(s, position, masks, mass); });
}

std::pair<const std::uint64_t*, const float*> CudaRun::download_keys(int reference) {
  const ReferenceView view = references_->view();
  const std::size_t first = reference_index(kv_.shape(), reference, 0, 0);
  const std::size_t heads = static_cast<std::size_t>(kv_.shape().layers) * static_cast<std::size_t>(kv_.shape().heads);
  return {download(view.selected + first * view.mask_pages, heads * view.mask_pages), download(view.mass + first, heads)};
}

void CudaRun::keep_keys(RequestState& s, int position, const std::uint64_t* masks, const float* mass) {
  if (s.finished) return;
  s.record.keys.resize(static_cast<std::size_t>(position - s.prompt_length) + 1);
  s.record.keys.back() =
      read_keys(kv_.shape(), masks, static_cast<int>(references_->view().mask_pages), mass, position, budget(config_.s().key_fraction_bp, position + 1));
}

// What the exit rule decided after a loop: read at once where the next loop depends on it, else known to the device, and to the host later.
void CudaRun::take_exit(RequestState& s, const Part& part) {
  const int loop = part.loop, position = s.row.position;
  if (!has_exit_rule()) {
    on_delivery([this, &s, position, loop] { count_execution(s, position, loop); });
    return;
  }
  const auto report = [this, &s, position, loop](const ExitState& state) {
    if (state.not_finite == loop) {
      throw NumericError(s.name() + ", position " + std::to_string(position) + ", loop " + std::to_string(loop) +
                         ": the exit gate is not finite");
    }
  };
  const float* gate = download(gates_.as<float>() + part.first_row, 1);
  const ExitState* state = download(exits_.as<ExitState>() + s.slot, 1);
  if (!asynchronous()) {
    stream_.synchronize();
    ++counters_.host_reads;
    report(*state);
    s.row.last_loop = state->last_loop;
  }
  on_delivery([this, &s, position, loop, gate, state, report] {
    const bool executed = loop <= state->last_loop;
    if (executed) count_execution(s, position, loop);
    if (!executed || s.finished) return;
    report(*state);
    tap_row("exit_gate", s, loop, -1, position, std::span<const float>(gate, 1));
  });
}

// The row has been issued through its last loop: it is absent from deeper activity maps and so inherits; the tail may flush.
void CudaRun::complete_row(RequestState& s, int loop) {
  const int position = s.row.position;
  for (int deeper = loop + 1; deeper <= config_.loops(); ++deeper) record_states(s, decode_state(s), {position, position + 1}, deeper);
  if (references_) release_reference(s);
  s.row.committed = true;
  s.committed = position + 1;
  flush(s, frontier_rule(s, s.verified()));
  const bool device_knows = asynchronous() && has_exit_rule() && !s.row.depth_given;
  pending_emissions_.push_back({&s, position, device_knows ? 0 : loop});
}

void CudaRun::release_reference(RequestState& s) {
  if (s.row.reference_given_away) return;
  if (!planted(Fault::stale_reference_slot)) return references_->release(s.row.reference, s.row.key);
  // Held until the successor has read it. A row that left before loop 2 has nothing to read.
  if (s.previous_reference) references_->release(s.previous_reference->first, s.previous_reference->second);
  s.previous_reference.emplace(s.row.reference, s.row.key);
  if (s.row.last_loop < 2) {
    references_->release(s.row.reference, s.row.key);
    s.previous_reference.reset();
  }
}

void CudaRun::count_prefill(RequestState& s, const Part& part) {
  const int window = part.window, loop = part.loop, first = part.first_rank, rows = part.rows;
  on_delivery([this, &s, window, loop, first, rows] {
    const int begin = window * config_.window();
    const std::vector<std::int32_t>& active = s.active[static_cast<std::size_t>(loop - 1)][static_cast<std::size_t>(window)];
    const bool selected = loop >= 3 && config_.selects_tokens();
    if (s.drops_results()) return;
    for (int rank = first; rank < first + rows; ++rank)
      count_execution(s, selected ? active[static_cast<std::size_t>(rank)] : begin + rank, loop);
  });
}

// When the result is read, in the order of issue: a decode row that is read after the end of the sequence was fed a token past it.
void CudaRun::count_execution(RequestState& s, int position, int loop) {
  if (s.drops_results() && !s.stopped) return;
  ++counters_.executed_rows;
  if (s.stopped && position >= s.prompt_length) {
    ++counters_.discarded_rows;
    return;
  }
  std::uint8_t& times = s.record.executions[static_cast<std::size_t>(position) * kLoops + static_cast<std::size_t>(loop - 1)];
  counters_.recomputed_rows += times != 0;
  times = static_cast<std::uint8_t>(std::min(times + 1, 255));
}

// Nothing more will run for this request: its K/V goes to the record, then its memory is free for others.
void CudaRun::finish_request(RequestState& s) {
  if (!s.snapshot.empty()) restore(s);  // its last result was read while it was preempted
  RequestRecord& record = s.record;
  const int length = s.prompt_length + record.fed;
  flush(s, frontier_rule(s, length));
  encode_pending();
  if (runs_ahead()) kv_.drop_blocks(s.slot, s.encoded);  // reserved, or sealed for rows past the end
  kv_.upload(ticket_->arena);
  if (options_.record.kv) record.kv = read_planes(kv_, s.slot, length, s.encoded, config_.loops(), allocator_, stream_);
  if (options_.record.codec) record.blocks = read_blocks(kv_, s.slot, stream_);
  std::erase_if(record.blocks, [&](const CodecBlock& block) { return block.positions.begin >= s.encoded; });  // sealed ahead
  release_storage(s);  // a row past the end of the sequence may be on its way
  s.finished = true;
}

// Everything has been read: the record is cut to what was committed. Of a cancelled request whose prompt was not complete that is nothing
// but what was decided for its windows, as far as they had come.
void CudaRun::close_record(RequestState& s) {
  RequestRecord& record = s.record;
  const int rows = static_cast<int>(record.encoded_frontier.size());  // of logits: 1 + fed, none before the prompt is complete
  // On the prefill side of a handoff the prompt's rows are all that there is, and it forms no logits.
  const bool prompt_only = options_.stage == Stage::prefill && !s.cancelled;
  const int length = rows == 0 && !prompt_only ? 0 : s.prompt_length + record.fed;
  if (prompt_only) record.tokens.clear();
  if (s.cancelled && s.request->teacher_forced()) record.tokens.resize(static_cast<std::size_t>(record.fed));
  for (std::size_t late = 2; config_.selects_tokens() && late < kLoops; ++late) {
    for (std::size_t w = 0; w < s.active[late].size(); ++w) {
      if (s.begun_loops[w] > static_cast<int>(late)) {
        record.active[late - 2].insert(record.active[late - 2].end(), s.active[late][w].begin(), s.active[late][w].end());
        continue;
      }
      const PositionRange range = window_range(static_cast<int>(w), s.prompt_length, config_.window());
      std::fill_n(record.scores[late - 2].begin() + range.begin, range.size(), std::numeric_limits<float>::quiet_NaN());
    }
  }
  for (auto& hidden : record.hidden) cut_rows(hidden, length);
  cut_rows(record.gate, length);
  record.executions.resize(static_cast<std::size_t>(s.prompt_length + record.fed) * kLoops);
  record.exit_depths.resize(record.tokens.size(), 0);
  if (options_.record.logits && rows > 0) record.logits.shape = {rows, model_.vocab};
  if (options_.record.keys) record.keys.resize(static_cast<std::size_t>(record.fed));
}

HeldResources CudaRun::held() const {
  HeldResources held;
  held.requests = kv_.live_requests();
  held.pages = static_cast<std::int64_t>(kv_.pages_in_use());
  held.blocks = static_cast<std::int64_t>(kv_.blocks_in_use());
  held.references = references_ ? references_->in_use() : 0;
  for (const RequestState& s : requests_) {
    held.snapshots += !s.snapshot.empty();
    held.published_windows += s.held_windows;
    held.hidden_windows += std::count_if(s.windows.begin(), s.windows.end(), [](const auto& window) { return window.has_value(); });
  }
  held.tickets = static_cast<std::int64_t>(in_flight_.size());
  held.transfers = (source_ ? source_->regions_held() : 0) + (target_ ? target_->regions_held() : 0);
  return held;
}

}  // namespace loopgauge::optimized
