// SPDX-License-Identifier: Apache-2.0
// Prompt windows between their loops: who executes the next loop, what is scored, what is recorded.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>

#include "models/error.hpp"
#include "optimized/cuda_run.hpp"
#include "optimized/ops/compact_rows.cuh"
#include "optimized/ops/rms_norm.cuh"
#include "optimized/ops/select_tokens.cuh"

namespace loopgauge::optimized {

void CudaRun::open(RequestState& s) {
  if (s.slot >= 0 || s.finished) return;
  s.slot = kv_.open_request(s.capacity);
  s.generation = generations_++;
}

// How many rows of the window execute the loop: known without knowing which.
int CudaRun::window_rows(const RequestState& s, int window, int loop) const {
  int rows = window_range(window, s.prompt_length, config_.window()).size();
  const int whole = rows;
  for (int r = 3; r <= loop && config_.selects_tokens(); ++r)
    rows = std::min(rows, budget(config_.t().retention_bp[static_cast<std::size_t>(r - 1)], whole));
  return rows;
}

// Their ascending positions, on the device.
std::int32_t* CudaRun::window_positions(RequestState& s, int window, int loop) {
  const int list = loop <= 2 || !config_.selects_tokens() ? 0 : loop - 2;
  return s.windows[static_cast<std::size_t>(window)]->positions.as<std::int32_t>() + static_cast<std::ptrdiff_t>(list) * config_.window();
}

WindowState CudaRun::take_window_state() {
  if (!spare_windows_.empty()) {
    WindowState state = std::move(spare_windows_.back());
    spare_windows_.pop_back();
    state.scored = {};
    return state;
  }
  const auto rows = static_cast<std::size_t>(config_.window());
  return {allocator_.allocate_array<Bfloat16>(MemoryCategory::hidden_rows, rows * static_cast<std::size_t>(model_.hidden)),
          config_.selects_tokens() ? allocator_.allocate_array<float>(MemoryCategory::workspace, rows * 2) : DeviceBuffer{},
          allocator_.allocate_array<std::int32_t>(MemoryCategory::workspace, rows * (config_.selects_tokens() ? 3 : 1)),
          {}};
}

// Decides which positions of the window execute the loop; the others keep their state, which is how they inherit.
void CudaRun::begin_window_loop(RequestState& s, int window, int loop) {
  auto& state = s.windows[static_cast<std::size_t>(window)];
  if (loop == 1) {
    state.emplace(take_window_state());
    const PositionRange range = window_range(window, s.prompt_length, config_.window());
    std::vector<std::int32_t> all(static_cast<std::size_t>(range.size()));
    std::iota(all.begin(), all.end(), range.begin);
    copy_to_device<std::int32_t>(window_positions(s, window, 1), all, ticket_->arena, stream_);
  }
  if (loop < 3 || !config_.selects_tokens()) return;
  select_window(s, window, loop);
  if (planted(Fault::double_final_norm)) normalize_inactive_again(s, window, loop);
}

void CudaRun::select_window(RequestState& s, int window, int loop) {
  const auto next = static_cast<std::size_t>(loop - 3);
  const WindowState& state = *s.windows[static_cast<std::size_t>(window)];
  const int candidates = window_rows(s, window, loop - 1), count = window_rows(s, window, loop);
  if (state.scored[next] != candidates) {
    throw InternalError(s.name() + ", window " + std::to_string(window) + ", loop " + std::to_string(loop) + ": " +
                        std::to_string(state.scored[next]) + " of " + std::to_string(candidates) + " candidates are scored");
  }
  const float* scores = state.scores.as<float>() + next * static_cast<std::size_t>(config_.window());
  std::int32_t* selected = window_positions(s, window, loop);
  if (const RequestRecord* forced = decisions(s); forced != nullptr) {
    const PositionRange range = window_range(window, s.prompt_length, config_.window());
    const auto& all = forced->active[next];
    const std::vector<std::int32_t> members(std::lower_bound(all.begin(), all.end(), range.begin),
                                            std::lower_bound(all.begin(), all.end(), range.end));
    if (static_cast<int>(members.size()) != count) {
      throw ConfigError("decisions to replay: " + s.name() + ", window " + std::to_string(window) + ", loop " + std::to_string(loop) +
                        " holds " + std::to_string(members.size()) + " active positions, the budget is " + std::to_string(count));
    }
    copy_to_device<std::int32_t>(selected, members, ticket_->arena, stream_);
  } else {
    select_tokens(window_positions(s, window, loop - 1), scores, candidates, count, config_.reserved_position(s.prompt_length), selected, stream_);
  }
  const float* read_scores = download(scores, static_cast<std::size_t>(candidates));
  const std::int32_t* read_selected = download(selected, static_cast<std::size_t>(count));
  on_delivery([this, &s, window, loop, read_scores, read_selected] { record_selection(s, window, loop, read_scores, read_selected); });
}

// What the device has found, known to the host at last. The same bits when a rewind has made it run again.
void CudaRun::record_selection(RequestState& s, int window, int loop, const float* scores, const std::int32_t* selected) {
  if (s.drops_results()) return;
  const auto next = static_cast<std::size_t>(loop - 3), w = static_cast<std::size_t>(window);
  const PositionRange range = window_range(window, s.prompt_length, config_.window());
  const std::vector<std::int32_t>& before = s.active[2][w];
  for (int i = 0; i < window_rows(s, window, loop - 1); ++i) {
    const int position = loop == 3 ? range.begin + i : before[static_cast<std::size_t>(i)];
    if (!std::isfinite(scores[i])) {
      throw NumericError(s.name() + ", window " + std::to_string(window) + ", loop " + std::to_string(loop) + ", position " +
                         std::to_string(position) + ": the selection score is not finite");
    }
    s.record.scores[next][static_cast<std::size_t>(position)] = scores[i];
    tap_row("update_score", s, loop, -1, position, std::span<const float>(scores + i, 1));
  }
  std::vector<std::int32_t>& active = s.active[static_cast<std::size_t>(loop - 1)][w];
  active.assign(selected, selected + window_rows(s, window, loop));
  if (s.slot < 0) return;
  kv_.note_active(s.slot, loop, active);
  kv_.release_unused(s.slot, loop, {range.begin, std::min(range.end, s.prompt_length / kPageTokens * kPageTokens)});
  if (s.committed > 0 && !asynchronous()) kv_.trim();  // the windows to come would use them, but none do
}

// The planted fault: rows that inherit are normed a second time.
void CudaRun::normalize_inactive_again(RequestState& s, int window, int loop) {
  const std::vector<std::int32_t> active = read(window_positions(s, window, loop), static_cast<std::size_t>(window_rows(s, window, loop)));
  const PositionRange range = window_range(window, s.prompt_length, config_.window());
  std::vector<std::int32_t> inactive;
  for (int position = range.begin; position < range.end; ++position) {
    if (!std::binary_search(active.begin(), active.end(), position)) inactive.push_back(position - range.begin);
  }
  const int count = static_cast<int>(inactive.size());
  Bfloat16* states = s.windows[static_cast<std::size_t>(window)]->states.as<Bfloat16>();
  const std::int32_t* rows = inactive_indices_.upload<std::int32_t>(inactive, ticket_->arena, stream_);
  Bfloat16* again = inactive_rows_.reserve<Bfloat16>(static_cast<std::size_t>(count) * model_.hidden);
  gather_rows(states, rows, again, count, model_.hidden, stream_);
  rms_norm(again, weights_.norm.as<Bfloat16>(), again, count, model_.hidden, model_.rms_norm_eps, stream_);
  scatter_rows(again, rows, states, count, model_.hidden, stream_);
}

void CudaRun::complete_window_loop(RequestState& s, int window, int loop) {
  const PositionRange range = window_range(window, s.prompt_length, config_.window());
  const bool last_loop = loop == config_.loops();
  s.completed_loops[static_cast<std::size_t>(window)] = loop;
  record_states(s, s.windows[static_cast<std::size_t>(window)]->states.as<Bfloat16>(), range, loop);
  if (config_.q().enabled && config_.q().policy == EncodingPolicy::streaming && range.size() == config_.window()) {
    // The block is made before its late streams are known: their sizes are the budgets.
    std::array<std::uint32_t, kLoops> rows;
    for (int r = 1; r <= kLoops; ++r) rows[static_cast<std::size_t>(r - 1)] = static_cast<std::uint32_t>(window_rows(s, window, r));
    encode(s, range, loop, loop, rows, !config_.selects_tokens());
    if (last_loop) {
      s.encoded = range.end;
      pending_releases_.emplace_back(&s, range);
    }
  }
  if (!last_loop) return;
  s.complete_windows = window + 1;
  WindowState& state = *s.windows[static_cast<std::size_t>(window)];
  if (range.end == s.prompt_length) {
    const std::size_t row_bytes = static_cast<std::size_t>(model_.hidden) * sizeof(Bfloat16);
    LOOPGAUGE_CUDA_CHECK(cudaMemcpyAsync(decode_state(s),
                                         state.states.as<Bfloat16>() + static_cast<std::size_t>(range.size() - 1) * model_.hidden,
                                         row_bytes, cudaMemcpyDeviceToDevice, stream_));
    complete_prompt(s);
  }
  spare_windows_.push_back(std::move(state));
  s.windows[static_cast<std::size_t>(window)].reset();
  // A request in decode holds one row; the next prompt brings its own windows.
  if (range.end == s.prompt_length) spare_windows_.clear();
}

}  // namespace loopgauge::optimized
