// SPDX-License-Identifier: Apache-2.0
// The path of attention_prefill for encoded history. Warpgroup products: compute capability 9.0 and no other.
#pragma once

#include "optimized/ops/attention_prefill.cuh"

namespace loopgauge::optimized {

// Contract of attention_prefill, for the tiles with encoded_frontier > 0; the others are left alone.
// Numerics: as attention_prefill_wgmma; X_hat bit for bit as specified, then two BF16 parts of it (S-KVQ-13); of the four products of
//   probabilities and V that of both low parts is left out. BF16 pages at and beyond the frontier have a low part of zeros.
// Determinism: keys in splits of kPrefillSplitTokens at absolute positions, within one as attention_prefill_wgmma, combined ascending: how many a row has
//   follows from its position.
// Launch: (heads, tiles, splits) CTAs of 512 threads: two warpgroups of 64 rows each, one that reconstructs K and one V, each a page ahead into two
//   stages of both parts, from copies of the encoded page that are another page ahead; with several splits a second launch combines them, a
//   warp for a row and head.
// Traffic: per tile and head, codes and parameters of the streams 1..loop of every position below the frontier and K and V of the rest, once; FP32
//   results of every split, written and read once.
void attention_prefill_encoded(const AttentionPrefillArguments& arguments, cudaStream_t stream);

}  // namespace loopgauge::optimized
