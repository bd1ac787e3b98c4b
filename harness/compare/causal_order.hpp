// SPDX-License-Identifier: Apache-2.0
// When, in the serial order of one request, a recorded value comes into being (record_compare.hpp, "Causal order").
#pragma once

#include <compare>
#include <cstdint>

#include "models/run_record.hpp"

namespace loopgauge::harness {

struct CausalKey {
  int stage = 0;  // windows, prompt completion, then for each decode row its loops and its completion
  int loop = 0;   // 1..4 inside a stage; kSealing after them
  int phase = 0;
  int layer = 0;
  int part = 0;  // inside a layer: K/V before keys before mass
  int position = 0;
  int head = 0;
  std::int64_t element = 0;
  auto operator<=>(const CausalKey&) const = default;
};

class CausalOrder {
 public:
  // Phases inside (stage, loop).
  static constexpr int kScores = 0, kActive = 1, kLayers = 2, kHidden = 3, kGate = 4;
  // Phases of a completion stage.
  static constexpr int kExitDepth = 0, kLogits = 1, kToken = 2, kFrontier = 3, kCodec = 4;
  // Stream by stream, each encoded against its predecessor's reconstruction: codes and parameters, then the K/V that are read from them.
  static constexpr int codec_phase(int loop) { return kCodec + 2 * (loop - 1); }
  static constexpr int encoded_kv_phase(int loop) { return codec_phase(loop) + 1; }
  // Of the key of a K/V value.
  static constexpr bool is_encoded_kv(const CausalKey& key) { return key.phase > kCodec; }
  static constexpr int kSealing = kLoops + 1;  // loop value of blocks sealed right after a window

  CausalOrder(const RequestRecord& record, int window);

  // Stage in which the row at `position` is computed.
  int stage_of(int position) const;
  // Stage after which logits row `row` exists: prompt completion for row 0.
  int completion_of(int row) const;

  CausalKey computed(int position, int loop, int phase, int layer = 0, int part = 0) const;
  CausalKey completed(int row, int phase) const;
  // Encoding of a block that ends at `block_end`, and the K/V read from it afterwards. A block of the prompt depends on its window only;
  // a later one is sealed by the commit that moved the frontier over it.
  CausalKey sealed(int block_end, int phase) const;
  // K/V of `position` at `loop`, `layer`: computed with the row, or read back from the block that holds it.
  CausalKey kv(int position, int loop, int layer) const;
  // The frontier after the prompt follows from lengths and policy alone: nothing that is computed comes before it.
  CausalKey frontier(int row) const { return row == 0 ? CausalKey{} : completed(row, kFrontier); }
  int encoded() const { return encoded_; }

 private:
  const RequestRecord& record_;
  int window_;
  int windows_;
  int encoded_;  // frontier at the end of the run
};

}  // namespace loopgauge::harness
