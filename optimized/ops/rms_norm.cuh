// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include "optimized/ops/numeric.cuh"

namespace loopgauge::optimized {

// Specification clause and reference counterpart: S-RMS-1..3; reference/ops/rms_norm.
// Shapes and layouts: input, output [rows, hidden] BF16 row-major; weight [hidden] BF16. output may be input.
// Requires: hidden % 8 == 0, hidden <= 16384; 16-byte aligned rows.
// Numerics: bit-exact. FP32 sum of squares in 16 lanes and a halving tree, / FP32(hidden), + epsilon, IEEE square root and
//   divide, bf16(x * inverse), bf16(weight * that).
// Determinism: a row depends on nothing but itself.
// Launch: one block of 128 threads a row.
// Traffic: reads and writes each row once; the row waits in shared memory between the two passes.
void rms_norm(const Bfloat16* input, const Bfloat16* weight, Bfloat16* output, int rows, int hidden, float epsilon, cudaStream_t stream);

// Specification clause and reference counterpart: S-RMS-1..3, then S-RES-1; reference/ops/rms_norm,
//   reference/ops/residual_add.
// Shapes and layouts: input, residual [rows, hidden] BF16; residual is updated in place.
// Requires: as rms_norm; input and residual are different buffers.
// Numerics: bit-exact: residual = bf16(residual + rms_norm(input)).
// Determinism: a row depends on nothing but itself.
// Launch: one block of 128 threads a row.
// Traffic: reads input and residual once, writes residual once.
void rms_norm_residual_add(const Bfloat16* input, const Bfloat16* weight, Bfloat16* residual, int rows, int hidden, float epsilon,
                           cudaStream_t stream);

// Specification clause and reference counterpart: S-RMS-1..3, S-RES-1, then S-RMS-1..3 of the sum; reference/ops/rms_norm,
//   reference/ops/residual_add.
// Shapes and layouts: input, residual, output [rows, hidden] BF16; residual is updated in place; weight, next_weight [hidden] BF16.
// Requires: as rms_norm; input, residual and output are different buffers.
// Numerics: bit-exact: residual = bf16(residual + rms_norm(input)), output = rms_norm(residual) with next_weight.
// Determinism: a row depends on nothing but itself.
// Launch: one block of 128 threads a row.
// Traffic: reads input and residual once, writes residual and output once.
void rms_norm_residual_add_rms_norm(const Bfloat16* input, const Bfloat16* weight, Bfloat16* residual, const Bfloat16* next_weight, Bfloat16* output,
                                    int rows, int hidden, float epsilon, cudaStream_t stream);

}  // namespace loopgauge::optimized
