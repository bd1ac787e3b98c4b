// SPDX-License-Identifier: Apache-2.0
#include "optimized/ops/speculative_rows.cuh"

#include "optimized/runtime/cuda_check.hpp"

namespace loopgauge::optimized {
namespace {

constexpr int kThreads = 32;

__device__ std::int32_t& token_at(const SpeculationView& view, int slot, int place) { return view.tokens[slot * view.live_rows + place]; }

__device__ float* distribution_at(const SpeculationView& view, int slot, int place) {
  return view.draft_distributions == nullptr ? nullptr
                                             : view.draft_distributions + static_cast<std::size_t>(slot * view.live_rows + place) * view.vocab;
}

__device__ const SpeculationStep& step_of(const SpeculationView& view, const SpeculationState& state, int position) {
  return view.steps[state.first_step + position - state.prompt_length];
}

__device__ int place_after(const SpeculationView& view, const LivePlace& row) {
  return view.pipeline != 0 ? (row.position + 1) % view.live_rows : row.place + 1;
}

// The row after `row`, which waits for its verdict. Of a pipeline it may not have begun.
__device__ bool has_child(const SpeculationView& view, const SpeculationState& state, const LivePlace& row, int count) {
  if (view.pipeline == 0) return row.place + 1 < count && row.position + 1 < state.capacity;
  for (int loop = 0; loop < kLoops; ++loop) {
    if (state.at_loop[loop] == row.position + 1) return true;
  }
  return false;
}

__device__ LivePlace drafting_row(const SpeculationView& view, const SpeculationState& state, int index) {
  LivePlace row = live_place(view, state, index, view.draft_depth);
  if (view.pipeline != 0 && has_child(view, state, row, 0)) row.exists = 0;  // it has proposed before
  if (row.position + 1 >= state.capacity) row.exists = 0;
  return row;
}

__global__ void start_speculation_kernel(SpeculationView view, const std::int32_t* slots, const SpeculationState* fresh, const HeadChoice* choices,
                                         int count) {
  const int i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= count) return;
  SpeculationState state = fresh[i];
  const std::int32_t forced = step_of(view, state, state.prompt_length).forced;
  const std::int32_t token = forced >= 0 ? forced : choices[i].token;
  state.committed = state.prompt_length;
  state.ended = state.end_token >= 0 && token == state.end_token;
  view.states[slots[i]] = state;
  token_at(view, slots[i], view.pipeline != 0 ? state.prompt_length % view.live_rows : 0) = token;
}

__global__ void find_drafting_row_kernel(SpeculationView view, int slot, int index, std::int32_t* indices, TokenDraw* draws) {
  const SpeculationState& state = view.states[slot];
  const LivePlace row = drafting_row(view, state, index);
  indices[0] = row.exists ? slot * view.live_rows + row.place : -1;
  TokenDraw draw;
  if (row.exists) {
    const SpeculationStep& next = step_of(view, state, row.position + 1);
    if (next.draft < 0 && state.temperature != 0.0f) {
      draw.temperature = state.temperature;
      draw.draw = next.draw_of_draft;
      draw.distribution = distribution_at(view, slot, place_after(view, row));
    }
  }
  draws[0] = draw;
}

__global__ void find_decided_rows_kernel(SpeculationView view, int slot, int count, float* scratch, std::int32_t* indices, TokenDraw* draws) {
  const SpeculationState& state = view.states[slot];
  for (int i = threadIdx.x; i < count; i += kThreads) {
    const LivePlace row = live_place(view, state, i, kLoops);
    indices[i] = row.exists ? slot * view.live_rows + row.place : -1;
    TokenDraw draw;
    if (row.exists && state.temperature != 0.0f && state.forced == 0) {
      const SpeculationStep& next = step_of(view, state, row.position + 1);
      draw.temperature = state.temperature;
      draw.draw = next.draw;
      draw.distribution = scratch + static_cast<std::size_t>(i) * view.vocab;
      if (has_child(view, state, row, count)) {
        const int child = place_after(view, row);
        draw.acceptance = next.acceptance;
        draw.residual = next.residual;
        draw.candidate = token_at(view, slot, child);
        draw.draft = next.draft < 0 ? distribution_at(view, slot, child) : nullptr;
      }
    }
    draws[i] = draw;
  }
}

__global__ void propose_token_kernel(SpeculationView view, int slot, int index, const HeadChoice* choice, DraftOutcome* outcome) {
  SpeculationState& state = view.states[slot];
  const LivePlace row = drafting_row(view, state, index);
  *outcome = {-1, -1};
  if (!row.exists) return;
  const std::int32_t given = step_of(view, state, row.position + 1).draft;
  token_at(view, slot, place_after(view, row)) = given >= 0 ? given : choice->token;
  if (view.pipeline != 0) state.at_loop[0] = row.position + 1;
  *outcome = {row.position, given >= 0 ? -1 : choice->first_non_finite};
}

// Rows at [begin, end) are in no plane any more.
__device__ void forget_rows(const KvView& kv, int slot, int begin, int end) {
  for (int position = begin; position < end; ++position) {
    ActivityMap& map = kv.requests[slot].maps[position / kPageTokens];
    for (std::uint64_t& active : map.active) active &= ~(std::uint64_t{1} << (position % kPageTokens));
  }
}

__global__ void decide_rows_kernel(SpeculationView view, KvView kv, int slot, int count, HeadChoice* choices, const std::int32_t* confirmed,
                                   RoundOutcome* outcome) {
  SpeculationState& state = view.states[slot];
  *outcome = {};
  const LivePlace oldest = live_place(view, state, 0, kLoops);
  if (!oldest.exists) return;
  const bool draws = state.temperature != 0.0f && state.forced == 0;
  RoundOutcome round{};
  round.position = oldest.position;
  round.seen = state.sealed;
  round.rewritten = state.rewritten;
  state.rewritten = 0;
  std::int32_t token = 0;
  for (bool goes_on = true; goes_on;) {
    const int i = round.emitted;
    const LivePlace row{1, oldest.position + i, view.pipeline != 0 ? oldest.place : i};
    const std::int32_t forced = step_of(view, state, row.position + 1).forced;
    token = forced >= 0 ? forced : choices[i].token;
    choices[i].token = token;
    state.ended |= state.end_token >= 0 && token == state.end_token;
    // A logit that is not finite ends the walk, and whoever reads the row reports it.
    const bool stands = has_child(view, state, row, count) && choices[i].first_non_finite < 0 &&
                        (draws ? confirmed[i] != 0 : token_at(view, slot, place_after(view, row)) == token);
    ++round.emitted;
    round.accepted += stands;
    goes_on = view.pipeline == 0 && stands && state.ended == 0;
  }
  state.committed = oldest.position + round.emitted;
  if (view.pipeline == 0) {
    round.rows = min(count, state.capacity - oldest.position);
    round.rejected = (round.rows - round.emitted) * kLoops;
    forget_rows(kv, slot, state.committed, oldest.position + round.rows);
    token_at(view, slot, 0) = token;
  } else {
    round.rows = has_child(view, state, oldest, count) ? 2 : 1;
    state.at_loop[kLoops] = -1;
    if (round.accepted == 0 || state.ended != 0) {
      for (int loop = 0; loop < kLoops; ++loop) {
        const std::int32_t position = state.at_loop[loop];
        if (position < 0) continue;
        forget_rows(kv, slot, position, position + 1);
        round.rejected += loop;
        state.at_loop[loop] = -1;
      }
      token_at(view, slot, state.committed % view.live_rows) = token;
    }
  }
  if (state.sealed > state.committed) state.unreadable = state.committed;
  round.sealed = state.sealed;
  *outcome = round;
}

__global__ void admit_blocks_kernel(SpeculationView view, int slot, int rows, EncodeTask* blocks, int count, EncodeTask* again, RoundOutcome* outcome) {
  SpeculationState& state = view.states[slot];
  int due = 0;
  if (view.eager == 0) {
    due = live_frontier(view, state, state.committed + (view.serial_aligned != 0 ? view.live_rows - 1 : 0));
  } else {
    const int end = min(state.committed + rows, state.capacity), rewritten = min(end, state.sealed);
    *again = {slot, 0, 0, 1, kLoops};
    if (state.ended == 0 && state.committed < state.capacity) {
      due = live_frontier(view, state, end);
      if (state.unreadable < rewritten) {
        *again = {slot, state.unreadable, rewritten, 1, kLoops};
        state.rewritten = rewritten - state.unreadable;
        state.unreadable = rewritten < state.sealed ? rewritten : INT32_MAX;
      }
    }
  }
  for (int i = 0; i < count; ++i) {
    if (blocks[i].begin == state.sealed && blocks[i].end <= due) {
      state.sealed = blocks[i].end;
    } else {
      blocks[i].end = blocks[i].begin;
    }
  }
  if (outcome != nullptr) outcome->sealed = state.sealed;
}

__global__ void advance_stages_kernel(SpeculationView view, int slot, unsigned loops) {
  SpeculationState& state = view.states[slot];
  for (int loop = kLoops; loop >= 1; --loop) {
    if (((loops >> (loop - 1)) & 1u) == 0) continue;
    const LivePlace row = live_place(view, state, 0, loop - 1);
    if (!row.exists) continue;
    state.at_loop[loop] = row.position;
    state.at_loop[loop - 1] = -1;
  }
}

}  // namespace

