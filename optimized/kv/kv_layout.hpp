// SPDX-License-Identifier: Apache-2.0
// Where every K/V byte lies, for host and device. SPEC.md: "Terms" (planes, LAST_EXITED), "KV base and residual quantization".
//
// BF16 page: the K and V rows of one loop for 64 consecutive positions of one request, all layers:
//     [layer][K|V][head][64 rows][head_dim] bf16
// so the tile of one (layer, K|V, head) is contiguous. Pages are allocated one by one; tables hold 64-bit device addresses.
//
// Sealed block: encoded K and V of a range of positions, all layers, in three allocations (one per memory category, each one contiguous
// range for a transfer). Stream r holds the rows that executed loop r, compact, in position order; n[r] is its row capacity:
//     base payload      stream 1:      [layer]{ K [head][n1][head_dim/2 bytes], V likewise }
//     residual payload  streams 2..4:  [layer][stream]{ K, V as above with n[stream] }
//     parameters        streams 1..4:  half2: K [layer][stream][head][ceil(n/64)][head_dim], then V [layer][stream][head][n][head_dim/64]
// half2 = (minimum, scale). Payload rows and K parameters are 16-byte aligned without padding: the K part comes first for that. A payload
// row is token-major: byte i holds channel 2i in its low and 2i + 1 in its high nibble, so a 32-bit word holds channels 8w..8w+7, channel
// 8w + j in bits 4j..4j+3.
#pragma once

#include <cstddef>
#include <cstdint>

#include "models/algorithm_config.hpp"

#if defined(__CUDACC__)
#define LOOPGAUGE_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define LOOPGAUGE_HOST_DEVICE inline
#endif

