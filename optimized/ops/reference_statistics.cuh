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

struct ReferenceStatisticsArguments {
  KvView kv;
  int layer = 0;        // reference_contribution: the first of `layer_count`
  int layer_count = 1;  // of reference_contribution alone
  const __nv_bfloat16* q = nullptr;  // [rows, heads, head_dim] after RoPE, rows q_row_stride elements apart
  std::int64_t q_row_stride = 0;
  const QueryRow* rows = nullptr;  // [row_count], loop 2, `reference` names the slot that is written
  int row_count = 0;
  int max_length = 0;  // host bound on position + 1
  ReferenceView reference;
  float* logits = nullptr;          // [rows, heads, logit_stride]: scaled FP32 logits of positions 0..position; reference_contribution: layer by layer
  std::int64_t logit_stride = 0;    // >= max_length
  bool encoded_history = true;      // as in AttentionDecodeArguments, and `arrivals`
  __nv_bfloat16* output = nullptr;  // [rows, heads * head_dim]: bf16(O_ref)
  void* workspace = nullptr;        // reference_statistics_workspace_bytes
  std::uint32_t* arrivals = nullptr;       // [layers, rows, heads]
  const QueryRow* written_rows = nullptr;  // [written_count]; statistics: as in AttentionDecodeArguments
  int written_count = 0;
  std::uint64_t* numeric_fault = nullptr;  // one word, see numeric_fault.hpp; lowered when a logit is not finite
  Fault fault = Fault::none;
};

// Of both operations; `layer_count`: at least as many as reference_contribution is given in any launch.
std::size_t reference_statistics_workspace_bytes(const KvShape& shape, int row_count, int layer_count = 1);

// Logits rows of several layers are kept until select_keys and reference_contribution work on all of them in one launch each: as many layers
// as fit these bytes, at least one, in groups of about equal size.
inline constexpr std::size_t kReferenceLogitsBytes = std::size_t{64} << 20;
int reference_group_layers(const KvShape& shape, int row_count, std::int64_t logit_stride);

// Specification clause and reference counterpart: SPEC.md "Sparse decode attention", loop 2: O_ref, and what m and C_ref need;
//   reference/ops/reference_attention.
// Shapes and layouts: above. Writes per (row, head): the logits row, maximum, sum, o_ref (FP32) of the reference slot, bf16(O_ref).
// Requires: as attention_decode.
// Numerics: the arithmetic of attention_decode, the same bits: output equals attention_decode's for the same row.
// Determinism: as attention_decode.
// Launch: as attention_decode.
// Traffic: attention_decode plus 4 bytes a position and head for the logits row.
void reference_statistics(const ReferenceStatisticsArguments& arguments, cudaStream_t stream);

// m and C_ref from the logits row, the selected keys and the V that loop 2 read.
// Specification clause and reference counterpart: SPEC.md "Sparse decode attention", m = sum of p over S, C_ref = sum p·V over S.
// Shapes and layouts: as reference_statistics (q and output unused), logits [layers, rows, heads, logit_stride]; reads logits, selected, maximum
//   and sum; writes mass and c_ref.
// Requires: select_keys (or forced masks) and reference_statistics of the same rows and layers before it on the stream.
// Numerics: p = exp(logit - maximum) / sum; values as in sparse_correction, FP32 sums.
// Determinism: as sparse_correction, with units of 256 absolute positions and at most 32 encoded keys of one at a time where a row reads encoded ones.
// Launch: one kernel, (CTAs of a row and head, heads, layers * rows) CTAs of 256 threads.
// Traffic: V of the selected keys, the masks and their logits.
void reference_contribution(const ReferenceStatisticsArguments& arguments, cudaStream_t stream);

}  // namespace loopgauge::optimized
