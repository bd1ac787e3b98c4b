// SPDX-License-Identifier: Apache-2.0
#include "harness/commands/handoff_json.hpp"

namespace loopgauge::harness {

nlohmann::ordered_json handoff_json(const HandoffRecord& handoff) {
  return {{"request", handoff.request},
          {"outcome", handoff.outcome},
          {"transport", handoff.transport},
          {"bytes", handoff.bytes},
          {"dense_bytes", handoff.dense_bytes},
          {"bytes_before_prompt_end", handoff.bytes_before_prompt_end},
          {"bytes_final_before_last_loop", handoff.bytes_final_before_last_loop},
          {"partitions", handoff.partitions},
          {"most_bytes_in_flight", handoff.most_bytes_in_flight},
          {"most_reserved_bytes", handoff.most_reserved_bytes},
          {"seconds", handoff.seconds}};
}

}  // namespace loopgauge::harness
