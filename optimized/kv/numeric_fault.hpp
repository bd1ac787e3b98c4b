// SPDX-License-Identifier: Apache-2.0
// How a kernel tells the host that it met a value the specification declares an error (SPEC.md: non-finite logits, codec overflow).
// One 64-bit word per run, lowered with an atomic minimum, so the report is the same whatever the order of execution.
#pragma once

#include <cstdint>
#include <string>

#include "optimized/kv/kv_layout.hpp"

namespace loopgauge::optimized {

enum class NumericFaultKind : std::uint32_t {
  logit = 0,    // non-finite scaled logit of a decode query at loop 2: request, position, layer, head
  k_group = 1,  // K group not encodable: position = first row of the group, detail = channel
  v_group = 2,  // V group not encodable: position = row, detail = 64-channel half
};

struct NumericFault {
  NumericFaultKind kind = NumericFaultKind::logit;
  int loop = 0;     // 1..4
  int request = 0;  // request slot
  int layer = 0;
  int position = 0;
  int head = 0;
  int detail = 0;
};

inline constexpr std::uint64_t kNoNumericFault = ~std::uint64_t{0};

// kind 2 | loop 2 | request 8 | layer 10 | position 24 | head 10 | detail 7 bits, most significant first; bit 63 is clear.
static_assert(kMaxRequests <= 256);
LOOPGAUGE_HOST_DEVICE std::uint64_t pack_numeric_fault(const NumericFault& fault) {
  std::uint64_t word = static_cast<std::uint64_t>(fault.kind) & 3;
  word = word << 2 | (static_cast<std::uint64_t>(fault.loop - 1) & 3);
  word = word << 8 | (static_cast<std::uint64_t>(fault.request) & 255);
  word = word << 10 | (static_cast<std::uint64_t>(fault.layer) & 1023);
  word = word << 24 | (static_cast<std::uint64_t>(fault.position) & 0xFFFFFF);
  word = word << 10 | (static_cast<std::uint64_t>(fault.head) & 1023);
  return word << 7 | (static_cast<std::uint64_t>(fault.detail) & 127);
}

// Inverse of pack_numeric_fault; `word` must not be kNoNumericFault.
NumericFault unpack_numeric_fault(std::uint64_t word);
// One sentence: what was not finite and where. `request_id` as the user knows it.
std::string describe(const NumericFault& fault, int request_id);

}  // namespace loopgauge::optimized
