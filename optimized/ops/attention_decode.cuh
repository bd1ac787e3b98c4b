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
  int max_length = 0;                 // host bound: every row's position + 1 is at most this (sizes the grid, never a result)
  bool encoded_history = true;        // some row may have an encoded_frontier > 0; false takes a kernel that reads BF16 only, the same bits
  __nv_bfloat16* output = nullptr;    // [rows, heads * head_dim]
  void* workspace = nullptr;          // attention_decode_workspace_bytes
  std::uint32_t* arrivals = nullptr;  // [rows, heads], zero before the first launch that is given it; every launch leaves it zero
  Fault fault = Fault::none;
  // Where the kernel in front in the stream is decode_projections, or attention behind that: all rows whose K and V are written, 32 at most. The launch
  // may then begin before that kernel has ended. null: it begins behind it.
  const QueryRow* written_rows = nullptr;  // [written_count]
  int written_count = 0;
};

std::size_t attention_decode_workspace_bytes(const KvShape& shape, int row_count);

// Specification clause and reference counterpart: SPEC.md "Model arithmetic" (scores, softmax, PV), "Terms" (LAST_EXITED history),
//   "KV base and residual quantization" (positions below E are read as X_hat[r], the rest BF16); reference/ops/attention.
// Shapes and layouts: above; K/V as kv_layout.hpp. The row's own K/V of its loop are already in their page and marked active.
// Requires: head_dim 64 or 128; q rows 16-byte aligned. With written_rows: `rows`, tables, maps and the K/V of other positions are older than the kernel
//   in front.
// Numerics: FP32 sums. BF16 rows: products exact. Encoded rows: integer products on tensor cores, whose sums are exact. K: codes times q * scale
//   in fixed point under one power of two a group (error 2^-26 of the largest), q * minimum in FP32; what these round is in proportion to
//   |q| (|minimum| + 15 scale), so that a key whose |q||K| is hundreds of times smaller can leave kScoreTolerance, which is in proportion to that.
//   V: codes, less the one nearest to the value zero, times probability * scale in fixed point (32 bits under one power of two a page and half), and
//   what those nearest codes leave times the probability in FP32. One rounding to BF16.
// Determinism: partial results, splits of 256 positions and chains of splits at absolute multiples, combined ascending (dense_attention.cuh); a
//   row's bits do not depend on the other rows of the batch, their order, max_length or where pages lie.
// Launch: one kernel, (heads, CTAs of a row and head, rows) CTAs of 288 threads, 256 where rows may be encoded; as many CTAs as the device
//   holds, of those of a (row, head) the last to arrive combines. The next kernel may begin once a CTA's first warp has requested its last keys
//   (programmatic_launch.cuh).
// Traffic: K and V rows of the logical plane once: 4 * head_dim bytes a BF16 key, head_dim bytes a stream row plus parameters.
void attention_decode(const AttentionDecodeArguments& arguments, cudaStream_t stream);

}  // namespace loopgauge::optimized
