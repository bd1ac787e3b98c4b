// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace loopgauge::optimized {

enum class ExitVerdict : std::uint8_t { goes_on, fires, gate_not_finite };


// Specification clause and reference counterpart: S-EXIT-2, S-EXIT-3; ExitHazard of reference/ops/exit_gate.
// Shapes and layouts: gates [rows] FP32 logits of loop `loop`; survival [rows] FP32, 1 before loop 1, updated in place;
//   verdicts [rows].
// Requires: called once for each loop of a row, in order.
// Numerics: bit-exact: survival *= 1 - sigmoid(gate); fires when loop >= min_loops, threshold < 1 and 1 - survival >= threshold, in FP32.
// Determinism: element-wise.
// Launch: one thread a row.
// Traffic: negligible.
void exit_step(const float* gates, float* survival, ExitVerdict* verdicts, int rows, int loop, float threshold, int min_loops, cudaStream_t stream);

}  // namespace loopgauge::optimized
