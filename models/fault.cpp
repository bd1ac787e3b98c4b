// SPDX-License-Identifier: Apache-2.0
#include "models/fault.hpp"

#include <array>
#include <string>

#include "models/error.hpp"

namespace loopgauge {
namespace {

constexpr std::array<FaultInfo, 10> kFaults{{
    {Fault::aliased_hidden_rows, "aliased_hidden_rows", "loop-4 selection scores compare a hidden buffer with itself and are all zero", "t1"},
    {Fault::contiguous_causal_mask, "contiguous_causal_mask", "compact query i of a window is masked as if it stood at window start + i", "t1"},
    {Fault::absent_residual_as_code_zero, "absent_residual_as_code_zero",
     "a row absent from a late K residual stream adds its neighbours' group minimum instead of inheriting", "t1q1"},
    {Fault::unreconstructed_predecessor, "unreconstructed_predecessor",
     "a residual is taken against the original predecessor loop instead of its reconstruction", "q1"},
    {Fault::loop3_reference_at_loop4, "loop3_reference_at_loop4", "loop 4 corrects against a reference captured at loop 3", "s1"},
    {Fault::swapped_norms, "swapped_norms", "input_layernorm_2 and post_attention_layernorm are exchanged", ""},
    {Fault::key_before_rope, "key_before_rope", "K is stored before RoPE", ""},
    {Fault::loop_off_by_one, "loop_off_by_one", "decode rows read history from the previous loop's plane", ""},
    {Fault::early_flush, "early_flush", "the BF16 tail is flushed 64 tokens early", "q1"},
    {Fault::double_final_norm, "double_final_norm", "inactive rows go through the final norm a second time", "t1"},
}};

}  // namespace

std::span<const FaultInfo> planted_faults() { return kFaults; }

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
