// SPDX-License-Identifier: Apache-2.0
#include "harness/compare/causal_order.hpp"

#include <algorithm>

namespace loopgauge::harness {

CausalOrder::CausalOrder(const RequestRecord& record, int window)
    : record_(record),
      window_(window),
      windows_(window_count(record.prompt_length, window)),
      encoded_(record.encoded_frontier.empty() ? 0 : record.encoded_frontier.back()) {}

int CausalOrder::stage_of(int position) const {
  if (position < record_.prompt_length) return position / window_;
  return windows_ + 1 + 2 * (position - record_.prompt_length);
}

int CausalOrder::completion_of(int row) const { return windows_ + 2 * row; }

CausalKey CausalOrder::computed(int position, int loop, int phase, int layer, int part) const {
  return {.stage = stage_of(position), .loop = loop, .phase = phase, .layer = layer, .part = part, .position = position};
}

CausalKey CausalOrder::completed(int row, int phase) const { return {.stage = completion_of(row), .phase = phase}; }

CausalKey CausalOrder::sealed(int block_end, int phase) const {
  if (block_end <= record_.prompt_length) return {.stage = stage_of(block_end - 1), .loop = kSealing, .phase = phase};
  const auto& frontier = record_.encoded_frontier;
  const auto at = std::find_if(frontier.begin(), frontier.end(), [&](int e) { return e >= block_end; });
  const int row = static_cast<int>(at - frontier.begin());  // == size when the frontier never says so: after everything
  return completed(row, phase);
}

CausalKey CausalOrder::kv(int position, int loop, int layer) const {
  CausalKey key = computed(position, loop, kLayers, layer, 0);
  if (position < encoded_) {
    int end = position + 1;
    for (const auto& block : record_.blocks) {
      if (position >= block.positions.begin && position < block.positions.end) end = block.positions.end;
    }
    key = sealed(end, encoded_kv_phase(loop));
    key.layer = layer;
    key.position = position;
  }
  return key;
}

}  // namespace loopgauge::harness
