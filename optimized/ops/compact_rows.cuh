// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "optimized/ops/numeric.cuh"

namespace loopgauge::optimized {

// Specification clause and reference counterpart: S-TSEL-6, S-TSEL-7; run_rows of reference/run/recurrent_model.
// Shapes and layouts: source, target [*, hidden] BF16; indices [rows] int32 on the device, row numbers in the larger array;
//   a negative one leaves its target row alone.
//   gather_rows:  target[i] = source[indices[i]];   scatter_rows: target[indices[i]] = source[i].
// Requires: hidden % 8 == 0; 16-byte aligned rows; scatter indices are distinct.
// Numerics: bit-exact copies.
// Determinism: element-wise.
// Launch: one block of 128 threads a row.
// Traffic: reads and writes each row once.
void gather_rows(const Bfloat16* source, const std::int32_t* indices, Bfloat16* target, int rows, int hidden, cudaStream_t stream);
void scatter_rows(const Bfloat16* source, const std::int32_t* indices, Bfloat16* target, int rows, int hidden, cudaStream_t stream);

}  // namespace loopgauge::optimized
