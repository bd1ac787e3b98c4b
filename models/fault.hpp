// SPDX-License-Identifier: Apache-2.0
// Known faults that can be planted in an executor to prove that the harness detects them (`sweep --mutant NAME`). Each is a defect that
// was seen in, or is natural to, serving engines. A run with a planted fault is never a result.
#pragma once

#include <span>
#include <string_view>

namespace loopgauge {

enum class Fault {
  none,
  aliased_hidden_rows,             // loop-4 scores compare a buffer with itself: all zero
  contiguous_causal_mask,          // compact query i treated as position window_begin + i in the causal mask
  absent_residual_as_code_zero,    // a row absent from a residual stream adds the group minimum instead of nothing
  unreconstructed_predecessor,     // residual taken against X[r-1] instead of its reconstruction
  loop3_reference_at_loop4,        // loop 4 corrects against loop 3's reference
  swapped_norms,                   // input_layernorm_2 and post_attention_layernorm exchanged
  key_before_rope,                 // K stored before RoPE
  loop_off_by_one,                 // loop r reads the K/V plane of loop r-1 (r > 1) for history tokens
  early_flush,                     // the tail is flushed 64 tokens early
  double_final_norm,               // final norm applied a second time to inactive rows
  // Of scheduling: they act in the modes that FaultInfo::mode names.
  scores_across_requests,          // windows of several requests that are selected in one submission share one ranking and one budget
  slot_reused_early,               // a row's attention reference slot is free for others after loop 3
  resume_without_token,            // a request resumed between two rows feeds another token than the one it had chosen
  resume_without_reference,        // a row resumed after loop 2 corrects against whatever its new slot holds
  publish_before_last_loop,        // a window is published with the last loop's planes as they were before that loop
  // Of a handoff: what a receiver without checks would go on with.
  handoff_incomplete,              // activated although the last partition has not arrived
  handoff_without_rows,            // rows that are not encoded are forgotten
  handoff_wrong_activity,          // the activity of loop 4 names other rows of loop 3 than those that executed it
  handoff_stale_parameters,        // parameters of a block are those of the block before
  handoff_without_hidden,          // the final hidden row is forgotten
  // Defects that implementations of the model or of the method have had, and one that is the smallest there can be; in the reference alone.
  one_slot_per_layer,              // decode reads K/V of one slot per layer, the last loop's, instead of one per layer and loop
  constant_layer_stride,           // the slot of (loop, layer) counts one layer too few: the last layer reads the next loop's first one
  mask_without_own_token,          // the mask of a decode row is one column short
  rope_frequency_in_bfloat16,      // inverse frequencies of RoPE are rounded to BF16
  rope_of_compact_rows,            // active rows of late loops are rotated by their place among the active rows
  final_norm_only_at_end,          // the final norm is folded into the head: loops before the last hand on an unnormed state
  exit_weighted_logits,            // logits are the mean over loops, weighted by the exit distribution
  reserved_last_token,             // selection reserves a slot for the last token of a window
  budget_of_previous_set,          // the budget of loop 4 is a share of loop 3's rows, not of the window
  keys_ranked_in_bfloat16,         // keys are ranked by logits rounded to BF16
  correction_in_bfloat16,          // the correction is rounded to BF16 before it is added to the reference
  codes_from_stored_parameters,    // codes are computed with the FP16 minimum and scale
  scale_by_reciprocal,             // the scale of a group is multiplied by 1/15
  reconstruction_in_bfloat16,      // a reconstructed value is rounded to BF16 after every stream
  one_ulp_in_residual_add,         // the first channel of one residual addition is one BF16 ulp too large
  // Of speculation.
  stale_reference_at_position,     // a row at a position that an earlier incarnation has held corrects against that one's reference
  plane_not_truncated,             // a rejection leaves the rows of loop 3's plane behind, and the next rows there are taken as written
  candidate_sealed,                // blocks are sealed and read as soon as their rows have run, before they are verified
  draft_hidden_shared,             // the drafts of a round leave one hidden row behind, the last one's, from which every row is verified
  acceptance_off_by_one,           // the first candidate that the target does not confirm is accepted with those before it
  // Of the optimized runtime alone: defects of its own storage and kernels.
  stale_reference_slot,            // loops 3 and 4 read the previous token's attention reference
  threshold_tie_by_arrival,        // of equal logits the last ones are selected, as an unordered compaction may
  half_precision_stream_dots,      // q·dec of a stream is accumulated in FP16
  wrong_compact_rank,              // a row of a late stream is looked up by its place in the page, not among the present rows
  tail_read_as_encoded,            // decode reads the 64 positions from the frontier on encoded although it must not see them so
};

struct FaultInfo {
  Fault fault;
  std::string_view name;           // the enumerator's name
  std::string_view description;
  std::string_view needs;          // switches without which the fault cannot act, e.g. "t1", "s1", "q1", "t1q1", "" = any
  std::string_view operation;      // of the registry (models/spec): where a run with the fault leaves one without
  bool in_reference;               // the reference can plant it
  // Without which it cannot act: a part of the mode's name such as "mixed" or "prefix", or "speculation" for any that speculates; "" = any.
  std::string_view mode = "";
  bool in_optimized = true;        // the optimized runtime can plant it
  // Parts of a mode's name, separated by blanks, beside which it is not planted: it would be another fault there.
  std::string_view not_beside = "";
};

std::span<const FaultInfo> planted_faults();       // all but `none`
// Throws UnsupportedError naming the executor that can when `executor` ("reference", "optimized") cannot plant the fault.
void require_fault_in(Fault fault, std::string_view executor);
Fault parse_fault(std::string_view name);          // throws ConfigError listing the names
std::string_view to_string(Fault fault);

}  // namespace loopgauge