void start_speculation(const SpeculationView& view, const std::int32_t* slots, const SpeculationState* fresh, const HeadChoice* choices, int count,
                       cudaStream_t stream) {
  if (count == 0) return;
  start_speculation_kernel<<<(count + kThreads - 1) / kThreads, kThreads, 0, stream>>>(view, slots, fresh, choices, count);
  LOOPGAUGE_CUDA_CHECK_LAUNCH("start_speculation");
}

void find_drafting_row(const SpeculationView& view, int slot, int index, std::int32_t* indices, TokenDraw* draws, cudaStream_t stream) {
  find_drafting_row_kernel<<<1, 1, 0, stream>>>(view, slot, index, indices, draws);
  LOOPGAUGE_CUDA_CHECK_LAUNCH("find_drafting_row");
}

void find_decided_rows(const SpeculationView& view, int slot, int count, float* scratch, std::int32_t* indices, TokenDraw* draws, cudaStream_t stream) {
  find_decided_rows_kernel<<<1, kThreads, 0, stream>>>(view, slot, count, scratch, indices, draws);
  LOOPGAUGE_CUDA_CHECK_LAUNCH("find_decided_rows");
}

void propose_token(const SpeculationView& view, int slot, int index, const HeadChoice* choice, DraftOutcome* outcome, cudaStream_t stream) {
  propose_token_kernel<<<1, 1, 0, stream>>>(view, slot, index, choice, outcome);
  LOOPGAUGE_CUDA_CHECK_LAUNCH("propose_token");
}

void decide_rows(const SpeculationView& view, const KvView& kv, int slot, int count, HeadChoice* choices, const std::int32_t* confirmed,
                 RoundOutcome* outcome, cudaStream_t stream) {
  decide_rows_kernel<<<1, 1, 0, stream>>>(view, kv, slot, count, choices, confirmed, outcome);
  LOOPGAUGE_CUDA_CHECK_LAUNCH("decide_rows");
}

void admit_blocks(const SpeculationView& view, int slot, int rows, EncodeTask* blocks, int count, EncodeTask* again, RoundOutcome* outcome,
                  cudaStream_t stream) {
  admit_blocks_kernel<<<1, 1, 0, stream>>>(view, slot, rows, blocks, count, again, outcome);
  LOOPGAUGE_CUDA_CHECK_LAUNCH("admit_blocks");
}

void advance_stages(const SpeculationView& view, int slot, unsigned loops, cudaStream_t stream) {
  advance_stages_kernel<<<1, 1, 0, stream>>>(view, slot, loops);
  LOOPGAUGE_CUDA_CHECK_LAUNCH("advance_stages");
}

}  // namespace loopgauge::optimized
