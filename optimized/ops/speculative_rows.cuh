// SPDX-License-Identifier: Apache-2.0
// Speculation whose rounds run ahead of the host: which rows are on their way, at which positions and with which tokens, is decided and kept on
// the device (S-ASYNC, S-SPEC, S-PIPE). The host knows bounds alone, and reads what happened when it reads results.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "optimized/kv/kv_cache.hpp"
#include "optimized/kv/kv_layout.hpp"
#include "optimized/ops/draw_tokens.cuh"
#include "optimized/ops/head_argmax.cuh"

namespace loopgauge::optimized {

// What is known of the token at a position before anything runs. POD. The numbers are uniform_draw() of the position.
struct SpeculationStep {
  std::int32_t forced = -1;                        // the token of a forced run; negative: it is chosen
  std::int32_t draft = -1;                         // the given candidate; negative: the model's own
  float draw = 0, draw_of_draft = 0, acceptance = 0, residual = 0;
};

// Per request slot. POD. Rows at consecutive positions from `committed` on are on their way: of a round its rows 0..K, of a pipeline one for
// every stage that has a token.
struct SpeculationState {
  std::int32_t prompt_length = 0;
  std::int32_t capacity = 0;                       // positions that can be fed
  std::int32_t first_step = 0;                     // index in SpeculationView::steps of the token at position prompt_length
  std::int32_t end_token = -1;                     // ends the sequence of a free run; negative: nothing does
  std::int32_t forced = 0;                         // 1: nothing is drawn from targets
  std::int32_t frontier_of_prompt = 0;             // E(P): nothing sees less encoded
  float temperature = 0;
  std::int32_t committed = 0;                      // the first position without a committed row
  std::int32_t ended = 0;                          // 1: the end of the sequence has been emitted
  std::int32_t sealed = 0;                         // blocks cover [0, sealed)
  std::int32_t unreadable = INT32_MAX;             // sealed positions from here on are read as BF16 (S-SPEC-9)
  std::int32_t rewritten = 0;                      // positions that the round which is to be decided has encoded again
  std::int32_t at_loop[kLoops + 1] = {-1, -1, -1, -1, -1};  // pipeline: position of the live row that has completed so many loops; negative: none
};

struct SpeculationView {
  SpeculationState* states = nullptr;              // [slots]
  std::int32_t* tokens = nullptr;                  // [slots][live_rows]: what the live row at a place is fed
  std::int32_t* references = nullptr;              // [slots][live_rows]: its attention reference slot; null without S
  const SpeculationStep* steps = nullptr;          // of all requests; of each one for every position from prompt_length to capacity, both included
  float* draft_distributions = nullptr;            // [slots][live_rows][vocab]: what the token at a place was drawn from; null when no request draws
  std::int32_t live_rows = 1;                      // places of a request
  std::int32_t draft_depth = 1;
  std::int32_t pipeline = 0;                       // 1: token pipeline, 0: rounds
  std::int32_t tail = -1;                          // E(n > P) follows 64 * floor((n - tail) / 64); negative: it stays E(P)
  std::int32_t serial_aligned = 1;                 // 1: a row sees E of its position, 0: what is sealed when it runs
  std::int32_t eager = 0;                          // 1: a round seals its rows before it is decided
  std::int32_t vocab = 0;
};

// Where a row is. exists 0: it is past the end of its request, or no token has come that far.
struct LivePlace {
  std::int32_t exists, position, place;
};

// Row `index` of a round, or the token of a pipeline that has completed `completed` loops. Where none is live, the pending token begins.
LOOPGAUGE_HOST_DEVICE LivePlace live_place(const SpeculationView& view, const SpeculationState& state, int index, int completed) {
  int position = state.committed + index;
  if (view.pipeline != 0) {
    position = state.at_loop[completed];
    if (completed == 0) {
      bool live = false;
      for (int loop = 0; loop <= kLoops; ++loop) live = live || state.at_loop[loop] >= 0;
      if (!live) position = state.committed;
    }
  }
  const bool exists = position >= 0 && position < state.capacity && state.ended == 0;
  return {exists ? 1 : 0, position, view.pipeline != 0 ? position % view.live_rows : index};
}

// E at committed length `length` (S-POL-1). At that of the prompt it is E(P), which under `streaming` the tail does not move.
LOOPGAUGE_HOST_DEVICE int live_frontier(const SpeculationView& view, const SpeculationState& state, int length) {
  const bool moves = view.tail >= 0 && length > state.prompt_length && length >= view.tail;
  const int moved = moves ? (length - view.tail) / kGroupSize * kGroupSize : 0;
  return moved > state.frontier_of_prompt ? moved : state.frontier_of_prompt;
}

// Positions that a query at `position` sees encoded (S-TIME-1, S-TIME-3).
LOOPGAUGE_HOST_DEVICE int live_visible(const SpeculationView& view, const SpeculationState& state, int position) {
  if (view.serial_aligned != 0) return live_frontier(view, state, position);
  return state.sealed < state.unreadable ? state.sealed : state.unreadable;
}

// What became of a draft's choice, and of a round or commit: for the host, when it reads results. PODs.
struct DraftOutcome {
  std::int32_t position;                           // of the row whose logits chose; negative: nothing was chosen
  std::int32_t first_non_finite;                   // as in HeadChoice; -1 for a given draft
};
struct RoundOutcome {
  std::int32_t position;                           // of the pending or oldest row
  std::int32_t rows;                               // that existed; 0: nothing was decided
  std::int32_t accepted, emitted;
  std::int32_t rejected;                           // loops that rows which were given up had completed
  std::int32_t rewritten;                          // positions of sealed blocks that were encoded again
  std::int32_t seen;                               // positions that were encoded when it was decided
  std::int32_t sealed;                             // positions that are, once what it lets be sealed is
};

// Specification clause and reference counterpart: S-SPEC-1..4, S-SPEC-7, S-SPEC-10, S-SAMP-4, S-PIPE-2..5, S-ASYNC-2; reference/run/speculation.
// Shapes and layouts: above; `slot` is a request's. Indices are rows of the decode states, [slots][live_rows].
// Requires: one launch after the other on one stream; nothing else writes the states meanwhile.
// Numerics: integers, and the comparison of tokens. Determinism: exact. Launch: one block, serial where order matters. Traffic: negligible.

// The prompts of `slots` [count] have chosen: `fresh` [count] become their states, with the token that comes first as the pending one.
void start_speculation(const SpeculationView& view, const std::int32_t* slots, const SpeculationState* fresh, const HeadChoice* choices, int count,
                       cudaStream_t stream);

// The rows whose logits are wanted, [count]: their indices (negative: no such row), and what is to be drawn from them; temperature 0: nothing.
// Of a draft one row: row `index` of a round, or the youngest token of a pipeline when it has just left the draft. Otherwise rows 0..count-1 of a
// round, or the token of a pipeline that has all its loops. `scratch` [count][vocab] receives distributions that nobody keeps; null when no
// request draws.
void find_drafting_row(const SpeculationView& view, int slot, int index, std::int32_t* indices, TokenDraw* draws, cudaStream_t stream);
void find_decided_rows(const SpeculationView& view, int slot, int count, float* scratch, std::int32_t* indices, TokenDraw* draws, cudaStream_t stream);

// The row that find_drafting_row() finds proposes: the given candidate, or the choice [1], becomes the token of its successor.
void propose_token(const SpeculationView& view, int slot, int index, const HeadChoice* choice, DraftOutcome* outcome, cudaStream_t stream);

// The rows that find_decided_rows() finds are decided: choices [count] in, tokens that are emitted out; confirmed [count] of draws, null where
// nothing is drawn. Rows that are given up lose their activity bits in `kv`.
void decide_rows(const SpeculationView& view, const KvView& kv, int slot, int count, HeadChoice* choices, const std::int32_t* confirmed,
                 RoundOutcome* outcome, cudaStream_t stream);

// Of `blocks` [count], ascending and continuing what may be sealed, those that are due stay as they are, and the others become empty. Under `eager`
// that is before the round of `rows` rows is decided: those that E of its length reaches if all of them are committed, and `again` [1] becomes the
// rows that stand in sealed blocks since another row was given up there. Otherwise it is after the decision, and `outcome` learns of it: those that E
// of the committed length reaches, under serial_aligned E of every row that may follow. `again` and `outcome` null where they are not meant.
void admit_blocks(const SpeculationView& view, int slot, int rows, EncodeTask* blocks, int count, EncodeTask* again, RoundOutcome* outcome,
                  cudaStream_t stream);

// Tokens of a pipeline have run loops; bit r - 1 of `loops` is set where an item ran loop r.
void advance_stages(const SpeculationView& view, int slot, unsigned loops, cudaStream_t stream);

}  // namespace loopgauge::optimized
