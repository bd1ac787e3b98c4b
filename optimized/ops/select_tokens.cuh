// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace loopgauge::optimized {

// Specification clause and reference counterpart: S-TSEL-4, S-TSEL-5, S-TSEL-10; reference/ops/token_selection.
// Shapes and layouts: candidates [count] int32 absolute positions of active[r-1], ascending; scores [count] FP32, scores[i] of
//   candidates[i]; selected [budget] int32 receives positions, ascending. One selection window of one request. The candidate at position
//   `reserved`, if there is one, comes before all others (S-TSEL-10); -1 reserves nothing.
// Requires: 1 <= budget <= count; scores are finite (the caller checks) and compare as numbers.
// Numerics: exact, ties included.
// Determinism: the selected set is unique.
// Launch: one block of 256 threads finds the threshold (four passes over 8 bits each, a digit a thread) and compacts by scans (CUB).
// Traffic: reads scores and candidates five times, from cache.
void select_tokens(const std::int32_t* candidates, const float* scores, int count, int budget, int reserved, std::int32_t* selected, cudaStream_t stream);

}  // namespace loopgauge::optimized
