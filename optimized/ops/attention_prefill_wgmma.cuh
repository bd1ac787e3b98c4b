// SPDX-License-Identifier: Apache-2.0
// The path of attention_prefill for history in BF16. Warpgroup products: compute capability 9.0 and no other.
#pragma once

#include "optimized/ops/attention_prefill.cuh"

namespace loopgauge::optimized {

// Contract of attention_prefill, for the tiles with encoded_frontier 0; the others are left alone.
// Numerics: as attention_prefill; scores enter exp2 as fma(dot, scale * log2(e), -maximum), rounded once.
// Determinism: pages of 64 absolute positions ascending; a row of a product depends on no other row, and a page or a rescaling that does not
//   concern a row leaves its bits alone.
// Launch: (heads, tiles) CTAs of 384 threads: two warpgroups of 64 rows each and one that copies; four stages of K and V of one page,
//   swizzled as wgmma reads them.
// Traffic: per tile and head, K and V of every position up to the tile's last one, once.
void attention_prefill_wgmma(const AttentionPrefillArguments& arguments, cudaStream_t stream);

}  // namespace loopgauge::optimized
