// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include "optimized/ops/numeric.cuh"

namespace loopgauge::optimized {

// Specification clause and reference counterpart: S-MLP-1, S-ELEM-1, S-ELEM-3; reference/ops/swiglu.
// Shapes and layouts: gate_up [rows, 2 * intermediate] BF16, gate in the first half of a row and up in the second; output
//   [rows, intermediate] BF16.
// Requires: intermediate % 8 == 0; 16-byte aligned rows.
// Numerics: bit-exact: bf16(bf16(silu(gate)) * up), silu as in binary64 and rounded to FP32 once; binary32 where its error cannot change the bits.
// Determinism: element-wise.
// Launch: one thread for 8 outputs, 256 threads a block.
// Traffic: reads gate_up once, writes output once.
void swiglu(const Bfloat16* gate_up, Bfloat16* output, int rows, int intermediate, cudaStream_t stream);

}  // namespace loopgauge::optimized
