// SPDX-License-Identifier: Apache-2.0
#include "optimized/kv/numeric_fault.hpp"

namespace loopgauge::optimized {

NumericFault unpack_numeric_fault(std::uint64_t word) {
  const auto take = [&word](int bits) {
    const auto value = static_cast<int>(word & ((std::uint64_t{1} << bits) - 1));
    word >>= bits;
    return value;
  };
  NumericFault fault;
  fault.detail = take(7);
  fault.head = take(10);
  fault.position = take(24);
  fault.layer = take(10);
  fault.request = take(8);
  fault.loop = take(2) + 1;
  fault.kind = static_cast<NumericFaultKind>(take(2));
  return fault;
}

std::string describe(const NumericFault& fault, int request_id) {
  const std::string where = "request " + std::to_string(request_id) + ", loop " + std::to_string(fault.loop) + ", layer " +
                            std::to_string(fault.layer) + ", head " + std::to_string(fault.head);
  switch (fault.kind) {
    case NumericFaultKind::logit:
      return "attention logit of position " + std::to_string(fault.position) + " is not finite (" + where + ")";
    case NumericFaultKind::k_group:
      return "K group from position " + std::to_string(fault.position) + ", channel " + std::to_string(fault.detail) +
             " cannot be encoded: a value is not finite or its minimum or scale overflows FP16 (" + where + ")";
    case NumericFaultKind::v_group:
      return "V group of position " + std::to_string(fault.position) + ", channels from " + std::to_string(fault.detail * kGroupSize) +
             " cannot be encoded: a value is not finite or its minimum or scale overflows FP16 (" + where + ")";
  }
  return "unknown numeric fault (" + where + ")";
}

}  // namespace loopgauge::optimized
