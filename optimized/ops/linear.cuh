// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <string_view>

#include "optimized/cuda_executor.hpp"
#include "optimized/ops/numeric.cuh"
#include "optimized/runtime/cublas_lt.hpp"

namespace loopgauge::optimized {

std::string_view to_string(LinearImplementation implementation);

// What `automatic` means for the rows of a prompt, by shape. An explicit choice is returned as it is.
LinearImplementation resolve(LinearImplementation implementation, int in, int out);
// What `automatic` means for decode rows and for the head: split_k, since they are few. Rows of either kind keep to their path beside each
// other, so a row's bits follow from its kind alone.
inline LinearImplementation for_decode_rows(LinearImplementation implementation) {
  return implementation == LinearImplementation::automatic ? LinearImplementation::split_k : implementation;
}

// Specification clause and reference counterpart: S-LIN-1, S-HEAD-1; reference/ops/linear.
// Shapes and layouts: x [rows, in] BF16, rows `x_stride` elements apart; weight [out, in] BF16; y [rows, out] BF16 or FP32.
// Requires: in % 8 == 0, x_stride % 8 == 0, 16-byte aligned pointers; out % 8 == 0 with BF16 and out % 4 == 0 with FP32 output.
// Numerics: FP32 accumulation of exact products in another order than the reference, one rounding to BF16 (none for FP32).
// Determinism: the same bits run to run and for any number of rows beside it (library: checked by test at the shapes in use).
// Launch: library; tiles of 16 x 64 (at most 16 rows), 32 x 64 (at most 64 rows) and 128 x 128 outputs; or linear_split_k.
// Traffic: the weights once per row tile.
void linear(CublasLt& library, LinearImplementation implementation, const Bfloat16* x, int x_stride, const Bfloat16* weight, Bfloat16* y,
            int rows, int in, int out, cudaStream_t stream);
void linear(CublasLt& library, LinearImplementation implementation, const Bfloat16* x, int x_stride, const Bfloat16* weight, float* y,
            int rows, int in, int out, cudaStream_t stream);

}  // namespace loopgauge::optimized
