// SPDX-License-Identifier: Apache-2.0
// What memory is used for (SPEC.md and TERMINOLOGY.md, "Memory categories"). The accounting model predicts bytes per category, allocators
// measure them, reports show both.
#pragma once

#include <array>
#include <string_view>

namespace loopgauge {

enum class MemoryCategory {
  base_payload,               // codes of stream 1
  residual_payload,           // codes of streams 2, 3, 4
  parameters,                 // FP16 minimum and scale of every group
  activity_maps,              // which rows executed loops 2, 3, 4, and their ranks
  padding,                    // unused rows of pages and blocks, alignment
  bf16_tail,                  // K/V not yet encoded while quantization is on
  bf16_planes,                // K/V planes that stay BF16
  inherited_references,       // tables that resolve inherited rows
  attention_reference_state,  // O_ref, C_ref, m and the selected keys
  hidden_rows,                // loop states of live rows
  graphs,                     // captured executables
  workspace,                  // activations and library scratch of one submission
  conversion_scratch,         // staging of the encoder
  transfer_buffers,           // handoffs, snapshots, host copies
  weights,                    // model parameters and tables derived from them
};

inline constexpr std::array<std::string_view, 15> kMemoryCategoryNames{"base payload",
                                                                       "residual payload",
                                                                       "parameters",
                                                                       "activity maps",
                                                                       "padding",
                                                                       "BF16 tail",
                                                                       "BF16 planes",
                                                                       "inherited references",
                                                                       "attention reference state",
                                                                       "hidden rows",
                                                                       "graphs",
                                                                       "workspace",
                                                                       "conversion scratch",
                                                                       "transfer buffers",
                                                                       "weights"};
inline constexpr int kMemoryCategories = static_cast<int>(kMemoryCategoryNames.size());

// The spelling of reports.
constexpr std::string_view to_string(MemoryCategory category) { return kMemoryCategoryNames[static_cast<std::size_t>(category)]; }

}  // namespace loopgauge
