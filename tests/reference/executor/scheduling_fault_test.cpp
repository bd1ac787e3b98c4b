// SPDX-License-Identifier: Apache-2.0
// Planted faults of scheduling: each shows in the plan that exercises it, and in no serial plan.
#include <gtest/gtest.h>

#include "tests/reference/executor/modes.hpp"

namespace loopgauge::test {
namespace {

class SchedulingFaults : public testing::Test {
 protected:
  RunRecord run_with(const Trace& trace, const Plan* plan, Fault fault) const {
    return run(checkpoint_, trace, requested_, with_fault(fault), plan);
  }

  // The groups of a request that the fault changes in this plan. The honest run of the plan has the bits of serial.
  std::vector<std::string> changed(const Trace& trace, const Plan& plan, Fault fault, std::size_t request) const {
    const RunRecord serial = run(checkpoint_, trace, requested_);
    expect_same_requests(serial, run_with(trace, &plan, Fault::none), "honest");
    expect_same_requests(serial, run_with(trace, nullptr, fault), "the serial plan does not exercise it");
    return differing_groups(serial.requests[request], run_with(trace, &plan, fault).requests[request]);
  }
  static bool has(const std::vector<std::string>& groups, const std::string& name) {
    return std::find(groups.begin(), groups.end(), name) != groups.end();
  }
  static Submission prompt(int request, int length) { return {{{request, RowKind::prefill, 0, length, 1, 4}}}; }
  static WorkItem row(int request, int position, int first, int last) {
    return {request, RowKind::decode, position, position + 1, first, last};
  }

  const Checkpoint checkpoint_ = tiny_checkpoint();
  const AlgorithmConfig requested_ = switches("t1s1q1");
};

TEST_F(SchedulingFaults, ScoresAcrossRequests) {
  const Trace trace = trace_of({request(0, 60, 1), request(1, 64, 1)});
  Plan plan{"mixed", {}};
  for (int loop = 1; loop <= 4; ++loop) {
    plan.submissions.push_back({{{0, RowKind::prefill, 0, 60, loop, loop}, {1, RowKind::prefill, 0, 64, loop, loop}}});
  }
  for (int i = 0; i < 2; ++i) plan.submissions.push_back({{row(i, trace.requests[static_cast<std::size_t>(i)].prompt_length(), 1, 4)}});
  const auto groups = changed(trace, plan, Fault::scores_across_requests, 0);
  EXPECT_TRUE(has(groups, "active/loop3"));
  EXPECT_TRUE(has(groups, "logits"));
}

// The other request's loop 2 takes the slot while this one's loop 4 is to come.
TEST_F(SchedulingFaults, SlotReusedEarly) {
  const Trace trace = trace_of({request(0, 10, 2), request(1, 12, 2)});
  Plan plan{"mixed", {}};
  plan.submissions.push_back(prompt(0, 10));
  plan.submissions.push_back(prompt(1, 12));
  plan.submissions.push_back({{row(0, 10, 1, 2)}});
  plan.submissions.push_back({{row(0, 10, 3, 3), row(1, 12, 1, 1)}});
  plan.submissions.push_back({{row(1, 12, 2, 2), row(0, 10, 4, 4)}});
  plan.submissions.push_back({{row(1, 12, 3, 4)}});
  for (int i = 0; i < 2; ++i) plan.submissions.push_back({{row(i, 11 + 2 * i, 1, 4)}});
  const auto groups = changed(trace, plan, Fault::slot_reused_early, 0);
  EXPECT_TRUE(has(groups, "hidden/loop4"));
  EXPECT_FALSE(has(groups, "hidden/loop3"));
}

Plan preempting(const Trace& trace, const EffectiveConfig& config, int row_loops) {
  Plan plan = serial_plan(trace, config);
  WorkItem rest = plan.submissions[1].items[0];  // the first decode row
  plan.submissions[1].items[0].loop_last = row_loops;
  rest.loop_first = row_loops + 1;
  Submission back{{}, {{ActionKind::preempt, 0}, {ActionKind::resume, 0}}};
  if (rest.loop_first <= 4) back.items.push_back(rest);
  plan.submissions.insert(plan.submissions.begin() + 2, back);
  plan.mode = "serial+preempt";
  return plan;
}

TEST_F(SchedulingFaults, ResumeWithoutToken) {
  const EffectiveConfig config = EffectiveConfig::resolve(requested_, checkpoint_.config);
  for (const Trace& trace : {trace_of({request(0, 10, 3)}), trace_of({free_request(0, 10, 4)})}) {
    EXPECT_TRUE(has(changed(trace, preempting(trace, config, 4), Fault::resume_without_token, 0), "hidden/loop1"));
    EXPECT_EQ(changed(trace, preempting(trace, config, 2), Fault::resume_without_token, 0), kNone) << "the token is in the hidden row";
  }
}

TEST_F(SchedulingFaults, ResumeWithoutReference) {
  const EffectiveConfig config = EffectiveConfig::resolve(requested_, checkpoint_.config);
  const Trace trace = trace_of({request(0, 10, 3)});
  for (const int loops : {2, 3}) {
    const auto groups = changed(trace, preempting(trace, config, loops), Fault::resume_without_reference, 0);
    EXPECT_TRUE(has(groups, "hidden/loop4")) << loops;
    EXPECT_EQ(has(groups, "hidden/loop3"), loops == 2) << "after loop 3 its K and V are right";
  }
  EXPECT_EQ(changed(trace, preempting(trace, config, 1), Fault::resume_without_reference, 0), kNone) << "there is none yet";
}

TEST_F(SchedulingFaults, PublishBeforeLastLoop) {
  Trace trace = trace_of({request(0, 70, 1), request(1, 75, 1)});
  std::copy_n(trace.requests[0].prompt.begin(), 64, trace.requests[1].prompt.begin());
  Plan plan{"serial+prefix", {}};
  plan.submissions.push_back(prompt(0, 64));
  plan.submissions.push_back({{{0, RowKind::prefill, 64, 70, 1, 4}}, {{ActionKind::publish, 0, 1}}});
  plan.submissions.push_back({{row(0, 70, 1, 4)}});
  plan.submissions.push_back({{{1, RowKind::prefill, 64, 75, 1, 4}}, {{ActionKind::reuse, 1, 1}}});
  plan.submissions.push_back({{row(1, 75, 1, 4)}});
  const auto groups = changed(trace, plan, Fault::publish_before_last_loop, 1);
  EXPECT_TRUE(has(groups, "kv"));
  EXPECT_TRUE(has(groups, "logits"));
  EXPECT_EQ(changed(trace, plan, Fault::publish_before_last_loop, 0), kNone) << "the publisher";
}

}  // namespace
}  // namespace loopgauge::test
