// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "optimized/ops/head_argmax.cuh"

namespace loopgauge::optimized {

// What decides the token after a row of logits. POD. The numbers are uniform_draw() of the position that is decided: which one is used
// depends on the decision, so a row brings all that it may need.
struct TokenDraw {
  float temperature = 0;                           // 0: greedy
  float draw = 0;                                  // from the target, or of a draft
  float acceptance = 0, residual = 0;              // with a candidate
  std::int32_t candidate = -1;                     // that the logits judge; negative: none, the token is drawn
  std::int32_t padding = 0;
  const float* draft = nullptr;                    // [vocab] device: what the candidate was drawn from; null: probability 1 (a given draft)
  float* distribution = nullptr;                   // [vocab] device, where the temperature is not 0: becomes softmax(logits / temperature)
};

// Specification clause and reference counterpart: S-SAMP-1, S-SAMP-3, S-SAMP-4; reference/ops/sampling, reference/run/token_choice.
// Shapes and layouts: logits [rows, vocab] FP32; draws [rows] in device memory; choices [rows] as head_argmax left them: the token of a row
//   with a temperature is replaced. confirmed [rows] or null: of such a row with a candidate 1 where that stands, else 0. Greedy rows are left alone.
// Requires: vocab >= 1; distinct distributions. A row with a non-finite logit draws nothing of use and must be refused.
// Numerics: exact: the divisions, the exponential, the order of the sums and the running sum are those of the specification, so equal
//   logits draw equal tokens.
// Determinism: exact.
// Launch: one block of 512 threads a row; the running sum is one thread's, in steps of 512 ids that the others bring.
// Traffic: logits twice, the distribution written twice and read up to three times, with a rejection four times and then the draft's twice; greedy rows
//   read nothing.
void draw_tokens(const float* logits, const TokenDraw* draws, HeadChoice* choices, std::int32_t* confirmed, int rows, int vocab, cudaStream_t stream);

}  // namespace loopgauge::optimized
