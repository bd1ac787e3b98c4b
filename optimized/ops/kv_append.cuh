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

}  // namespace loopgauge::optimized
