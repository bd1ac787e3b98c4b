// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "models/fault.hpp"
#include "optimized/kv/kv_layout.hpp"
#include "optimized/kv/reference_store.hpp"

namespace loopgauge::optimized {

struct SelectKeysArguments {
  KvShape shape;
  int layer = 0;                  // the first of `layer_count`
  int layer_count = 1;
  const QueryRow* rows = nullptr;  // [row_count]; n = position + 1 logits each, `reference` names the slot that is written
  int row_count = 0;
  int key_fraction_bp = 1000;     // 1..10000; k = max(1, ceil(bp * n / 10000))
  const float* logits = nullptr;  // [layers, rows, heads, logit_stride]
  std::int64_t logit_stride = 0;
  ReferenceView reference;                 // `selected` is written
  std::uint64_t* numeric_fault = nullptr;  // lowered when a logit is not finite; the selection of that row is then unspecified
  Fault fault = Fault::none;
};

// Specification clause and reference counterpart: SPEC.md "Sparse decode attention": S = the k keys of highest FP32 scaled logit, ties to
//   the lower position, -0 equals +0, a non-finite logit is an error; reference/ops/select_keys.
// Shapes and layouts: above; one mask word per (slot, layer, head, page) for pages 0..position/64, bits above `position` clear.
// Requires: position < 64 * reference.mask_pages; at most 8601 pages (20 bytes of shared memory each), else UnsupportedError.
// Numerics: exact; given equal logits, the set of the reference.
// Determinism: radix select on ordered 32-bit keys with integer histograms; independent of the batch.
// Launch: (heads, rows, layers) CTAs of 512 threads, three a multiprocessor: those of one layer and row leave most of the device idle.
// Traffic: two passes over the logits row (the first digit of the threshold; masks and the keys that share that digit), the second from L2; one or two more
//   where more than 4096 keys share it. The masks once.
void select_keys(const SelectKeysArguments& arguments, cudaStream_t stream);

}  // namespace loopgauge::optimized
