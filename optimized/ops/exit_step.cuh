// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include "optimized/ops/prepare_rows.cuh"

namespace loopgauge::optimized {

// Specification clause and reference counterpart: S-EXIT-2, S-EXIT-3; ExitHazard of reference/ops/exit_gate.
// Shapes and layouts: gates [count] FP32 logits of the rows' own loops; rows [count], padding skipped; exits [slots], updated in place.
// Requires: called once for each loop of a row, in order; no two rows of one request. `delay`: loops after the decision that still run.
// Numerics: bit-exact: survival *= 1 - sigmoid(gate); the rule fires when loop >= min_loops, threshold < 1 and 1 - survival >= threshold, in
//   FP32, and ends the row after loop + delay. The first decision stands. A gate that is not finite is noted.
// Determinism: element-wise.
// Launch: one thread a row.
// Traffic: negligible.
void exit_step(const float* gates, const QueryRow* rows, ExitState* exits, int count, float threshold, int min_loops, int delay, cudaStream_t stream);

}  // namespace loopgauge::optimized
