// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "models/fault.hpp"
#include "optimized/kv/kv_layout.hpp"

namespace loopgauge::optimized {

struct AttentionDecodeArguments {
  KvView kv;
  int layer = 0;
  const __nv_bfloat16* q = nullptr;  // [rows, heads, head_dim] after RoPE, rows q_row_stride elements apart
  std::int64_t q_row_stride = 0;
  const QueryRow* rows = nullptr;  // [row_count]
  int row_count = 0;
  int max_length = 0;               // host bound: every row's position + 1 is at most this (sizes the grid, never a result)
  __nv_bfloat16* output = nullptr;  // [rows, heads * head_dim]
  void* workspace = nullptr;        // attention_decode_workspace_bytes
  Fault fault = Fault::none;
};

// Bytes of partial results: row_count * heads * splits * (head_dim + 2) floats, splits of kSplitTokens.
std::size_t attention_decode_workspace_bytes(const KvShape& shape, int row_count, int max_length);

// Specification clause and reference counterpart: SPEC.md "Model arithmetic" (scores, softmax, PV), "Terms" (LAST_EXITED history),
//   "KV base and residual quantization" (positions below E are read as X_hat[r], the rest BF16); reference/ops/attention.
// Shapes and layouts: above; K/V as kv_layout.hpp. The row's own K/V of its loop are already in their page and marked active.
// Requires: head_dim 64 or 128; q rows 16-byte aligned.
// Numerics: FP32 sums. BF16 rows: products exact. Encoded K: per stream, codes times q * scale on tensor cores, q * scale as FP16 high and
//   low parts under a common power of two (error 2^-22 of the largest), q * minimum in FP32. Encoded V: dec() of every value as the
//   specification rounds it, summed stream by stream. One rounding to BF16.
// Determinism: splits of 256 positions at absolute multiples, combined ascending; a row's bits do not depend on the other rows of the
//   batch, their order, max_length or where pages lie.
// Launch: (splits, heads, rows) CTAs of 128 threads (warp = page), then (heads, rows) for the combination.
// Traffic: K and V rows of the logical plane once: 4 * head_dim bytes a BF16 key, head_dim bytes a stream row plus parameters.
void attention_decode(const AttentionDecodeArguments& arguments, cudaStream_t stream);

}  // namespace loopgauge::optimized
