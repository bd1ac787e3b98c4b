// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "optimized/kv/kv_layout.hpp"
#include "optimized/ops/numeric.cuh"

namespace loopgauge::optimized {

// Specification clause and reference counterpart: S-KVA-1; reference/kv/kv_planes.
// Shapes and layouts: keys, values: row i at + i * row_stride, [heads, head_dim] BF16, keys after RoPE; rows [count] give request, position
//   and loop (the plane that is written). The target is the BF16 page of (request, loop, position).
// Requires: the page is reserved and uploaded; no two rows name the same place; head_dim % 8 == 0; 16-byte aligned rows. A row with a
//   negative request is skipped.
// Numerics: bit-exact copy.
// Determinism: element-wise.
// Launch: one block of 128 threads a row.
// Traffic: reads and writes each row once.
void kv_append(const Bfloat16* keys, const Bfloat16* values, std::int64_t row_stride, const QueryRow* rows, const KvView& view, int layer,
               int count, cudaStream_t stream);

// rope of q and k and then kv_append in one pass; k and v of the rows are left as they are.
// Specification clause and reference counterpart: S-ROPE-4, S-KVA-1; reference/ops/rope, reference/kv/kv_planes.
// Shapes and layouts: qkv: row i at + i * row_stride, q, k and v of [heads, head_dim] BF16 side by side, q rotated in place; positions [count] int32 and
//   the table as rope; rows and target as kv_append.
// Requires: as both; head_dim % 16 == 0. q of a row with a negative request is rotated too, so its position is one of the table's.
// Numerics: bit-exact, as both.
// Determinism: element-wise.
// Launch: one block of 128 threads a row.
// Traffic: reads q, k and v once, writes q and the rows of the page once.
void rope_and_kv_append(Bfloat16* qkv, std::int64_t row_stride, const std::int32_t* positions, const Bfloat16* cosine, const Bfloat16* sine,
                        const QueryRow* rows, const KvView& view, int layer, int count, cudaStream_t stream);

}  // namespace loopgauge::optimized
