// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "optimized/ops/numeric.cuh"

namespace loopgauge::optimized {

// Specification clause and reference counterpart: S-RES-1; reference/ops/residual_add.
// Shapes and layouts: residual, addend [count] BF16; residual is updated in place.
// Requires: count % 8 == 0, 16-byte aligned pointers.
// Numerics: bit-exact: bf16(residual + addend).
// Determinism: element-wise.
// Launch: one thread for 8 elements, 256 threads a block.
// Traffic: reads both once, writes residual once.
void residual_add(Bfloat16* residual, const Bfloat16* addend, std::size_t count, cudaStream_t stream);

}  // namespace loopgauge::optimized
