// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <span>
#include <vector>

#include "models/fault.hpp"
#include "optimized/kv/kv_layout.hpp"

namespace loopgauge::optimized {

inline constexpr int kPrefillTileRows = 128;  // at most

// Query rows row_begin..row_begin + row_count of one request, ascending positions.
struct PrefillSegment {
  std::int32_t request = 0;
  std::int32_t loop = 1;
  std::int32_t encoded_frontier = 0;  // multiple of 64; positions below are read encoded (`streaming`: the start of the rows' window), else 0
  std::int32_t row_begin = 0;         // index into q, positions and output
  std::int32_t row_count = 0;
};
using PrefillTile = PrefillSegment;  // at most kPrefillTileRows rows

// Cuts segments into tiles, in order: of kPrefillTileRows rows, or of half as many where that leaves no multiprocessor with two tiles. The result
// of attention does not depend on the cut.
std::vector<PrefillTile> make_prefill_tiles(std::span<const PrefillSegment> segments, int heads);

// Over encoded history a row's keys are taken in splits of so many at absolute positions, whose results are combined in ascending order.
inline constexpr int kPrefillSplitPages = 32;
inline constexpr int kPrefillSplitTokens = kPrefillSplitPages * kPageTokens;
LOOPGAUGE_HOST_DEVICE int prefill_splits(int length) { return length <= kPrefillSplitTokens ? 1 : (length + kPrefillSplitTokens - 1) / kPrefillSplitTokens; }

// Bytes of AttentionPrefillArguments::workspace for `row_count` rows, none at or beyond `max_length`, of which any may read encoded history.
std::size_t attention_prefill_workspace_bytes(const KvShape& shape, int row_count, int max_length);

struct AttentionPrefillArguments {
  KvView kv;
  int layer = 0;
  const __nv_bfloat16* q = nullptr;         // [rows, heads, head_dim] after RoPE, rows q_row_stride elements apart
  std::int64_t q_row_stride = 0;            // >= heads * head_dim
  const std::int32_t* positions = nullptr;  // [rows] absolute position of each row; negative: padding, its output is not written
  const PrefillTile* tiles = nullptr;       // [tile_count]
  int tile_count = 0;
  __nv_bfloat16* output = nullptr;          // [rows, heads * head_dim]
  bool encoded_history = true;              // false promises that every tile has encoded_frontier 0: the next three are then not needed
  int row_count = 0;                        // rows of the launch
  int max_length = 0;                       // at least every row's position + 1
  void* workspace = nullptr;                // attention_prefill_workspace_bytes, 16-byte aligned; written before it is read
  Fault fault = Fault::none;
};

// Specification clause and reference counterpart: SPEC.md "Token-sparse prefill" (each active query attends to every causal position of
//   the logical plane r, inherited rows included), "Model arithmetic" (scores, softmax, PV); reference/ops/attention.
// Shapes and layouts: above; K/V as kv_layout.hpp. The rows' own K/V of `loop` are already in their pages and marked active.
// Requires: compute capability 9.0, head_dim 64 or 128; q, output 16-byte aligned, strides multiples of 8; rows of a segment ascending. All pointers device memory.
// Numerics: products of BF16 exact, FP32 accumulation on tensor cores; online FP32 softmax; probabilities enter PV as BF16 high + low
//   parts (relative error 2^-17), reconstructed K/V likewise; division in FP32, one rounding to BF16.
// Determinism: keys in blocks of 64 absolute positions; a row's bits depend on nothing but the row and its request's K/V.
// Launch: tiles without encoded history run in attention_prefill_wgmma and those with it in attention_prefill_encoded: a tile's own frontier decides.
// Traffic: as these two.
void attention_prefill(const AttentionPrefillArguments& arguments, cudaStream_t stream);

}  // namespace loopgauge::optimized