namespace loopgauge::optimized {

inline constexpr int kPageTokens = kGroupSize;       // page == K group == one 64-bit mask
inline constexpr int kMaxRequests = 256;             // live requests of one cache
inline constexpr int kSplitTokens = 256;             // decode attention: positions per split, at absolute multiples

enum class KvTensor : int { k = 0, v = 1 };

struct KvShape {
  int layers = 0;
  int heads = 0;
  int head_dim = 0;  // 64 or 128
};

LOOPGAUGE_HOST_DEVICE int page_count(int positions) { return (positions + kPageTokens - 1) / kPageTokens; }

// --- BF16 pages, in elements ---
LOOPGAUGE_HOST_DEVICE std::size_t page_tile_offset(const KvShape& shape, int layer, KvTensor tensor, int head) {
  return ((static_cast<std::size_t>(layer) * 2 + static_cast<std::size_t>(tensor)) * shape.heads + head) * kPageTokens * shape.head_dim;
}
LOOPGAUGE_HOST_DEVICE std::size_t page_row_offset(const KvShape& shape, int layer, KvTensor tensor, int head, int row_in_page) {
  return page_tile_offset(shape, layer, tensor, head) + static_cast<std::size_t>(row_in_page) * shape.head_dim;
}
LOOPGAUGE_HOST_DEVICE std::size_t page_bytes(const KvShape& shape) { return page_tile_offset(shape, shape.layers, KvTensor::k, 0) * 2; }

// --- sealed blocks, in bytes; `rows` = row capacity of each stream, index stream - 1 ---
LOOPGAUGE_HOST_DEVICE std::size_t payload_row_bytes(const KvShape& shape) { return static_cast<std::size_t>(shape.head_dim) / 2; }
LOOPGAUGE_HOST_DEVICE std::size_t payload_tensor_bytes(const KvShape& shape, std::uint32_t n) {
  return static_cast<std::size_t>(shape.heads) * n * payload_row_bytes(shape);
}
LOOPGAUGE_HOST_DEVICE std::size_t k_parameter_bytes(const KvShape& shape, std::uint32_t n) {
  return static_cast<std::size_t>(shape.heads) * ((n + kGroupSize - 1) / kGroupSize) * shape.head_dim * 4;
}
LOOPGAUGE_HOST_DEVICE std::size_t v_parameter_bytes(const KvShape& shape, std::uint32_t n) {
  return static_cast<std::size_t>(shape.heads) * n * (shape.head_dim / kGroupSize) * 4;
}
LOOPGAUGE_HOST_DEVICE std::size_t residual_layer_bytes(const KvShape& shape, const std::uint32_t* rows) {
  return 2 * (payload_tensor_bytes(shape, rows[1]) + payload_tensor_bytes(shape, rows[2]) + payload_tensor_bytes(shape, rows[3]));
}
LOOPGAUGE_HOST_DEVICE std::size_t k_parameter_layer_bytes(const KvShape& shape, const std::uint32_t* rows) {
  return k_parameter_bytes(shape, rows[0]) + k_parameter_bytes(shape, rows[1]) + k_parameter_bytes(shape, rows[2]) +
         k_parameter_bytes(shape, rows[3]);
}
LOOPGAUGE_HOST_DEVICE std::size_t v_parameter_layer_bytes(const KvShape& shape, const std::uint32_t* rows) {
  return v_parameter_bytes(shape, rows[0]) + v_parameter_bytes(shape, rows[1]) + v_parameter_bytes(shape, rows[2]) +
         v_parameter_bytes(shape, rows[3]);
}
LOOPGAUGE_HOST_DEVICE std::size_t base_payload_bytes(const KvShape& shape, const std::uint32_t* rows) {
  return static_cast<std::size_t>(shape.layers) * 2 * payload_tensor_bytes(shape, rows[0]);
}
LOOPGAUGE_HOST_DEVICE std::size_t residual_payload_bytes(const KvShape& shape, const std::uint32_t* rows) {
  return static_cast<std::size_t>(shape.layers) * residual_layer_bytes(shape, rows);
}
LOOPGAUGE_HOST_DEVICE std::size_t parameter_bytes(const KvShape& shape, const std::uint32_t* rows) {
  return static_cast<std::size_t>(shape.layers) * (k_parameter_layer_bytes(shape, rows) + v_parameter_layer_bytes(shape, rows));
}

// --- device tables; one entry per page of a request, shared by all layers and heads ---

// Addresses of the versions of one page. 0: absent.
struct PageTableEntry {
  std::uint64_t bf16[kLoops];  // index loop - 1
  std::uint64_t base_payload;  // of the block that covers the page
  std::uint64_t residual_payload;
  std::uint64_t parameters;
};

// Which rows of the page executed which loop. Bit i = position 64 * page + i. Nested: active[r] is a subset of active[r - 1].
// A row not active at loop r inherits: its logical plane r is plane r - 1 (LAST_EXITED).
struct ActivityMap {
  std::uint64_t active[kLoops];  // active[0]: the row exists
  std::uint32_t rank[kLoops];    // compact row, in its block's stream, of the page's first active row
  std::uint32_t rows[kLoops];    // row capacity of the block's streams (the block's layout)
};

struct RequestTable {
  PageTableEntry* pages;  // [page_capacity]
  ActivityMap* maps;      // [page_capacity]
  std::uint32_t page_capacity;
};

// What kernels receive by value. `requests` is device memory, indexed by request slot.
struct KvView {
  KvShape shape;
  const RequestTable* requests;
};

// One row of a batch of decode queries. Rows are independent: a row's result depends on nothing but itself and its request's K/V.
struct QueryRow {
  std::int32_t request;           // request slot; negative: padding, the row is skipped and its output left alone
  std::int32_t position;          // absolute; the row reads positions 0..position
  std::int32_t loop;              // 1..4: logical plane that is read
  std::int32_t encoded_frontier;  // E as this query sees it: positions below are read encoded, the rest as BF16
  std::int32_t reference;         // slot of the attention reference state; negative: none
};

// --- helpers for readers ---

// Loop (1..loop) whose plane holds the logical version of row `row_in_page` at loop `loop`.
LOOPGAUGE_HOST_DEVICE int resident_loop(const ActivityMap& map, int row_in_page, int loop) {
  int resident = 1;
  for (int r = 2; r <= loop; ++r) {
    if ((map.active[r - 1] >> row_in_page) & 1u) resident = r;
  }
  return resident;
}

// Number of set bits of `mask` below bit `bit` (0..63).
LOOPGAUGE_HOST_DEVICE int bits_below(std::uint64_t mask, int bit) {
  const std::uint64_t below = mask & ((std::uint64_t{1} << bit) - 1);
#if defined(__CUDA_ARCH__)
  return __popcll(below);
#else
  return __builtin_popcountll(below);
#endif
}

// Mask of the rows of page `page` at positions [begin, end).
LOOPGAUGE_HOST_DEVICE std::uint64_t page_mask(int page, int begin, int end) {
  const int first = begin - page * kPageTokens, last = end - page * kPageTokens;
  const std::uint64_t from = first <= 0 ? ~std::uint64_t{0} : first >= kPageTokens ? 0 : ~std::uint64_t{0} << first;
  const std::uint64_t to = last <= 0 ? 0 : last >= kPageTokens ? ~std::uint64_t{0} : ~(~std::uint64_t{0} << last);
  return from & to;
}

// Addresses inside the block of a page for (layer, stream, tensor, head): payload row 0 and parameters of row/group 0.
struct StreamTile {
  const std::uint8_t* payload;      // + row * head_dim / 2
  const std::uint32_t* parameters;  // half2 words. K: + (row / 64) * head_dim + channel. V: + row * (head_dim / 64) + channel / 64
};
LOOPGAUGE_HOST_DEVICE StreamTile stream_tile(const KvShape& shape, const PageTableEntry& page, const ActivityMap& map, int layer,
                                             int stream, KvTensor tensor, int head) {
  // Every size is in proportion to a number of rows or of groups, so these are summed first: of the stream, of those before it, of all.
  std::uint32_t rows = 0, rows_before = 0, all_rows = 0, groups = 0, groups_before = 0, all_groups = 0;
  for (int s = 1; s <= kLoops; ++s) {
    const std::uint32_t n = map.rows[s - 1], g = (n + kGroupSize - 1) / kGroupSize;
    rows = s == stream ? n : rows;
    groups = s == stream ? g : groups;
    rows_before += s < stream ? n : 0;
    groups_before += s < stream ? g : 0;
    all_rows += n;
    all_groups += g;
  }
  const auto heads = static_cast<std::uint64_t>(shape.heads);
  const bool base = stream == 1, v = tensor == KvTensor::v;
  const std::uint64_t layer_rows = base ? rows : all_rows - map.rows[0], late_before = base ? 0 : rows_before - map.rows[0];
  const std::uint64_t payload_rows = heads * (2 * (static_cast<std::uint64_t>(layer) * layer_rows + late_before) + (v ? rows : 0)) +
                                     static_cast<std::uint64_t>(head) * rows;
  const std::uint64_t payload = (base ? page.base_payload : page.residual_payload) + payload_rows * payload_row_bytes(shape);
  const std::uint64_t k_groups = heads * (static_cast<std::uint64_t>(v ? shape.layers : layer) * all_groups + (v ? 0 : groups_before)) +
                                 (v ? 0 : static_cast<std::uint64_t>(head) * groups);
  const std::uint64_t v_rows = v ? heads * (static_cast<std::uint64_t>(layer) * all_rows + rows_before) + static_cast<std::uint64_t>(head) * rows : 0;
  const std::uint64_t parameters = page.parameters + (k_groups * shape.head_dim + v_rows * (shape.head_dim / kGroupSize)) * 4;
  return {reinterpret_cast<const std::uint8_t*>(payload), reinterpret_cast<const std::uint32_t*>(parameters)};
}

}  // namespace loopgauge::optimized
