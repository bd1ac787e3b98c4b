// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "models/fault.hpp"
#include "optimized/kv/kv_cache.hpp"
#include "optimized/kv/kv_layout.hpp"

namespace loopgauge::optimized {

struct ResidualEncodeArguments {
  KvView kv;                          // tables uploaded after prepare_encode
  const EncodeTask* tasks = nullptr;  // [task_count], device memory, different blocks (or one task per block); empty ranges do nothing
  int task_count = 0;
  std::uint64_t* numeric_fault = nullptr;  // lowered when a group cannot be encoded
  Fault fault = Fault::none;
};

// Specification clause and reference counterpart: SPEC.md "KV base and residual quantization": the group codec and the chain
//   X_hat[1] = dec(enc(X[1])), X_hat[r] = X_hat[r-1] + dec(enc(X[r] - X_hat[r-1])); reference/kv/block_encoder.
// Shapes and layouts: reads BF16 planes loop_first..loop_last of the tasks' rows (and the block's earlier streams), writes payload and
//   parameters of those streams, all layers and heads.
// Requires: head_dim 64 or 128; planes resident for the rows active at their loop (the planted fault unreconstructed_predecessor: at the loops before
//   as well); streams below loop_first already encoded.
// Numerics: byte-exact with the reference's IEEE subtraction, division and rounding half to even. A quotient is a product with the inverse of the scale
//   wherever that has the same code, and code * scale + minimum one fused step, since the product is exact. Codes of a group that is reported are unspecified.
// Determinism: exact.
// Launch: (task, layer, K|V x head) CTAs of 256 threads; one launch for all.
// Traffic: BF16 rows once, payload and parameters once. Of K the earlier streams of a row's chain are read back from the caches, of V those below loop_first.
void residual_encode(const ResidualEncodeArguments& arguments, cudaStream_t stream);

// The rows of the tasks, which stand in sealed blocks, are encoded again, streams loop_first..loop_last of each: K under the parameters that its
// groups have, V, whose groups belong to one row, under new ones.
// Specification clause and reference counterpart: S-SPEC-9; reference/kv/block_encoder, encode_rows_again.
// Shapes and layouts: as above. A task may reach over several blocks.
// Requires: head_dim 64 or 128; the rows active at every loop of the task, at the ranks that the blocks were made with, and resident as BF16.
// Numerics: byte-exact with the reference. Determinism: exact.
// Launch: (task, layer, K|V x head) CTAs of head_dim threads, row after row. Traffic: the rows once, their codes and parameters once.
void residual_encode_again(const ResidualEncodeArguments& arguments, cudaStream_t stream);

// Logical K or V rows as a reader sees them, in FP32: for dumps and tests, not for attention.
struct KvGatherArguments {
  KvView kv;
  int layer = 0;
  int loop = 1;     // logical plane
  int request = 0;  // slot
  int encoded_frontier = 0;
  int begin = 0, end = 0;  // positions
  float* k = nullptr;      // [heads, end - begin, head_dim]
  float* v = nullptr;
};
// Specification clause and reference counterpart: SPEC.md "Terms" (LAST_EXITED), "KV base and residual quantization" (X_hat in FP32).
// Shapes and layouts: above. Requires: head_dim 64 or 128. Numerics: exact (BF16 widened; X_hat bit-identical with the reference).
// Determinism: exact. Launch: (positions, heads) CTAs of head_dim threads. Traffic: the rows read once, FP32 rows written.
void kv_gather(const KvGatherArguments& arguments, cudaStream_t stream);

}  // namespace loopgauge::optimized
