// SPDX-License-Identifier: Apache-2.0
#include "optimized/ops/prepare_rows.cuh"

#include "optimized/runtime/cuda_check.hpp"

namespace loopgauge::optimized {
namespace {

constexpr int kThreads = 128;

__global__ void prepare_rows_kernel(PrepareRowsArguments a) {
  const int i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= a.count) return;
  RowSource source = a.sources[i];
  const bool decode = i < a.decode_rows;
  const bool found = source.live >= 0;
  bool live = source.request >= 0;
  if (live && found) {
    const SpeculationState& state = a.speculation.states[source.request];
    const LivePlace row = live_place(a.speculation, state, source.live, source.loop - 1);
    const std::int32_t place = source.request * a.speculation.live_rows + row.place;
    live = row.exists != 0;
    if (live) {
      source.position = row.position;
      source.encoded_frontier = live_visible(a.speculation, state, row.position);
      source.reference = a.speculation.references != nullptr && source.loop >= 2 ? a.speculation.references[place] : -1;
      source.token = a.speculation.tokens[place];
      source.origin = row.position - place;
    }
  }
  const std::int32_t position = !live ? 0 : source.positions != nullptr ? source.positions[source.position] : source.position;
  if (live && decode && !found) {
    if (source.loop == 1)
      a.exits[source.request] = {1.0f, source.last_loop, source.gate_decides, 0};
    else
      live = source.loop <= a.exits[source.request].last_loop;
  }
  const QueryRow row{live ? source.request : -1, position, source.loop, source.encoded_frontier, source.reference};
  a.rows[i] = row;
  if (a.written != nullptr) {
    a.written[i] = row;
    if (source.unwritten != 0) a.written[i].request = -1;
  }
  a.positions[i] = position;
  if (a.mask_positions != nullptr) a.mask_positions[i] = source.positions != nullptr ? source.origin + source.position : position;
  const std::int32_t place = live ? position - source.origin : -1;
  a.tokens[i] = live && source.loop == 1 ? (source.token == kChosenToken ? a.chosen_tokens[source.request] : source.token) : -1;
  a.sources_of_states[i] = source.loop > 1 ? place : -1;
  a.targets_of_states[i] = place;
  if (decode) {
    QueryRow other = row;
    other.request = -1;
    const bool corrected = a.sparse_decode && row.loop >= 3, at_reference = a.sparse_decode && row.loop == 2;
    a.dense[i] = corrected || at_reference ? other : row;
    a.at_reference[i] = at_reference ? row : other;
    a.corrected[i] = corrected ? row : other;
  }
  if (live) {
    std::uint64_t* active = &a.kv.requests[source.request].maps[position / kPageTokens].active[source.loop - 1];
    atomicOr(reinterpret_cast<unsigned long long*>(active), 1ull << (position % kPageTokens));
  }
}

}  // namespace

void prepare_rows(const PrepareRowsArguments& arguments, cudaStream_t stream) {
  if (arguments.count == 0) return;
  prepare_rows_kernel<<<(arguments.count + kThreads - 1) / kThreads, kThreads, 0, stream>>>(arguments);
  LOOPGAUGE_CUDA_CHECK_LAUNCH("prepare_rows");
}

}  // namespace loopgauge::optimized
