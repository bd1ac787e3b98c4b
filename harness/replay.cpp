// SPDX-License-Identifier: Apache-2.0
#include "harness/replay.hpp"

#include "harness/interrupt.hpp"

namespace loopgauge::harness {

RunRecord replay_watched(Executor& executor, const Plan& plan, const Trace& trace, const EffectiveConfig& config, const RunOptions& options,
                         Progress* progress) {
  executor.begin(trace, config, options_for(plan, options));
  std::int64_t done = 0;
  for (const Submission& submission : plan.submissions) {
    throw_if_interrupted();
    executor.submit(submission);
    if (progress != nullptr) progress->update(++done);
  }
  RunRecord record = executor.finish();
  record.mode = plan.mode;
  return record;
}

}  // namespace loopgauge::harness
