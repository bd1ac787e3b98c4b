// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "optimized/ops/numeric.cuh"

namespace loopgauge::optimized {

// Specification clause and reference counterpart: S-EMB-1; reference/ops/embedding.
// Shapes and layouts: tokens [rows] int32 on the device; table [vocab, hidden] BF16; output [rows, hidden] BF16.
// Requires: tokens[i] < vocab (checked by trace validation and by argmax), a negative one leaves its output row alone; hidden % 8 == 0; 16-byte aligned rows.
// Numerics: bit-exact copy.
// Determinism: element-wise.
// Launch: one block of 128 threads a row.
// Traffic: reads and writes each row once.
void embedding(const std::int32_t* tokens, const Bfloat16* table, Bfloat16* output, int rows, int hidden, cudaStream_t stream);

}  // namespace loopgauge::optimized
