// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace loopgauge::optimized {

struct HeadChoice {
  std::int32_t token;              // highest logit, ties to the lowest id
  std::int32_t first_non_finite;   // lowest id whose logit is not finite; -1: all are
};

// Specification clause and reference counterpart: S-HEAD-2; reference/ops/head_argmax.
// Shapes and layouts: logits [rows, vocab] FP32; choices [rows].
// Requires: vocab >= 1. With a non-finite logit the token is unspecified and the row must be refused.
// Numerics: exact; logits compare as numbers (-0 equals +0).
// Determinism: the result does not depend on the order of the reduction.
// Launch: one block of 512 threads a row.
// Traffic: reads the logits once.
void head_argmax(const float* logits, HeadChoice* choices, int rows, int vocab, cudaStream_t stream);

// tokens[slots[row]] = choices[row].token for slots >= 0 (S-ASYNC-2: the token is fed to its successor where it was computed). `slots` [rows]
// on the device, distinct.
void keep_tokens(const HeadChoice* choices, const std::int32_t* slots, std::int32_t* tokens, int rows, cudaStream_t stream);

}  // namespace loopgauge::optimized
