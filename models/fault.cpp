// SPDX-License-Identifier: Apache-2.0
#include "models/fault.hpp"

#include <string>

#include "models/error.hpp"

namespace loopgauge {
namespace {

constexpr FaultInfo kFaults[] = {
    {Fault::aliased_hidden_rows, "aliased_hidden_rows", "loop-4 selection scores compare a hidden buffer with itself and are all zero", "t1", true},
    {Fault::contiguous_causal_mask, "contiguous_causal_mask", "compact query i of a window is masked as if it stood at window start + i", "t1", true},
    {Fault::absent_residual_as_code_zero, "absent_residual_as_code_zero",
     "a row absent from a late K residual stream adds its neighbours' group minimum instead of inheriting", "t1q1", true},
    {Fault::unreconstructed_predecessor, "unreconstructed_predecessor",
     "a residual is taken against the original predecessor loop instead of its reconstruction", "q1", true},
    {Fault::loop3_reference_at_loop4, "loop3_reference_at_loop4", "loop 4 corrects against a reference captured at loop 3", "s1", true},
    {Fault::swapped_norms, "swapped_norms", "input_layernorm_2 and post_attention_layernorm are exchanged", "", true},
    {Fault::key_before_rope, "key_before_rope", "K is stored before RoPE", "", true},
    {Fault::loop_off_by_one, "loop_off_by_one", "decode rows read history from the previous loop's plane", "", true},
    {Fault::early_flush, "early_flush", "the BF16 tail is flushed 64 tokens early", "q1", true},
    {Fault::double_final_norm, "double_final_norm", "inactive rows go through the final norm a second time", "t1", true},
    {Fault::scores_across_requests, "scores_across_requests",
     "windows of several requests that are selected in one submission share one ranking and one budget", "t1", true, "mixed", false},
    {Fault::slot_reused_early, "slot_reused_early", "the slot of an attention reference is given to others after loop 3", "s1", true, "mixed", false},
    {Fault::resume_without_token, "resume_without_token", "a request resumed between two rows feeds another token than it had chosen", "", true,
     "preempt", false},
    {Fault::resume_without_reference, "resume_without_reference", "a row resumed after loop 2 corrects against whatever its new slot holds", "s1",
     true, "preempt", false},
    {Fault::publish_before_last_loop, "publish_before_last_loop",
     "a window is published with the last loop's planes as they were before that loop", "", true, "prefix", false},
    {Fault::stale_reference_slot, "stale_reference_slot", "loops 3 and 4 correct against the previous token's reference", "s1", false},
    {Fault::threshold_tie_by_arrival, "threshold_tie_by_arrival",
     "of keys with equal logits the last are selected (acts where logits tie: model synth --zero-key-heads)", "s1", false},
    {Fault::half_precision_stream_dots, "half_precision_stream_dots", "dot products with a residual stream are accumulated in FP16", "q1",
     false},
    {Fault::wrong_compact_rank, "wrong_compact_rank", "a row of a late stream is looked up by its place in the page, not by its rank", "t1q1",
     false},
    {Fault::tail_read_as_encoded, "tail_read_as_encoded", "decode reads the first 64 positions of the BF16 tail encoded", "q1", false},
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
