// SPDX-License-Identifier: Apache-2.0
#include "models/executor.hpp"

#include "models/error.hpp"

namespace loopgauge {

std::string_view to_string(Profile profile) {
  switch (profile) {
    case Profile::declared: return "declared";
    case Profile::reordered: return "reordered";
    case Profile::double_precision: return "double";
  }
  throw InternalError("unknown profile");
}

Profile parse_profile(std::string_view text) {
  for (const Profile profile : {Profile::declared, Profile::reordered, Profile::double_precision}) {
    if (to_string(profile) == text) return profile;
  }
  throw ConfigError("profile '" + std::string(text) + "' is not one of: declared, reordered, double");
}

RunOptions options_for(const Plan& plan, RunOptions options) {
  options.submissions_in_flight = plan.submissions_in_flight;
  options.graph_replay = plan.graph_replay;
  options.speculation = plan.speculation;
  options.handoff = plan.handoff;
  return options;
}

RunRecord replay(Executor& executor, const Plan& plan, const Trace& trace, const EffectiveConfig& config, const RunOptions& options) {
  executor.begin(trace, config, options_for(plan, options));
  for (const Submission& submission : plan.submissions) executor.submit(submission);
  RunRecord record = executor.finish();
  record.mode = plan.mode;
  return record;
}

}  // namespace loopgauge
