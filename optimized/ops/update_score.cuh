// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "optimized/ops/numeric.cuh"

namespace loopgauge::optimized {

// Specification clause and reference counterpart: S-MODEL-2, S-RMS-1..3, S-TSEL-2, S-TSEL-3; reference/ops/rms_norm,
//   reference/ops/token_selection.
// Shapes and layouts: stream_rows [rows, hidden] BF16, the residual stream after the last layer; previous [rows, hidden] BF16, the
//   loop's input rows H[r-1]; output [rows, hidden] BF16 receives H[r]; scores [rows] FP32, or nullptr to take none.
// Requires: as rms_norm. previous is intact since the loop began and aliases neither stream_rows nor output: two names for one
//   buffer make every score zero. previous may be nullptr when scores is.
// Numerics: bit-exact. score = sqrt(sum (H[r] - H[r-1])^2) / max(sqrt(sum H[r]^2), 1e-12): FP32 differences and products rounded,
//   sums in 16 lanes and a halving tree, IEEE square root and divide. The score of loop r + 1 is taken here.
// Determinism: a row depends on nothing but itself.
// Launch: one block of 128 threads a row; the two sums run in two warps.
// Traffic: reads stream_rows and previous once, writes output once.
void final_norm_update_score(const Bfloat16* stream_rows, const Bfloat16* weight, const Bfloat16* previous, Bfloat16* output, float* scores,
                             int rows, int hidden, float epsilon, cudaStream_t stream);

}  // namespace loopgauge::optimized
