// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "optimized/kv/kv_layout.hpp"
#include "optimized/ops/numeric.cuh"

namespace loopgauge::optimized {

inline constexpr int kMostProjectionRows = 8;

// What lies between two attentions of a decode pass. All pointers are on the device; matrices are [out, in], vectors [hidden], BF16.
struct DecodeProjectionsArguments {
  int rows = 0;                                  // 1..kMostProjectionRows
  int hidden = 0, heads = 0, head_dim = 0, intermediate = 0;
  float epsilon = 0;

  // Of the layer whose attention is over. attended null: none, a loop begins and the residual rows are its input.
  const Bfloat16* attended = nullptr;            // [rows, heads * head_dim]
  const Bfloat16* o_proj = nullptr;
  const Bfloat16* norm_after_attention = nullptr;
  const Bfloat16* norm_before_mlp = nullptr;
  const Bfloat16* gate_up = nullptr;             // gate rows, then up rows
  const Bfloat16* down_proj = nullptr;
  const Bfloat16* norm_after_mlp = nullptr;      // needed when a layer follows

  // Of the layer whose attention comes next. qkv_weight null: none, the loop ends.
  const Bfloat16* input_norm = nullptr;
  const Bfloat16* qkv_weight = nullptr;          // rows of q, k, v
  int next_layer = 0;
  const QueryRow* query_rows = nullptr;          // [rows]: where k and v belong
  const std::int32_t* positions = nullptr;       // [rows], of padding too
  const Bfloat16* cosine = nullptr;              // [positions, head_dim / 2]
  const Bfloat16* sine = nullptr;
  KvView kv{};

  // [rows, hidden] each. Before: `residual` is the residual stream. Afterwards, where a layer follows, it is that again; where the loop ends,
  // `residual_after_attention` is, and `projected` (what down_proj made) is still to be normed and added.
  Bfloat16* residual = nullptr;
  Bfloat16* residual_after_attention = nullptr;
  Bfloat16* projected = nullptr;
  Bfloat16* activated = nullptr;                 // scratch [rows, intermediate]
  Bfloat16* qkv = nullptr;                       // [rows, 3 * heads * head_dim]: q after RoPE in its place; the places of k and v are not written
  std::uint32_t* arrivals = nullptr;             // [kProjectionArrivals], zero, 16-byte aligned
};
inline constexpr int kProjectionArrivals = 4;

// Whether the launch below covers these extents on the current device.
bool decode_projections_cover(int rows, int hidden, int heads, int head_dim, int intermediate);

// o_proj, norm, residual addition, norm, gate and up projection, SwiGLU, down_proj, norm, residual addition, norm, q/k/v projection, RoPE and the
// append of K and V, in one launch.
// Specification clause and reference counterpart: S-LIN-1, S-RMS-1..3, S-RES-1, S-MLP-1, S-ROPE-4 and S-KVA-1, one after the other;
//   reference/ops/ of those names.
// Shapes and layouts: above. Rows whose request is negative are computed and not appended; their positions are the table's too.
// Requires: decode_projections_cover(...); 16-byte aligned pointers; arrivals zeroed in stream order since the last launch with them.
// Numerics: the bits of linear_split_k, rms_norm, rms_norm_residual_add, swiglu, rope and kv_append applied one after the other.
// Determinism: as those; the number of blocks does not show.
// Launch: cooperative, one block of 288 threads a multiprocessor or tile, programmatic: weights are requested before the kernel in front has ended, and
//   the next kernel may begin with the last product (programmatic_launch.cuh); its blocks find room beside these where there are one or two rows. Blocks
//   meet between two products, while the ring of requested weights fills with those of the next. Throws UnsupportedError where extents are not covered.
// Traffic: the weights once; the rows are read by every block.
void decode_projections(const DecodeProjectionsArguments& arguments, cudaStream_t stream);

}  // namespace loopgauge::optimized
