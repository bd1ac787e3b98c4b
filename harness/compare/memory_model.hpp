// SPDX-License-Identifier: Apache-2.0
// Predicted bytes by category for the declared storage layout. Pure integer arithmetic: nothing is measured here; what an allocator
// reports must agree.
//
// Layout, for L layers, A heads, D = head_dim, E = encoded frontier, n = committed length:
//   base payload, residual payload   of each sealed block and stream: L * A * rows * 2 (K, V) * ceil(D / 2) bytes, rows compact
//   parameters     FP16 minimum and scale (4 bytes a group): K one group per 64 compact rows of a block's stream and channel, V one per
//                  compact row and 64-channel part
//   activity maps  per request, shared by layers and heads, per page of 64 positions: for streams 3 and 4 (and 2, where an exit after
//                  loop 1 is possible) a 64-bit mask and a 32-bit rank base; physically one fixed table entry per page
//   BF16 tail      (Q on, positions [E, n)) and
//   BF16 planes    (Q off, positions [0, n)): the K/V rows that executed a loop, 2 * D * 2 bytes per layer, head and loop; physically whole
//                  pages of 64 positions in four planes; an inherited row is found through the activity maps and leaves its slot unused
//   inherited references       one page table entry per page and request
//   attention reference state  S only, per live token, layer and head: key masks of one bit per position, m, O_ref, C_ref
//   hidden rows    BF16 rows of live decode tokens; in prefill the rows of the windows in flight, before and after a loop where T scores
//   padding        what whole pages and table capacity add to the above: physical minus logical, so that each total is a sum
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "models/algorithm_config.hpp"
#include "models/memory_category.hpp"
#include "models/model_config.hpp"

namespace loopgauge::harness {

inline constexpr int kPageTokens = kGroupSize;
inline constexpr std::int64_t kActivityMapEntryBytes = 64;  // four masks, four rank bases, four row capacities
inline constexpr std::int64_t kPageTableEntryBytes = 56;    // four BF16 planes and three regions of a sealed block

struct MemoryBytes {
  // `padding` is 0 in logical; in physical it is what the other categories take beyond their logical bytes.
  std::array<std::int64_t, kMemoryCategories> logical{}, physical{};
  std::int64_t kv_padding = 0;  // the part of `padding` that belongs to K/V and what finds it
  std::int64_t logical_of(MemoryCategory category) const { return logical[static_cast<std::size_t>(category)]; }
  std::int64_t physical_of(MemoryCategory category) const { return physical[static_cast<std::size_t>(category)]; }
  std::int64_t logical_total() const;
  std::int64_t physical_total() const;
  // K/V in whatever form, with what is needed to find it: payloads, parameters, activity maps, tail, planes, inherited references, and in
  // physical their padding. Attention reference state, which is no K/V, counts with none of its bytes.
  std::int64_t logical_kv() const;
  std::int64_t physical_kv() const;
};

struct RequestMemory {
  int prompt_length = 0;
  int committed = 0;  // >= prompt_length
  int capacity = 0;   // positions that the tables are sized for; 0: committed
  // Active positions at loops 3 and 4, ascending, as recorded. Empty: the budgets of SPEC.md spread evenly over each window, which gives
  // the exact count for every whole window and an estimate where the frontier cuts one.
  std::array<std::vector<std::int32_t>, 2> active;
  std::vector<std::uint8_t> exit_depths;  // of positions P..; empty: all four loops
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
  MemoryBytes steady;                // every request at its committed length, between two submissions
  MemoryBytes peak;                  // the larger of `steady` and the end of the longest prompt's prefill, the others steady
  MemoryBytes dense;                 // steady bytes of the same requests with all switches off
  std::int64_t encoded_as_bf16 = 0;  // four BF16 planes of the encoded positions, bytes
  double kv_ratio_logical() const;   // dense K/V bytes / K/V bytes
  double kv_ratio_physical() const;
  double payload_ratio() const;  // encoded_as_bf16 / payload bytes; NaN when nothing is encoded
};

// Throws InternalError when a request's committed length is below its prompt length or the prompt is empty.
MemoryPrediction predict_memory(const ModelConfig& model, const EffectiveConfig& config, const MemoryInput& input);

// Bytes of the model's BF16 parameters and of its BF16 RoPE table.
std::int64_t weight_bytes(const ModelConfig& model);

}  // namespace loopgauge::harness
