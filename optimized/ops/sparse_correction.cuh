// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "models/fault.hpp"
#include "optimized/kv/kv_layout.hpp"
#include "optimized/kv/reference_store.hpp"

namespace loopgauge::optimized {

struct SparseCorrectionArguments {
  KvView kv;
  int layer = 0;
  const __nv_bfloat16* q = nullptr;  // [rows, heads, head_dim] after RoPE, rows q_row_stride elements apart
  std::int64_t q_row_stride = 0;
  const QueryRow* rows = nullptr;  // [row_count], loop 3 or 4, `reference` names a reusable slot
  int row_count = 0;
  int max_length = 0;  // host bound on position + 1
  ReferenceView reference;
  bool encoded_history = true;        // as in AttentionDecodeArguments, and `arrivals`
  __nv_bfloat16* output = nullptr;    // [rows, heads * head_dim]
  void* workspace = nullptr;          // sparse_correction_workspace_bytes
  std::uint32_t* arrivals = nullptr;  // [rows, heads]
  const QueryRow* written_rows = nullptr;  // as in AttentionDecodeArguments; how many does not matter
  Fault fault = Fault::none;
};

std::size_t sparse_correction_workspace_bytes(const KvShape& shape, int row_count);

// Specification clause and reference counterpart: SPEC.md "Sparse decode attention": O = (O_ref - C_ref) + m·L, L = softmax over S of
//   Q[r]·K[r,S]/sqrt(D) applied to V[r,S]; reference/ops/sparse_correction.
// Shapes and layouts: above; K/V as kv_layout.hpp, keys as the masks of the reference slot.
// Requires: reference_statistics, select_keys and reference_contribution of the slot before it on the stream; S not empty.
// Numerics: BF16 rows in FP32. Encoded rows by exact integer products of codes with q·scale (30 bits of the largest of a page's groups in all streams that a
//   pass reads) and weight·scale (32 bits of the largest of a pass and half), in FP32 from there on. Subtraction, product and sum each rounded to FP32; one
//   rounding to BF16.
// Determinism: units of 128 absolute positions (64 where a row below position 4096 reads encoded ones), at most 16 selected keys of one at a time, chains
//   of units, groups of chains, combined ascending (selected_attention.cuh); a row's bits do not depend on the batch.
// Launch: one kernel, (CTAs of a row and head, heads, rows) CTAs of 256 threads.
// Traffic: K and V rows of the selected keys, parameters of every touched group, O_ref, C_ref.
void sparse_correction(const SparseCorrectionArguments& arguments, cudaStream_t stream);

}  // namespace loopgauge::optimized
