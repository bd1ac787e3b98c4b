// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace loopgauge::optimized {

// Specification clause and reference counterpart: SPEC.md "Exits", hazard; reference/ops/exit_gate (ExitHazard).
// Shapes and layouts: gates [rows] FP32 logits of loop `loop`; survival [rows] FP32, 1 before loop 1, updated in place;
//   fires [rows] uint8: 1 when the rule fires after this loop.
// Requires: called once for each loop of a row, in order.
// Numerics: bit-exact: survival *= 1 - sigmoid(gate); fires when loop >= min_loops, threshold < 1 and 1 - survival >= threshold, in FP32.
// Determinism: element-wise.
// Launch: one thread a row.
// Traffic: negligible.
void exit_step(const float* gates, float* survival, std::uint8_t* fires, int rows, int loop, float threshold, int min_loops, cudaStream_t stream);

}  // namespace loopgauge::optimized
