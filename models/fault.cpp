// SPDX-License-Identifier: Apache-2.0
#include "models/fault.hpp"

#include <string>

#include "models/error.hpp"

namespace loopgauge {
namespace {

constexpr FaultInfo kFaults[] = {
    {Fault::aliased_hidden_rows, "aliased_hidden_rows", "loop-4 selection scores compare a hidden buffer with itself and are all zero", "t1", "update_score", true},
    {Fault::contiguous_causal_mask, "contiguous_causal_mask", "compact query i of a window is masked as if it stood at window start + i", "t1", "attention_dense", true},
    {Fault::absent_residual_as_code_zero, "absent_residual_as_code_zero",
     "a row absent from a late K residual stream adds its neighbours' group minimum instead of inheriting", "t1q1", "residual_decode", true},
    {Fault::unreconstructed_predecessor, "unreconstructed_predecessor",
     "a residual is taken against the original predecessor loop instead of its reconstruction", "q1", "residual_encode", true},
    {Fault::loop3_reference_at_loop4, "loop3_reference_at_loop4", "loop 4 corrects against a reference captured at loop 3", "s1", "sparse_correction", true},
    {Fault::swapped_norms, "swapped_norms", "input_layernorm_2 and post_attention_layernorm are exchanged", "", "rms_norm", true},
    {Fault::key_before_rope, "key_before_rope", "K is stored before RoPE", "", "rope", true},
    {Fault::loop_off_by_one, "loop_off_by_one", "decode rows read history from the previous loop's plane", "", "attention_dense", true},
    {Fault::early_flush, "early_flush", "the BF16 tail is flushed 64 tokens early", "q1", "seal_blocks", true, "", true,
     "pd speculation"},  // what is sealed there was promised before it was committed: blocks that nobody wrote would be read
    {Fault::double_final_norm, "double_final_norm", "inactive rows go through the final norm a second time", "t1", "inherit", true},
    {Fault::scores_across_requests, "scores_across_requests",
     "windows of several requests that are selected in one submission share one ranking and one budget", "t1", "select_tokens", true, "mixed", false},
    {Fault::slot_reused_early, "slot_reused_early", "the slot of an attention reference is given to others after loop 3", "s1", "sparse_correction", true, "mixed"},
    {Fault::resume_without_token, "resume_without_token", "a request resumed between two rows feeds another token than it had chosen", "", "embedding", true,
     "preempt"},
    {Fault::resume_without_reference, "resume_without_reference", "a row resumed after loop 2 corrects against whatever its new slot holds", "s1", "sparse_correction",
     true, "preempt"},
    {Fault::publish_before_last_loop, "publish_before_last_loop",
     "a window is published with the last loop's planes as they were before that loop", "", "kv_append", true, "prefix"},
    {Fault::handoff_incomplete, "handoff_incomplete", "a request is activated although its last partition has not arrived", "", "kv_append", true, "pd"},
    {Fault::handoff_without_rows, "handoff_without_rows", "rows that are not encoded are forgotten in a handoff", "", "kv_append", true, "pd"},
    {Fault::handoff_wrong_activity, "handoff_wrong_activity",
     "the activity of loop 4 that is handed over names other rows of loop 3 than those that executed it", "t1", "kv_append", true, "pd"},
    {Fault::handoff_stale_parameters, "handoff_stale_parameters", "parameters that are handed over are those of the block before, of a request with two blocks", "q1", "residual_encode",
     true, "pd"},
    {Fault::handoff_without_hidden, "handoff_without_hidden", "the final hidden row is forgotten in a handoff", "", "head_argmax", true, "pd"},
    {Fault::one_slot_per_layer, "one_slot_per_layer",
     "decode reads one K/V slot per layer, which every loop overwrites, instead of one per layer and loop", "", "attention_dense", true, "", false},
    {Fault::constant_layer_stride, "constant_layer_stride",
     "slots are numbered with one layer too few, so that the last layer reads the next loop's first one", "", "attention_dense", true, "", false},
    {Fault::mask_without_own_token, "mask_without_own_token",
     "the mask of a decode row is one column short: it does not see itself", "", "attention_dense", true, "", false},
    {Fault::rope_frequency_in_bfloat16, "rope_frequency_in_bfloat16",
     "the inverse frequencies of RoPE are rounded to BF16", "", "rope", true, "", false},
    {Fault::rope_of_compact_rows, "rope_of_compact_rows",
     "active rows of late loops are rotated by their place among the active rows", "t1", "rope", true, "", false},
    {Fault::final_norm_only_at_end, "final_norm_only_at_end",
     "the final norm is folded into the head, and loops before the last hand on an unnormed state", "", "rms_norm", true, "", false},
    {Fault::exit_weighted_logits, "exit_weighted_logits",
     "logits are the mean over loops, weighted by the exit distribution", "", "head_argmax", true, "", false},
    {Fault::reserved_last_token, "reserved_last_token",
     "selection reserves a slot for the last token of a window", "t1", "select_tokens", true, "", false},
    {Fault::budget_of_previous_set, "budget_of_previous_set",
     "the budget of loop 4 is a share of loop 3's rows, not of the window", "t1", "select_tokens", true, "", false},
    {Fault::keys_ranked_in_bfloat16, "keys_ranked_in_bfloat16",
     "keys are ranked by logits rounded to BF16", "s1", "reference_statistics", true, "", false},
    {Fault::correction_in_bfloat16, "correction_in_bfloat16",
     "the correction is rounded to BF16 before it is added to the reference", "s1", "sparse_correction", true, "", false},
    {Fault::codes_from_stored_parameters, "codes_from_stored_parameters",
     "codes are computed with the stored FP16 minimum and scale", "q1", "residual_encode", true, "", false},
    {Fault::scale_by_reciprocal, "scale_by_reciprocal",
     "the scale of a group is multiplied by 1/15 instead of divided by 15", "q1", "residual_encode", true, "", false},
    {Fault::reconstruction_in_bfloat16, "reconstruction_in_bfloat16",
     "a reconstructed value is rounded to BF16 after every stream", "q1", "residual_decode", true, "", false},
    {Fault::one_ulp_in_residual_add, "one_ulp_in_residual_add",
     "the first channel of one residual addition is one BF16 ulp too large", "", "residual_add", true, "", false},
    {Fault::stale_reference_at_position, "stale_reference_at_position",
     "a row at a position that an earlier incarnation has held corrects against that one's reference", "s1", "sparse_correction", true, "speculation"},
    {Fault::plane_not_truncated, "plane_not_truncated",
     "a rejection leaves the rows of loop 3's plane behind, and the next rows there are taken as written", "", "attention_dense", true, "speculation"},
    {Fault::candidate_sealed, "candidate_sealed", "blocks are sealed and read as soon as their rows have run, before they are verified", "q1", "attention_dense", true,
     "block_spec"},
    {Fault::draft_hidden_shared, "draft_hidden_shared",
     "every row of a round is verified from the hidden row that the last draft left", "", "rms_norm", true, "block_spec"},
    {Fault::acceptance_off_by_one, "acceptance_off_by_one",
     "the first candidate that the target does not confirm is accepted with those before it", "", "embedding", true, "speculation"},
    {Fault::stale_reference_slot, "stale_reference_slot", "loops 3 and 4 correct against the previous token's reference", "s1", "sparse_correction", false},
    {Fault::threshold_tie_by_arrival, "threshold_tie_by_arrival",
     "of keys with equal logits the last are selected (acts where logits tie: model synth --zero-key-heads)", "s1", "reference_statistics", false},
    {Fault::half_precision_stream_dots, "half_precision_stream_dots", "dot products with a residual stream are accumulated in FP16", "q1", "attention_dense",
     false},
    {Fault::wrong_compact_rank, "wrong_compact_rank", "a row of a late stream is looked up by its place in the page, not by its rank", "t1q1", "residual_decode",
     false},
    {Fault::tail_read_as_encoded, "tail_read_as_encoded", "decode reads the first 64 positions of the BF16 tail encoded", "q1", "attention_dense", false},
};

}  // namespace

std::span<const FaultInfo> planted_faults() { return kFaults; }

void require_fault_in(Fault fault, std::string_view executor) {
  for (const auto& info : kFaults) {
    if (info.fault != fault || (executor == "reference" ? info.in_reference : info.in_optimized)) continue;
    const std::string other = info.in_reference ? "reference" : "optimized";
    throw UnsupportedError("mutant " + std::string(info.name) + " is a fault of the " + other + " executor, which the " + std::string(executor) +
                           " executor cannot plant: use --executor " + other);
  }
}

Fault parse_fault(std::string_view name) {
  std::string accepted;
  for (const auto& info : kFaults) {
    if (info.name == name) return info.fault;
    accepted += (accepted.empty() ? "" : ", ") + std::string(info.name);
  }
  throw ConfigError("mutant '" + std::string(name) + "' is not one of: " + accepted);
}

std::string_view to_string(Fault fault) {
  if (fault == Fault::none) return "none";
  for (const auto& info : kFaults) {
    if (info.fault == fault) return info.name;
  }
  throw InternalError("fault without a name");
}

}  // namespace loopgauge
