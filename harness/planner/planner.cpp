// SPDX-License-Identifier: Apache-2.0
#include "harness/planner/planner.hpp"

#include "models/error.hpp"

namespace loopgauge::harness {

Plan make_plan(const ModeSpec& mode, const Trace& trace, const EffectiveConfig& config) {
  const std::string text = mode_text(mode);
  if (!trace.events.empty()) {
    throw UnsupportedError("trace " + trace.name + " has " + std::to_string(trace.events.size()) +
                           " events (cancel, preempt, resume, reuse_id), which mode " + text + " does not replay in this version");
  }
  Plan plan;
  if (mode.name == "serial") {
    plan = make_serial_plan(trace, config);
  } else if (mode.name == "split") {
    plan = make_split_plan(trace, config, mode.piece_tokens);
  } else {
    throw UnsupportedError("mode " + text + " has no planner in this version (available: serial, split)");
  }
  // Executors trust their plans (S-PLAN-11).
  if (const std::string fault = plan_fault(plan, trace, config); !fault.empty()) {
    throw InternalError("the planner of mode " + text + " made an illegal plan: " + fault);
  }
  return plan;
}

}  // namespace loopgauge::harness
