// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "optimized/kv/kv_layout.hpp"
#include "optimized/ops/speculative_rows.cuh"

namespace loopgauge::optimized {

inline constexpr std::int32_t kChosenToken = -1;   // the token that the request's last logits chose, which only the device knows

// What the host knows of a row before it runs: where its position, token and depth come from. POD.
struct RowSource {
  std::int32_t request = -1;                       // slot; negative: padding, the row reads and writes nothing
  std::int32_t position = 0;                       // absolute, or an index of `positions`
  std::int32_t loop = 1;
  std::int32_t encoded_frontier = 0;
  std::int32_t reference = -1;                     // slot of the attention reference state; negative: none
  std::int32_t token = kChosenToken;               // read at loop 1
  std::int32_t origin = 0;                         // the row's place in its states is its position minus this
  std::int32_t last_loop = kLoops;                 // decode rows at loop 1: loops that the row executes at most
  std::int32_t gate_decides = 0;                   // decode rows at loop 1: the exit gate may end the row earlier
  std::int32_t live = -1;                          // of a row that the device finds: its index in its round, 0 in a pipeline; position, token,
                                                   // frontier, reference and place are those of PrepareRowsArguments::speculation
  std::int32_t unwritten = 0;                      // 1: K and V of the row stay what they are (planted fault)
  const std::int32_t* positions = nullptr;         // on the device: positions that a selection found; null: `position` is absolute
};

// Per request slot: how far its decode row goes. POD.
struct ExitState {
  float survival;                                  // product of 1 - sigmoid(gate) so far
  std::int32_t last_loop;                          // the row executes loops up to it, as far as is known
  std::int32_t gate_decides;
  std::int32_t not_finite;                         // first loop whose gate was not finite; 0: none
};

struct PrepareRowsArguments {
  KvView kv;
  const RowSource* sources = nullptr;              // [count]
  int count = 0;
  int decode_rows = 0;                             // the first rows of the batch
  bool sparse_decode = false;
  SpeculationView speculation;                     // of rows with RowSource::live
  ExitState* exits = nullptr;                      // [slots]
  const std::int32_t* chosen_tokens = nullptr;     // [slots]
  QueryRow* rows = nullptr;                        // [count]; padding and rows that have ended: request -1
  std::int32_t* positions = nullptr;               // [count]; padding: 0
  std::int32_t* mask_positions = nullptr;          // [count] or null: position of compact row i as if rows were contiguous (planted fault)
  QueryRow* written = nullptr;                     // [count] or null: rows whose K and V are written, the others as padding (planted fault)
  std::int32_t* tokens = nullptr;                  // [count] loop 1: id; -1 otherwise
  std::int32_t* sources_of_states = nullptr;       // [count] place of the row in its states from loop 2 on; -1 otherwise
  std::int32_t* targets_of_states = nullptr;       // [count] place of the row in its states; -1: nothing is stored
  QueryRow* dense = nullptr;                       // [decode_rows] each: the rows of one kind of attention in place, the others as padding
  QueryRow* at_reference = nullptr;
  QueryRow* corrected = nullptr;
};

// Specification clause and reference counterpart: S-PLAN-9, S-EXIT-3, S-ASYNC-2, S-ASYNC-3; the bookkeeping of reference/run/request_life.
// Shapes and layouts: above.
// Requires: decode rows of one request, of which speculation has several, execute the same number of loops at most; positions of a selection
//   complete in stream order.
// Numerics: integers only. Sets the activity bits of (position, loop) of every live row, starts the exit state of decode rows at loop 1.
// Determinism: rows write their own elements; activity bits are joined with or.
// Launch: one thread a row.
// Traffic: negligible.
void prepare_rows(const PrepareRowsArguments& arguments, cudaStream_t stream);

}  // namespace loopgauge::optimized
