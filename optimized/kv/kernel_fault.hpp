// SPDX-License-Identifier: Apache-2.0
// Faults that only an optimized implementation can have, planted to prove that the comparison with the reference detects them. A launch
// with a planted fault is never a result.
#pragma once

namespace loopgauge::optimized {

enum class KernelFault : int {
  none,
  stale_reference_slot,        // the correction reads the neighbouring token's reference
  threshold_tie_by_arrival,    // of equal logits the last ones are selected, as an unordered compaction may
  half_precision_stream_dots,  // q·dec of a stream is accumulated in FP16
  wrong_compact_rank,          // a row of a late stream is looked up by its place in the page, not among the present rows
  tail_read_as_encoded,        // 64 positions from the frontier on are read encoded although the query must not see them so
};

}  // namespace loopgauge::optimized
