// SPDX-License-Identifier: Apache-2.0
// What device memory is used for. The accounting model predicts bytes per category, the allocator measures them.
#pragma once

#include <array>
#include <cstddef>
#include <string_view>

namespace loopgauge::optimized {

enum class MemoryCategory {
  base_payload,               // codes of stream 1
  residual_payload,           // codes of streams 2, 3, 4
  parameters,                 // FP16 minimum and scale of every group
  activity_maps,              // which rows executed loops 2, 3, 4, and their ranks
  padding,                    // unused rows of pages and blocks, alignment
  bf16_tail,                  // K/V not yet encoded while quantization is on
  bf16_planes,                // K/V planes that stay BF16
  inherited_references,       // page and row tables that resolve inherited rows
  attention_reference_state,  // O_ref, C_ref, m and the selected keys
  hidden_rows,                // loop states and the residual stream of live rows
  graphs,                     // captured executables
  workspace,                  // activations and library scratch of one submission
  conversion_scratch,         // staging of the encoder
  transfer_buffers,           // handoffs, snapshots, host copies
  weights,                    // model parameters and tables derived from them
};
inline constexpr std::size_t kMemoryCategories = 15;

// The field's spelling in reports: "base payload", "bf16 tail", ...
std::string_view to_string(MemoryCategory category);

using BytesByCategory = std::array<std::size_t, kMemoryCategories>;

}  // namespace loopgauge::optimized
