// SPDX-License-Identifier: Apache-2.0
#include "optimized/cuda_run.hpp"

#include <algorithm>
#include <cmath>
#include <string>

#include "models/error.hpp"
#include "optimized/ops/compact_rows.cuh"
#include "optimized/ops/exit_gate.cuh"
#include "optimized/ops/exit_step.cuh"
#include "optimized/ops/rms_norm.cuh"
#include "optimized/ops/select_tokens.cuh"
#include "optimized/record_reader.hpp"

namespace loopgauge::optimized {
namespace {

void copy_on_device(void* target, const void* source, std::size_t bytes, cudaStream_t stream) {
  if (bytes != 0) LOOPGAUGE_CUDA_CHECK(cudaMemcpyAsync(target, source, bytes, cudaMemcpyDeviceToDevice, stream));
}

}  // namespace

void CudaRun::open(RequestState& s) {
  if (s.slot >= 0 || s.finished) return;
  s.slot = kv_.open_request(s.capacity);
  s.generation = generations_++;
}

// Decides which positions of the window execute the loop; the others keep their state, which is how they inherit.
void CudaRun::begin_window_loop(RequestState& s, int window, int loop) {
  auto& state = s.windows[static_cast<std::size_t>(window)];
  if (loop == 1) {
    if (spare_windows_.empty()) {
      const auto rows = static_cast<std::size_t>(config_.window());
      spare_windows_.push_back({allocator_.allocate_array<Bfloat16>(MemoryCategory::hidden_rows, rows * model_.hidden),
                                config_.selects_tokens() ? allocator_.allocate_array<float>(MemoryCategory::workspace, rows * 2) : DeviceBuffer{},
                                {}});
    }
    state.emplace(std::move(spare_windows_.back()));
    spare_windows_.pop_back();
    state->scored = {};
  }
  auto& active = s.active[static_cast<std::size_t>(loop - 1)][static_cast<std::size_t>(window)];
  const PositionRange range = window_range(window, s.prompt_length, config_.window());
  if (loop >= 3 && config_.selects_tokens()) {
    active = select_window(s, window, loop);
    auto& record = s.record.active[static_cast<std::size_t>(loop - 3)];
    record.insert(record.end(), active.begin(), active.end());
    if (planted(Fault::double_final_norm)) normalize_inactive_again(s, window, loop);
  } else {
    active.clear();
    for (int position = range.begin; position < range.end; ++position) active.push_back(position);
  }
}

std::vector<std::int32_t> CudaRun::select_window(RequestState& s, int window, int loop) {
  const auto next = static_cast<std::size_t>(loop - 3);
  const std::vector<std::int32_t>& candidates = s.active[static_cast<std::size_t>(loop - 2)][static_cast<std::size_t>(window)];
  const PositionRange range = window_range(window, s.prompt_length, config_.window());
  const WindowState& state = *s.windows[static_cast<std::size_t>(window)];
  const float* device_scores = state.scores.as<float>() + next * static_cast<std::size_t>(config_.window());
  if (state.scored[next] != static_cast<int>(candidates.size())) {
    throw InternalError(s.name() + ", window " + std::to_string(window) + ", loop " + std::to_string(loop) + ": " + std::to_string(state.scored[next]) +
                        " of " + std::to_string(candidates.size()) + " candidates are scored");
  }
  const int count = std::min(budget(config_.t().retention_bp[static_cast<std::size_t>(loop - 1)], range.size()), static_cast<int>(candidates.size()));

  // The selection is enqueued before the host looks at the scores, so that one wait serves both.
  const RequestRecord* forced = decisions(s);
  std::int32_t* selected = selected_.reserve<std::int32_t>(static_cast<std::size_t>(config_.window()));
  if (forced == nullptr) {
    const std::int32_t* device_candidates = candidates_.upload<std::int32_t>(candidates, stream_);
    void* scratch = selection_scratch_.reserve<std::byte>(select_tokens_scratch_bytes(config_.window()));
    select_tokens(device_candidates, device_scores, static_cast<int>(candidates.size()), count, selected, scratch, stream_);
  }
  const std::vector<float> scores = read(device_scores, candidates.size());
  check_numeric_fault();
  for (std::size_t i = 0; i < candidates.size(); ++i) {
    if (!std::isfinite(scores[i])) {
      throw NumericError(s.name() + ", window " + std::to_string(window) + ", loop " + std::to_string(loop) + ", position " +
                         std::to_string(candidates[i]) + ": the selection score is not finite");
    }
    s.record.scores[next][static_cast<std::size_t>(candidates[i])] = scores[i];
    tap_row("update_score", s, loop, -1, candidates[i], std::span<const float>(&scores[i], 1));
  }
  if (forced != nullptr) {
    const auto& all = forced->active[next];
    return {std::lower_bound(all.begin(), all.end(), range.begin), std::lower_bound(all.begin(), all.end(), range.end)};
  }
  return read(selected, static_cast<std::size_t>(count));
}

// The planted fault: rows that inherit are normed a second time.
void CudaRun::normalize_inactive_again(RequestState& s, int window, int loop) {
  const auto& active = s.active[static_cast<std::size_t>(loop - 1)][static_cast<std::size_t>(window)];
  const PositionRange range = window_range(window, s.prompt_length, config_.window());
  std::vector<std::int32_t> inactive;
  for (int position = range.begin; position < range.end; ++position) {
    if (!std::binary_search(active.begin(), active.end(), position)) inactive.push_back(position - range.begin);
  }
  const int count = static_cast<int>(inactive.size());
  Bfloat16* states = s.windows[static_cast<std::size_t>(window)]->states.as<Bfloat16>();
  const std::int32_t* rows = indices_.upload<std::int32_t>(inactive, stream_);
  Bfloat16* again = inactive_rows_.reserve<Bfloat16>(static_cast<std::size_t>(count) * model_.hidden);
  gather_rows(states, rows, again, count, model_.hidden, stream_);
  rms_norm(again, weights_.norm.as<Bfloat16>(), again, count, model_.hidden, model_.rms_norm_eps, stream_);
  scatter_rows(again, rows, states, count, model_.hidden, stream_);
}

void CudaRun::complete_window_loop(RequestState& s, int window, int loop) {
  const PositionRange range = window_range(window, s.prompt_length, config_.window());
  const bool last_loop = loop == config_.loops();
  if (config_.q().enabled && config_.q().policy == EncodingPolicy::streaming && range.size() == config_.window()) {
    // The block is made before its late streams are known: their sizes are the budgets.
    std::array<std::uint32_t, kLoops> capacity;
    capacity.fill(static_cast<std::uint32_t>(range.size()));
    for (std::size_t late = 2; config_.selects_tokens() && late < kLoops; ++late) {
      capacity[late] = std::min(capacity[late - 1], static_cast<std::uint32_t>(budget(config_.t().retention_bp[late], range.size())));
    }
    encode(s, range, loop, loop, capacity);
    if (last_loop) {
      s.encoded = range.end;
      pending_releases_.emplace_back(&s, range);
    }
  }
  if (!last_loop) return;
  WindowState& state = *s.windows[static_cast<std::size_t>(window)];
  if (range.end == s.prompt_length) {
    const std::size_t row_bytes = static_cast<std::size_t>(model_.hidden) * sizeof(Bfloat16);
    copy_on_device(decode_state(s), state.states.as<Bfloat16>() + static_cast<std::size_t>(range.size() - 1) * model_.hidden, row_bytes, stream_);
    complete_prompt(s);
  }
  spare_windows_.push_back(std::move(state));
  s.windows[static_cast<std::size_t>(window)].reset();
  if (range.end == s.prompt_length) spare_windows_.clear();  // a request in decode holds one row; the next prompt brings its own windows
}

void CudaRun::complete_prompt(RequestState& s) {
  s.committed = s.prompt_length;
  flush(s, frontier_rule(s, s.committed));
  pending_emissions_.push_back({&s, s.prompt_length - 1});
}

void CudaRun::complete_decode_loop(RequestState& s, int loop) {
  record_states(s, decode_state(s), {s.row.position, s.row.position + 1}, loop);
  if (references_ && loop == 2) {
    references_->mark_source_ready(s.row.reference, s.row.key);
    references_->mark_reusable(s.row.reference, s.row.key);
    if (options_.record.keys) {
      const int count = budget(config_.s().key_fraction_bp, s.row.position + 1);
      s.record.keys.back() = read_keys(kv_.shape(), references_->view(), s.row.reference, s.row.position, count, stream_);
    }
  }
  decide_last_loop(s, loop);
  if (loop == s.row.last_loop) commit(s);
}

// The exit rule's verdict after a loop: the last loop of the row as far as it is known.
void CudaRun::decide_last_loop(RequestState& s, int loop) {
  if (!has_exit_rule()) return;
  const ExitRule& rule = config_.exit();
  float* gate = gates_.reserve<float>(1);
  exit_gate(decode_state(s), weights_.early_exit_gate.as<Bfloat16>(), weights_.early_exit_bias.as<Bfloat16>(), gate, 1, model_.hidden, stream_);
  exit_step(gate, survival_.as<float>() + s.slot, verdicts_.as<ExitVerdict>() + s.slot, 1, loop, rule.threshold, rule.min_loops, stream_);
  if (options_.tap != nullptr) tap_row("exit_gate", s, loop, -1, s.row.position, read(gate, 1));
  const ExitVerdict verdict = read(verdicts_.as<ExitVerdict>() + s.slot, 1).front();
  if (verdict == ExitVerdict::gate_not_finite) {
    throw NumericError(s.name() + ", position " + std::to_string(s.row.position) + ", loop " + std::to_string(loop) + ": the exit gate is not finite");
  }
  if (verdict == ExitVerdict::goes_on || s.row.depth_given) return;
  const int decided = rule.mode == ExitMode::threshold ? loop : std::min(config_.loops(), loop + 1);
  s.row.last_loop = std::min(s.row.last_loop, decided);  // the first decision stands
}

// The row has executed all its loops: it is absent from deeper activity maps and so inherits; the tail may flush.
void CudaRun::commit(RequestState& s) {
  const int position = s.row.position, depth = s.row.last_loop;
  for (int loop = depth + 1; loop <= config_.loops(); ++loop) record_states(s, decode_state(s), {position, position + 1}, loop);
  s.record.exit_depths.push_back(static_cast<std::uint8_t>(depth));
  if (references_) release_reference(s);
  s.row.committed = true;
  s.committed = position + 1;
  ++s.record.fed;
  flush(s, frontier_rule(s, s.committed));
  pending_emissions_.push_back({&s, position});
}

void CudaRun::release_reference(RequestState& s) {
  if (!planted(Fault::stale_reference_slot)) return references_->release(s.row.reference, s.row.key);
  // Held until the successor has read it. A row that left before loop 2 has nothing to read.
  if (s.previous_reference) references_->release(s.previous_reference->first, s.previous_reference->second);
  s.previous_reference.emplace(s.row.reference, s.row.key);
  if (s.row.last_loop < 2) {
    references_->release(s.row.reference, s.row.key);
    s.previous_reference.reset();
  }
}

// Nothing more will run for this request: its K/V goes to the record, then its memory is free for others.
void CudaRun::finish_request(RequestState& s) {
  RequestRecord& record = s.record;
  const int length = s.prompt_length + record.fed;
  kv_.upload();
  if (options_.record.kv) record.kv = read_planes(kv_, s.slot, length, s.encoded, config_.loops(), allocator_, stream_);
  if (options_.record.codec) record.blocks = read_blocks(kv_, s.slot, stream_);
  std::erase_if(record.blocks, [&](const CodecBlock& block) { return block.positions.begin >= s.encoded; });  // by a planted fault only
  if (s.previous_reference) references_->release(s.previous_reference->first, s.previous_reference->second);
  s.previous_reference.reset();
  for (auto& hidden : record.hidden) {
    if (hidden.empty()) continue;
    hidden.shape[0] = length;
    hidden.data.resize(static_cast<std::size_t>(length) * model_.hidden);
  }
  if (options_.record.gate) {
    record.gate.shape[0] = length;
    record.gate.data.resize(static_cast<std::size_t>(length) * kLoops);
  }
  record.exit_depths.resize(record.tokens.size(), 0);
  if (options_.record.logits) record.logits.shape = {1 + record.fed, model_.vocab};
  if (!options_.record.keys) record.keys.clear();
  kv_.close_request(s.slot);
  s.slot = -1;
  s.finished = true;
}

}  // namespace loopgauge::optimized
