// SPDX-License-Identifier: Apache-2.0
// Legality of plans that speculate (S-SPEC-6, S-PIPE-3, S-TIME-2): hand-made plans, each with one violation.
#include <gtest/gtest.h>

#include <limits>

#include "tests/reference/plan_rules.hpp"

namespace loopgauge {
namespace {

class SpeculationPlanRules : public PlanRulesTest {
 protected:
  SpeculationPlanRules() : PlanRulesTest(resolve({})) { add_request(10, 3); }

  static EffectiveConfig resolve(const AlgorithmConfig& requested) { return resolve_for_small_model(requested); }

  static WorkItem prompt(int request = 0, int length = 10) { return {request, RowKind::prefill, 0, length, 1, 4}; }
  static WorkItem draft(int begin, int end, int first, int last, int request = 0) { return {request, RowKind::draft, begin, end, first, last}; }
  static WorkItem verify(int first, int last, int request = 0, int rows = 3) { return {request, RowKind::verify, 0, rows, first, last}; }
  static WorkItem stage(int index, int first, int last, int request = 0) { return {request, RowKind::stage, index, index + 1, first, last}; }

  // Two candidates of two loops each, or stages of two loops.
  static Plan block(std::initializer_list<Submission> submissions) {
    Plan plan;
    plan.submissions = submissions;
    plan.speculation = {SpeculationKind::block, 2, 2};
    return plan;
  }
  static Plan pipeline(std::initializer_list<Submission> submissions) {
    Plan plan;
    plan.submissions = submissions;
    plan.speculation = {SpeculationKind::pipeline, 2, 0};
    return plan;
  }
};

TEST_F(SpeculationPlanRules, RowsOnTheirWay) {
  EXPECT_EQ((Speculation{SpeculationKind::block, 1, 5}).live_rows(), 6);
  EXPECT_EQ((Speculation{SpeculationKind::pipeline, 1, 0}).live_rows(), 4);
  EXPECT_EQ((Speculation{SpeculationKind::pipeline, 3, 0}).live_rows(), 2);
  EXPECT_EQ(Speculation{}.live_rows(), 1);
}

TEST_F(SpeculationPlanRules, ARoundPerRowIsLegalHoweverItIsCut) {
  EXPECT_EQ(fault(block({{{prompt()}}, {{draft(0, 3, 1, 2)}}, {{verify(3, 4)}}, {{draft(0, 3, 1, 2)}}, {{verify(3, 4)}}})), "");
  EXPECT_EQ(fault(block({{{prompt()}},
                         {{draft(0, 1, 1, 1)}},
                         {{draft(0, 1, 2, 2)}},
                         {{draft(1, 3, 1, 2)}},
                         {{verify(3, 3)}},
                         {{verify(4, 4)}},
                         {{draft(0, 2, 1, 2)}},
                         {{draft(2, 3, 1, 2)}},
                         {{verify(3, 4)}}})),
            "");
}

TEST_F(SpeculationPlanRules, WhatWasHandedOffSpeculatesAndNothingBefore) {
  Plan plan = block({{{prompt()}}, {{draft(0, 3, 1, 2)}}, {{verify(3, 4)}}, {{draft(0, 3, 1, 2)}}, {{verify(3, 4)}}});
  plan.handoff = true;
  expect_fault(plan, {"submission 1", "has not been handed off"});
  plan.submissions[1].actions.push_back({ActionKind::hand_off, 0});
  EXPECT_EQ(fault(plan), "");
  plan = pipeline({{{prompt()}}});
  plan.handoff = true;
  for (int cycle = 0; cycle < 4; ++cycle) {
    plan.submissions.push_back({{stage(1, 3, 3), stage(0, 1, 1)}});
    plan.submissions.push_back({{stage(1, 4, 4), stage(0, 2, 2)}});
  }
  plan.submissions[1].actions.push_back({ActionKind::hand_off, 0});
  EXPECT_EQ(fault(plan), "");
}

TEST_F(SpeculationPlanRules, ARoundIsInOrder) {
  expect_fault(block({{{draft(0, 3, 1, 2)}}}), {"submission 0", "complete prompt"});
  expect_fault(block({{{prompt()}}, {{draft(1, 3, 1, 2)}}}), {"row 0 of the round is next"});
  expect_fault(block({{{prompt()}}, {{draft(0, 4, 1, 2)}}}), {"[0, 3)"});
  expect_fault(block({{{prompt()}}, {{draft(0, 3, 1, 3)}}}), {"a draft has loops 1..2"});
  expect_fault(block({{{prompt()}}, {{draft(0, 3, 1, 1)}}}), {"a candidate is known when"});
  expect_fault(block({{{prompt()}}, {{draft(0, 1, 2, 2)}}}), {"loop 1 is next"});
  expect_fault(block({{{prompt()}}, {{draft(0, 2, 1, 2)}}, {{verify(3, 4)}}}), {"needs row 2 of the round"});
  expect_fault(block({{{prompt()}}, {{draft(0, 3, 1, 2)}}, {{verify(4, 4)}}}), {"loop 3 is next"});
  expect_fault(block({{{prompt()}}, {{draft(0, 3, 1, 2)}}, {{verify(3, 4, 0, 2)}}}), {"all rows of the round [0, 3)"});
  expect_fault(block({{{prompt()}}, {{draft(0, 3, 1, 2)}}, {{verify(3, 3)}}, {{draft(0, 3, 1, 2)}}}), {"is being verified"});
}

TEST_F(SpeculationPlanRules, APlanHoldsAsManyRoundsAsRowsOrCyclesPerRow) {
  expect_fault(block({{{prompt()}}, {{draft(0, 3, 1, 2)}}, {{verify(3, 4)}}}), {"certain to have 1 of its 2 decode rows"});
  expect_fault(pipeline({{{prompt()}}, {{stage(1, 3, 4)}}, {{stage(0, 1, 2)}}, {{stage(0, 1, 2)}}, {{stage(1, 3, 4)}}}), {"certain to have 1 of its 2"});
}

TEST_F(SpeculationPlanRules, CyclesRunEveryStageOnce) {
  Plan plan = pipeline({{{prompt()}}});
  for (int cycle = 0; cycle < 4; ++cycle) {
    plan.submissions.push_back({{stage(1, 3, 3), stage(0, 1, 1)}});
    plan.submissions.push_back({{stage(1, 4, 4), stage(0, 2, 2)}});
  }
  EXPECT_EQ(fault(plan), "");
  expect_fault(pipeline({{{prompt()}}, {{stage(0, 1, 2)}}, {{stage(0, 1, 2)}}}), {"has run in this cycle"});
  expect_fault(pipeline({{{prompt()}}, {{stage(2, 5, 6)}}}), {"loops are not an ascending range"});
  expect_fault(pipeline({{{prompt()}}, {{stage(1, 1, 2)}}}), {"loop 3 is next"});
  expect_fault(pipeline({{{prompt()}}, {{stage(0, 1, 3)}}}), {"the stage has loops 1..2"});
}

TEST_F(SpeculationPlanRules, KindsOfRowsBelongToTheirPlans) {
  const WorkItem decode{0, RowKind::decode, 10, 11, 1, 4};
  expect_fault(block({{{prompt()}}, {{decode}}}), {"no decode items"});
  expect_fault(block({{{prompt()}}, {{stage(0, 1, 2)}}}), {"no token pipeline"});
  expect_fault(pipeline({{{prompt()}}, {{draft(0, 1, 1, 2)}}}), {"no block speculation"});
  Plan plain;
  plain.submissions = {{{prompt()}}, {{draft(0, 1, 1, 2)}}};
  expect_fault(plain, {"no block speculation"});
  add_request(8, 3);
  expect_fault(block({{{prompt()}}, {{draft(0, 1, 1, 1), {1, RowKind::prefill, 0, 8, 1, 1}}}}), {"submissions of their own"});
}

TEST_F(SpeculationPlanRules, SpeculationHasItsOwnLimits) {
  Plan plan = block({{{prompt()}}});
  plan.speculation.draft_depth = 3;
  expect_fault(plan, {"draft of 3 loops", "1..2"});
  for (const int length : {0, kMostDraftLength + 1, std::numeric_limits<int>::max()}) {
    plan.speculation = {SpeculationKind::block, 2, length};
    expect_fault(plan, {"a round drafts 1..64 tokens, not", std::to_string(length).c_str()});
  }
  plan.speculation = {SpeculationKind::pipeline, 4, 0};
  expect_fault(plan, {"draft of 4 loops", "1..3"});
  plan.speculation = {SpeculationKind::block, 2, 2};
  AlgorithmConfig exits;
  exits.exit.mode = ExitMode::trace;
  config_ = resolve(exits);
  expect_fault(plan, {"exit full"});
}

TEST_F(SpeculationPlanRules, SerialAlignedEncodingNeedsATailForEveryRowOnItsWay) {
  AlgorithmConfig quantized;
  quantized.kv_residual_quantization.enabled = true;
  quantized.kv_residual_quantization.tail = 2;
  config_ = resolve(quantized);
  const Plan plan = block({{{prompt()}}, {{draft(0, 3, 1, 2)}}, {{verify(3, 4)}}, {{draft(0, 3, 1, 2)}}, {{verify(3, 4)}}});
  expect_fault(plan, {"tail of 2", "3 rows"});
  quantized.kv_residual_quantization.tail = 3;
  config_ = resolve(quantized);
  EXPECT_EQ(fault(plan), "");
  quantized.kv_residual_quantization.tail = 0;
  quantized.kv_residual_quantization.timing = EncodingTiming::execution_dependent;
  config_ = resolve(quantized);
  EXPECT_EQ(fault(plan), "");
}

TEST_F(SpeculationPlanRules, RowsOnTheirWayAreGivenUpByRewindAndPreemption) {
  Plan plan = block({{{prompt()}}, {{draft(0, 2, 1, 2)}}, {{}, {{ActionKind::rewind, 0}}}, {{draft(2, 3, 1, 2)}}});
  expect_fault(plan, {"submission 3", "row 0 of the round is next"});
  plan.submissions[2].actions = {{ActionKind::preempt, 0}, {ActionKind::resume, 0}};
  expect_fault(plan, {"submission 3", "row 0 of the round is next"});
  Plan cycles = pipeline({{{prompt()}}});
  for (int i = 0; i < 4; ++i) {
    cycles.submissions.push_back({{stage(1, 3, 4)}});
    cycles.submissions.push_back({{stage(0, 1, 2)}});
  }
  EXPECT_EQ(fault(cycles), "");
  cycles.submissions[3].actions = {{ActionKind::rewind, 0}};
  expect_fault(cycles, {"certain to have 1 of its 2"});
}

TEST_F(SpeculationPlanRules, AFailedSubmissionAdvancesNoRound) {
  Plan plan = block({{{prompt()}}, {{draft(0, 3, 1, 2)}}, {{verify(3, 4)}, {}, PlannedFailure::launch}, {{verify(3, 4)}}});
  expect_fault(plan, {"submission 3", "needs a rewind"});
}

TEST_F(SpeculationPlanRules, SeveralRequestsShareASubmissionLoopByLoop) {
  add_request(8, 2);
  Plan plan = block({{{prompt()}}, {{prompt(1, 8)}}});
  for (int round = 0; round < 2; ++round) {
    for (int row = 0; row < 3; ++row) {
      for (int loop = 1; loop <= 2; ++loop) {
        plan.submissions.push_back({{draft(row, row + 1, loop, loop)}});
        if (round == 0) plan.submissions.back().items.push_back(draft(row, row + 1, loop, loop, 1));
      }
    }
    for (int loop = 3; loop <= 4; ++loop) {
      plan.submissions.push_back({{verify(loop, loop)}});
      if (round == 0) plan.submissions.back().items.push_back(verify(loop, loop, 1));
    }
  }
  EXPECT_EQ(fault(plan), "");
  plan.submissions.back().items.push_back(verify(4, 4));
  expect_fault(plan, {"two items of the submission"});
}

}  // namespace
}  // namespace loopgauge
