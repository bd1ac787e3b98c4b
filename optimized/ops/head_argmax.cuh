// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace loopgauge::optimized {

// Specification clause and reference counterpart: SPEC.md "Model arithmetic", argmax ties go to the lowest id; reference/ops/head_argmax.
// Shapes and layouts: logits [rows, vocab] FP32; tokens [rows] int32.
// Requires: vocab >= 1. A NaN never wins; a row of NaN gives token 0.
// Numerics: exact; logits compare as numbers (-0 equals +0).
// Determinism: the result does not depend on the order of the reduction.
// Launch: one block of 512 threads a row.
// Traffic: reads the logits once.
void head_argmax(const float* logits, std::int32_t* tokens, int rows, int vocab, cudaStream_t stream);

}  // namespace loopgauge::optimized
