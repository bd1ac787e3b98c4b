// SPDX-License-Identifier: Apache-2.0
#include "optimized/cuda_run.hpp"

#include <algorithm>
#include <string>

#include "models/error.hpp"
#include "optimized/ops/compact_rows.cuh"
#include "optimized/ops/embedding.cuh"

namespace loopgauge::optimized {
namespace {

void copy_on_device(void* target, const void* source, std::size_t bytes, cudaStream_t stream) {
  if (bytes != 0) LOOPGAUGE_CUDA_CHECK(cudaMemcpyAsync(target, source, bytes, cudaMemcpyDeviceToDevice, stream));
}

}  // namespace

std::optional<CudaRun::Part> CudaRun::prefill_part(RequestState& s, int window, PositionRange piece, int loop) {
  open(s);
  const PositionRange range = window_range(window, s.prompt_length, config_.window());
  if (piece.begin == range.begin) begin_window_loop(s, window, loop);
  Part part{&s, RowKind::prefill, piece, loop, window, {}, 0};
  for (const std::int32_t position : s.active[static_cast<std::size_t>(loop - 1)][static_cast<std::size_t>(window)]) {
    if (position >= piece.begin && position < piece.end) part.positions.push_back(position);
  }
  return part;
}

// Nothing for a row past EOS, or after the row's last loop: planned, never run.
std::optional<CudaRun::Part> CudaRun::decode_part(RequestState& s, int position, int loop) {
  const auto step = static_cast<std::size_t>(position - s.prompt_length);
  if (s.stopped || step >= s.record.tokens.size()) return std::nullopt;
  if (loop == 1) {
    s.row = DecodeRow{};
    s.row.position = position;
    s.row.key = {s.generation, s.incarnations++};
    s.row.last_loop = config_.loops();
    if (config_.exit().mode == ExitMode::trace) s.row.last_loop = s.request->exit_depths.at(step);
    if (const RequestRecord* forced = decisions(s); has_exit_rule() && forced != nullptr && step < forced->exit_depths.size() &&
                                                    forced->exit_depths[step] != 0) {
      s.row.last_loop = forced->exit_depths[step];
      s.row.depth_given = true;
    }
    s.record.keys.emplace_back();
    if (references_) s.row.reference = references_->acquire(s.row.key);
    const float alive = 1.0f;
    LOOPGAUGE_CUDA_CHECK(cudaMemcpyAsync(survival_.as<float>() + s.slot, &alive, sizeof alive, cudaMemcpyHostToDevice, stream_));
  }
  if (s.row.position != position) throw InternalError(s.name() + ": decode item at position " + std::to_string(position) + " out of turn");
  if (s.row.committed) return std::nullopt;
  if (references_ && loop >= 3) references_->require_reusable(s.row.reference, s.row.key);
  return Part{&s, RowKind::decode, {position, position + 1}, loop, -1, {position}, 0};
}

void CudaRun::run_step(std::vector<Part>& parts) {
  const RowBatch batch = make_batch(parts);
  if (batch.size() > 0) {
    kv_.upload();
    Bfloat16* const rows = forward_.input(batch.size());
    load_inputs(parts, rows);
    std::unique_ptr<RowObserver> observer;
    if (options_.tap != nullptr) {
      observer = make_tap_observer(parts);
      if (parts.front().loop == 1) observer->observe("embedding", -1, rows, model_.hidden, model_.hidden);
    }
    forward_.run(batch, kv_, references_ ? &*references_ : nullptr, numeric_fault_.as<std::uint64_t>(), observer.get());
    store_outputs(parts);
  }
  for (Part& part : parts) {
    RequestState& s = *part.request;
    if (part.kind == RowKind::decode) {
      complete_decode_loop(s, part.loop);
    } else {
      record_states(s,
                    s.windows[static_cast<std::size_t>(part.window)]->states.as<Bfloat16>() +
                        static_cast<std::size_t>(part.piece.begin - part.window * config_.window()) * model_.hidden,
                    part.piece, part.loop);
      if (part.piece.end == window_range(part.window, s.prompt_length, config_.window()).end) complete_window_loop(s, part.window, part.loop);
    }
  }
  encode_pending();
  emit_pending();
}

RowBatch CudaRun::make_batch(std::vector<Part>& parts) {
  // Decode rows first, then prefill rows, each in the order of the items.
  std::stable_partition(parts.begin(), parts.end(), [](const Part& part) { return part.kind == RowKind::decode; });
  RowBatch batch;
  for (Part& part : parts) {
    RequestState& s = *part.request;
    part.first_row = batch.size();
    if (part.positions.empty()) continue;
    kv_.reserve(s.slot, part.loop, part.positions);
    kv_.set_active(s.slot, part.loop, part.positions);
    const int frontier = visible_frontier(s, part.piece.begin, part.kind);
    for (const std::int32_t position : part.positions) {
      batch.rows.push_back({s.slot, position, part.loop, frontier, part.kind == RowKind::decode ? reference_slot(s, part.loop) : -1});
      if (planted(Fault::contiguous_causal_mask)) batch.mask_positions.push_back(contiguous_position(s, part, position));
    }
    if (part.kind == RowKind::decode) {
      ++batch.decode_rows;
      // A step without recorded keys (the recorded run stopped or left before loop 2) selects for itself.
      const RequestRecord* forced = decisions(s);
      const auto step = static_cast<std::size_t>(part.piece.begin - s.prompt_length);
      const bool has_keys = forced != nullptr && step < forced->keys.size() && !forced->keys[step].layers.empty();
      batch.forced_keys.push_back(has_keys ? &forced->keys[step] : nullptr);
    } else {
      batch.segments.push_back({s.slot, part.loop, frontier, part.first_row, static_cast<std::int32_t>(part.positions.size())});
      batch.take_scores |= config_.selects_tokens() && (part.loop == 2 || part.loop == 3);
    }
  }
  return batch;
}

// The planted fault: loops after the reference loop read what the token before left. Its slot has no mask of a page that it does not reach.
int CudaRun::reference_slot(const RequestState& s, int loop) const {
  const bool stale = loop >= 3 && s.previous_reference && s.row.position % kPageTokens != 0;
  return stale ? s.previous_reference->first : s.row.reference;
}

// The planted fault: compact row i of a window stands at window_begin + i in the causal mask.
std::int32_t CudaRun::contiguous_position(const RequestState& s, const Part& part, std::int32_t position) const {
  if (part.kind == RowKind::decode) return position;
  const auto& active = s.active[static_cast<std::size_t>(part.loop - 1)][static_cast<std::size_t>(part.window)];
  const auto rank = std::lower_bound(active.begin(), active.end(), position) - active.begin();
  return part.window * config_.window() + static_cast<std::int32_t>(rank);
}

void CudaRun::load_inputs(const std::vector<Part>& parts, Bfloat16* rows) {
  std::vector<std::int32_t> tokens, indices;  // per batch row: its token at loop 1, its row in the window after it
  for (const Part& part : parts) {
    const RequestState& s = *part.request;
    for (const std::int32_t position : part.positions) {
      tokens.push_back(part.loop > 1                  ? 0
                       : part.kind == RowKind::decode ? s.record.tokens[static_cast<std::size_t>(position - s.prompt_length)]
                                                      : s.request->prompt[static_cast<std::size_t>(position)]);
      indices.push_back(part.kind == RowKind::decode ? s.slot : position - part.window * config_.window());
    }
  }
  const std::int32_t* device_tokens = tokens_.upload<std::int32_t>(tokens, stream_);
  const std::int32_t* device_indices = indices_.upload<std::int32_t>(indices, stream_);
  for (const Part& part : parts) {
    RequestState& s = *part.request;
    Bfloat16* target = rows + static_cast<std::size_t>(part.first_row) * model_.hidden;
    const int count = static_cast<int>(part.positions.size());
    if (part.loop == 1) {
      embedding(device_tokens + part.first_row, weights_.embed_tokens.as<Bfloat16>(), target, count, model_.hidden, stream_);
    } else {
      const Bfloat16* source = part.kind == RowKind::decode ? decode_states_.as<Bfloat16>()
                                                            : s.windows[static_cast<std::size_t>(part.window)]->states.as<Bfloat16>();
      gather_rows(source, device_indices + part.first_row, target, count, model_.hidden, stream_);
    }
  }
}

// Scatters H[r] to the requests' states; the rows' indices are still on the device.
void CudaRun::store_outputs(const std::vector<Part>& parts) {
  const std::int32_t* indices = indices_.as<std::int32_t>();
  for (const Part& part : parts) {
    RequestState& s = *part.request;
    const int count = static_cast<int>(part.positions.size());
    const Bfloat16* source = forward_.output() + static_cast<std::size_t>(part.first_row) * model_.hidden;
    if (part.kind == RowKind::decode) {
      scatter_rows(source, indices + part.first_row, decode_states_.as<Bfloat16>(), count, model_.hidden, stream_);
      continue;
    }
    WindowState& window = *s.windows[static_cast<std::size_t>(part.window)];
    scatter_rows(source, indices + part.first_row, window.states.as<Bfloat16>(), count, model_.hidden, stream_);
    if (config_.selects_tokens() && (part.loop == 2 || part.loop == 3)) {
      const auto next = static_cast<std::size_t>(part.loop - 2);
      float* target = window.scores.as<float>() + next * static_cast<std::size_t>(config_.window()) + window.scored[next];
      copy_on_device(target, forward_.scores() + part.first_row, static_cast<std::size_t>(count) * sizeof(float), stream_);
      window.scored[next] += count;
    }
  }
}

}  // namespace loopgauge::optimized
