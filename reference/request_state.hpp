// SPDX-License-Identifier: Apache-2.0
// Everything the reference knows of one live request.
#pragma once

#include <array>
#include <vector>

#include "models/run_record.hpp"
#include "models/trace.hpp"
#include "reference/kv/kv_planes.hpp"
#include "reference/ops/exit_gate.hpp"
#include "reference/ops/sparse_decode.hpp"

namespace loopgauge::reference {

// The attention reference of one live token (S-SDA-9). Position alone is no identity: a token that is replaced at the same position has
// another incarnation, and what its predecessor left behind must not serve it.
template <class Real>
struct AttentionReference {
  enum class State { empty, source_ready, reusable, retired };
  State state = State::empty;
  int position = -1;
  int incarnation = -1;
  std::vector<HeadReference<Real>> heads;  // [layers * heads]
};

// The decode row that is on its way through the loops.
template <class P>
struct DecodeRow {
  int position = -1;
  int incarnation = -1;
  int completed_loops = 0;
  int last_loop = kLoops;      // lowered when the exit rule decides
  bool depth_given = false;    // by a decision-forced replay: the exit rule does not decide
  bool committed = false;
  ExitHazard<P> hazard;
};

template <class P>
struct RequestState {
  using Real = typename P::Real;

  const TraceRequest* request = nullptr;
  int index = 0;                                // in the trace
  int prompt_length = 0;
  int capacity = 0;                             // prompt plus every token that may be forwarded
  std::array<Matrix<Real>, kLoops> hidden;      // H[r], [capacity, hidden]: one matrix per loop, so the old rows outlive the new ones
  KvPlanes<Real> kv;
  std::vector<std::uint8_t> executed_loops;     // [capacity] last executed loop of each position
  std::array<std::vector<std::vector<int>>, kLoops> active;  // per loop and window: ascending positions that execute the loop
  std::vector<int> window_loops;                // completed loops per window
  int committed = 0;                            // positions whose token is final and whose rows have executed all their loops
  int encoded = 0;                              // encoded frontier reached so far
  int incarnations = 0;
  bool stopped = false;                         // EOS was emitted
  DecodeRow<P> row;
  AttentionReference<Real> reference;
  RequestRecord record;                         // filled as the run proceeds

  RequestState(const ModelConfig& model, int positions, bool quantized) : capacity(positions), kv(model, positions, quantized) {}
};

}  // namespace loopgauge::reference
