// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include "optimized/ops/numeric.cuh"

namespace loopgauge::optimized {

// `linear` (linear.cuh) for few rows, such as decode rows: the weights stream once from memory through registers, never through shared memory.
// Specification clause and reference counterpart: S-LIN-1, S-HEAD-1; reference/ops/linear.
// Shapes, layouts and requirements: as linear.
// Numerics: exact products; 32-wide sums of two tensor-core steps from zero; a warp adds its share of them in ascending order by rounded FP32
// additions; the shares of the eight warps are added in ascending order; one rounding to BF16 (none for FP32).
// Determinism: K is cut by `in` alone, so an output has the same bits for any number of rows beside it.
// Launch: 16 or 32 outputs a block of eight warps, each an eighth of K; up to 64 rows a launch, more in pieces of 64.
// Traffic: the weights once per 64 rows.
void linear_split_k(const Bfloat16* x, int x_stride, const Bfloat16* weight, Bfloat16* y, int rows, int in, int out, cudaStream_t stream);
void linear_split_k(const Bfloat16* x, int x_stride, const Bfloat16* weight, float* y, int rows, int in, int out, cudaStream_t stream);

}  // namespace loopgauge::optimized
