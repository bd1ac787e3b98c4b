// SPDX-License-Identifier: Apache-2.0
// Everything observable of one run: what a dump file holds (harness/io/dump_file), what comparisons read and what digests cover.
// Shapes use P = prompt length, fed = tokens forwarded after the prompt, n = tokens emitted or forced.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "models/algorithm_config.hpp"
#include "models/tensor.hpp"

namespace loopgauge {

// Which tensors a run keeps. Tokens, frontiers, exits, active sets and scores are always kept: they are small.
struct RecordGroups {
  bool logits = true;
  bool hidden = false;
  bool gate = false;
  bool keys = false;               // keys and mass
  bool kv = false;
  bool codec = false;
  static RecordGroups all() { return {true, true, true, true, true, true}; }
};

// One stream of one sealed block for one layer. Codes are one per byte here; packing is a storage matter.
struct CodecLayer {
  Tensor<std::uint8_t> k_codes;    // [heads, rows, head_dim]
  Tensor<float> k_min, k_scale;    // [heads, ceil(rows / 64), head_dim]      FP16 values, exact in FP32
  Tensor<std::uint8_t> v_codes;    // [heads, rows, head_dim]
  Tensor<float> v_min, v_scale;    // [heads, rows, ceil(head_dim / 64)]
};

struct CodecStream {
  std::vector<std::int32_t> rows;  // absolute positions present in this stream, ascending (compact row i is rows[i])
  std::vector<CodecLayer> layers;  // empty when rows is empty
};

struct CodecBlock {
  PositionRange positions;
  std::array<CodecStream, kLoops> streams;   // index loop - 1
};

struct StepKeys {
  std::vector<Tensor<std::int32_t>> layers;  // per layer [heads, k], ascending; empty: no selection happened at this step
  Tensor<float> mass;                        // [layers, heads]
};

struct KvPlane {
  Tensor<float> k, v;              // [heads, P + fed, head_dim]: logical values as read at the end (reconstructed where encoded)
};

struct RequestRecord {
  int prompt_length = 0;
  int fed = 0;                               // forced: n; free run: n - 1, the last emitted token is not forwarded (0 when n == 0)
  std::vector<std::int32_t> tokens;          // [n]
  Tensor<float> logits;                      // [1 + fed, vocab]; row 0 follows the prompt, row j + 1 follows feeding tokens[j]
  std::array<Tensor<float>, kLoops> hidden;  // per loop [P + fed, hidden], inherited where not executed
  Tensor<float> gate;                        // [P + fed, 4] logits before the sigmoid, of the hidden row above (so inherited too)
  std::vector<std::uint8_t> exit_depths;     // [n]: last executed loop of the row that fed tokens[j]; 0 for a token not forwarded
  std::array<std::vector<float>, 2> scores;  // loops 3, 4: [P], NaN where not eligible; empty when T selects nothing
  std::array<std::vector<std::int32_t>, 2> active;  // loops 3, 4: ascending positions; empty when T selects nothing
  std::vector<StepKeys> keys;                // [fed]
  std::vector<KvPlane> kv;                   // [layers * 4], index layer * 4 + loop - 1; empty unless requested
  std::vector<std::int32_t> encoded_frontier;  // [1 + fed]
  std::vector<CodecBlock> blocks;            // sealed blocks in position order
};

struct RunRecord {
  std::string mode;                          // plan mode
  std::string executor;                      // "reference", "optimized"
  std::string profile;                       // "declared", "reordered", "double"
  std::string model_sha256;
  std::string trace;                         // trace name
  std::string config_json;                   // EffectiveConfig::canonical_json()
  std::vector<RequestRecord> requests;
};

}  // namespace loopgauge
