// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include "optimized/ops/numeric.cuh"

namespace loopgauge::optimized {

// `linear` (linear.cuh) for few rows, such as decode rows: the weights stream once from memory through registers, never through shared memory.
// Specification clause and reference counterpart: S-LIN-1, S-HEAD-1; reference/ops/linear.
// Shapes, layouts and requirements: as linear; besides, the kernel directly in front in the stream does not write the weights, which are asked for before
//   it has ended. The kernel for more than eight rows keeps the rules of programmatic_launch.cuh and lets the next one begin by its end.
// Numerics: exact products; 32-wide sums of two tensor-core steps from zero; a share of K is its 32-wide sums added in ascending order by rounded FP32
//   additions; the eight shares are added in ascending order; one rounding to BF16 (none for FP32).
// Determinism: K is cut by `in` alone, so an output has the same bits for any number of rows beside it.
// Launch: up to 8 rows: 16 outputs a block of eight warps, a share each. Up to 64: clusters of eight blocks, a share each, as many as are on the device at
//   once. More in pieces of 64, or of what fits shared memory (64 rows up to K = 12032, 48 up to 17152).
// Traffic: the weights once a piece; the rows once a block, or a share of them once a block of a cluster.
void linear_split_k(const Bfloat16* x, int x_stride, const Bfloat16* weight, Bfloat16* y, int rows, int in, int out, cudaStream_t stream);
void linear_split_k(const Bfloat16* x, int x_stride, const Bfloat16* weight, float* y, int rows, int in, int out, cudaStream_t stream);

}  // namespace loopgauge::optimized
