// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include "optimized/ops/numeric.cuh"

namespace loopgauge::optimized {

// Specification clause and reference counterpart: S-GATE-1; reference/ops/exit_gate.
// Shapes and layouts: rows [rows, hidden] BF16 normed states; weight [hidden] BF16; bias [1] BF16; logits [rows] FP32.
// Requires: nothing more.
// Numerics: bit-exact: FP32 dot in 16 lanes and a halving tree, then + bias.
// Determinism: a row depends on nothing but itself.
// Launch: half a warp a row, 8 rows a block.
// Traffic: reads each row once.
void exit_gate(const Bfloat16* states, const Bfloat16* weight, const Bfloat16* bias, float* logits, int rows, int hidden, cudaStream_t stream);

}  // namespace loopgauge::optimized
