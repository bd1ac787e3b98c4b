// SPDX-License-Identifier: Apache-2.0
// Predicted bytes by category for the declared storage layout. Pure integer arithmetic: nothing is measured here; what the runtime's
// allocator reports must agree.
//
// Layout (per layer and head; D = head_dim, E = encoded frontier):
//   codes        K and V: one nibble per value, token-major, ceil(D / 2) bytes per compact row; one arena per (layer, stream, K|V), rows of
//                successive blocks adjacent, so padding to whole 64-row pages occurs once per arena
//   parameters   FP16 minimum and scale: K per 64 compact rows of one block and channel (groups never cross blocks), V per compact row and
//   64-channel part activity     streams 2, 3, 4: one 64-bit mask and one 32-bit rank base per 64 positions, once per request, shared by
//   all layers;
//                stream 2 only where an exit after loop 1 is possible
//   BF16 tail    K and V of four planes for positions >= E, inherited rows materialised, in pages of 64 positions
//   BF16 planes  the same layout where nothing is encoded (Q off, or the prompt before it is encoded)
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "models/algorithm_config.hpp"
#include "models/memory_category.hpp"
#include "models/model_config.hpp"

namespace loopgauge::harness {

struct MemoryBytes {
  // Bytes by category. `padding` is 0 in logical and what rounding to pages adds in physical figures, so that each total is a sum.
  std::array<std::int64_t, kMemoryCategories> logical{}, physical{};
  std::int64_t logical_of(MemoryCategory category) const { return logical[static_cast<int>(category)]; }
  std::int64_t physical_of(MemoryCategory category) const { return physical[static_cast<int>(category)]; }
  std::int64_t logical_total() const;
  std::int64_t physical_total() const;
  // The categories that hold K/V in whatever form: payloads, parameters, activity maps, padding, tail, planes, inherited references.
  std::int64_t logical_kv() const;
  std::int64_t physical_kv() const;
};

struct RequestMemory {
  int prompt_length = 0;
  int committed = 0;  // >= prompt_length
  // Active tokens at loops 3 and 4: ascending positions as recorded. Empty: the budgets of SPEC.md are used, spread over each window
  // evenly (exact in every whole window, an estimate only where a frontier cuts one).
  std::array<std::vector<std::int32_t>, 2> active;
  std::vector<std::uint8_t> exit_depths;  // of positions P.., empty: all four loops
};

// Bytes that are a choice of the runtime and not of the layout; the prediction passes them through.
struct RuntimeReservation {
  std::int64_t graphs = 0, workspace = 0, conversion_scratch = 0, transfer_buffers = 0;
};

struct MemoryInput {
  std::vector<RequestMemory> requests;
  int live_tokens = 1;        // decode rows of one request in flight at once: one attention reference slot each
  int windows_in_flight = 1;  // prefill windows of one request with live hidden rows (more than one: wcpb)
  RuntimeReservation runtime;
};

struct MemoryPrediction {
  MemoryBytes steady;               // every request at its committed length, one decode step in progress
  MemoryBytes peak;                 // the larger of `steady` and the moment before the longest prompt is encoded, the others steady
  MemoryBytes dense;                // steady bytes of the same requests with all switches off
  double kv_ratio_logical() const;  // dense K/V bytes / K/V bytes
  double kv_ratio_physical() const;
  double payload_ratio() const;  // encoded positions only: BF16 bytes / code bytes
  std::int64_t encoded_positions_bf16_bytes = 0;
};

MemoryPrediction predict_memory(const ModelConfig& model, const EffectiveConfig& config, const MemoryInput& input);

}  // namespace loopgauge::harness
