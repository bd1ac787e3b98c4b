// SPDX-License-Identifier: Apache-2.0
// Legality of plans (S-PLAN-2..8, S-PLAN-11): hand-made plans, each with one violation.
#include "models/plan.hpp"

#include <gtest/gtest.h>

#include <numeric>

namespace loopgauge {
namespace {

class PlanRules : public testing::Test {
 protected:
  PlanRules() : config_(resolve()) {
    trace_.vocab_size = 8;
    add_request(150, 3);
  }

  static EffectiveConfig resolve() {
    ModelConfig model;
    model.layers = 1, model.loops = 4, model.hidden = 8, model.heads = 1, model.head_dim = 8, model.intermediate = 8, model.vocab = 8;
    model.max_positions = 4096;
    AlgorithmConfig config;
    apply_switches(config, "t1s0q0");
    config.window = 64;
    return EffectiveConfig::resolve(config, model);
  }
  void add_request(int prompt, int tokens) {
    TraceRequest request;
    request.id = static_cast<int>(trace_.requests.size());
    request.prompt.assign(static_cast<std::size_t>(prompt), 1);
    request.max_new_tokens = tokens;  // tokens - 1 rows are forwarded
    trace_.requests.push_back(request);
  }

  static WorkItem prefill(int begin, int end, int first, int last, int request = 0) {
    return {request, RowKind::prefill, begin, end, first, last};
  }
  static WorkItem decode(int position, int first, int last, int request = 0) {
    return {request, RowKind::decode, position, position + 1, first, last};
  }

  // One item per submission.
  static Plan plan(std::initializer_list<WorkItem> items) {
    Plan p;
    for (const WorkItem& item : items) p.submissions.push_back({{item}});
    return p;
  }
  std::string fault(const Plan& p) const { return plan_fault(p, trace_, config_); }
  void expect_fault(const Plan& p, std::initializer_list<const char*> parts) const {
    const std::string text = fault(p);
    ASSERT_FALSE(text.empty()) << "accepted";
    for (const char* part : parts) EXPECT_NE(text.find(part), std::string::npos) << '"' << text << "\" lacks \"" << part << '"';
  }

  Trace trace_;
  EffectiveConfig config_;
};

TEST_F(PlanRules, WindowByWindowWithAllLoopsIsLegal) {
  EXPECT_EQ(fault(plan({prefill(0, 64, 1, 4), prefill(64, 128, 1, 4), prefill(128, 150, 1, 4), decode(150, 1, 4), decode(151, 1, 4)})), "");
}

TEST_F(PlanRules, TheWholePromptAtOnceIsLegal) {
  EXPECT_EQ(fault(plan({prefill(0, 150, 1, 4), decode(150, 1, 4), decode(151, 1, 4)})), "");
}

TEST_F(PlanRules, LoopByLoopOverTheWholePromptIsLegal) {
  EXPECT_EQ(fault(plan({prefill(0, 150, 1, 1), prefill(0, 150, 2, 2), prefill(0, 150, 3, 3), prefill(0, 150, 4, 4), decode(150, 1, 2),
                        decode(150, 3, 4), decode(151, 1, 4)})),
            "");
}

TEST_F(PlanRules, PiecesOfAWindowInOrderAreLegal) {
  EXPECT_EQ(fault(plan({prefill(0, 10, 1, 1), prefill(10, 64, 1, 1), prefill(0, 30, 2, 2), prefill(30, 64, 2, 2), prefill(0, 64, 3, 4),
                        prefill(64, 150, 1, 4), decode(150, 1, 4), decode(151, 1, 4)})),
            "");
}

TEST_F(PlanRules, AntiDiagonalsAreLegal) {
  Plan p;
  const PositionRange windows[] = {{0, 64}, {64, 128}, {128, 150}};
  for (int diagonal = 0; diagonal < 6; ++diagonal) {
    Submission s;
    for (int c = 0; c < 3; ++c) {
      const int loop = diagonal - c + 1;
      if (loop >= 1 && loop <= 4) s.items.push_back(prefill(windows[c].begin, windows[c].end, loop, loop));
    }
    p.submissions.push_back(s);
  }
  p.submissions.push_back({{decode(150, 1, 4)}});
  p.submissions.push_back({{decode(151, 1, 4)}});
  EXPECT_EQ(fault(p), "");
}

TEST_F(PlanRules, LoopsOfAPositionAreInOrder) {
  expect_fault(plan({prefill(0, 64, 2, 4)}), {"submission 0", "loop 1 is next"});
  expect_fault(plan({prefill(0, 64, 1, 1), prefill(0, 64, 3, 4)}), {"submission 1", "loop 2 is next"});
  expect_fault(plan({prefill(0, 64, 1, 1), prefill(0, 64, 1, 1)}), {"submission 1"});
}

TEST_F(PlanRules, AWindowNeedsEveryEarlierWindowAtItsLoop) {
  expect_fault(plan({prefill(64, 128, 1, 1)}), {"window 0", "loop 1"});
  expect_fault(plan({prefill(0, 128, 1, 2), prefill(64, 128, 3, 3)}), {"submission 1", "window 0", "loop 3"});
}

TEST_F(PlanRules, PiecesOfAWindowAreInAscendingOrder) { expect_fault(plan({prefill(32, 64, 1, 1)}), {"position 0"}); }

TEST_F(PlanRules, SelectionWaitsForTheWholeWindowOfTheLoopBefore) {
  expect_fault(plan({prefill(0, 64, 1, 1), prefill(0, 32, 2, 2), prefill(0, 32, 3, 3)}), {"submission 2", "window 0", "loop 2"});
}

TEST_F(PlanRules, APieceOfAWindowAdvancesOneLoop) { expect_fault(plan({prefill(0, 32, 1, 2)}), {"part of window 0"}); }

TEST_F(PlanRules, DecodeNeedsTheWholePromptAndItsPredecessor) {
  expect_fault(plan({prefill(0, 150, 1, 3), decode(150, 1, 4)}), {"complete prompt"});
  expect_fault(plan({prefill(0, 150, 1, 4), decode(151, 1, 4)}), {"position 150"});
  expect_fault(plan({prefill(0, 150, 1, 4), decode(150, 1, 2), decode(151, 1, 4)}), {"position 150", "all its loops"});
}

TEST_F(PlanRules, OneRequestGivesPrefillOrDecodeRowsNeverBoth) {
  Plan p = plan({prefill(0, 150, 1, 4)});
  p.submissions.push_back({{decode(150, 1, 1), prefill(0, 64, 4, 4)}});
  expect_fault(p, {"submission 1", "never both"});
}

TEST_F(PlanRules, SeveralItemsAdvanceOneLoopEachAndAreIndependent) {
  add_request(64, 1);
  Plan several_loops;
  several_loops.submissions.push_back({{prefill(0, 64, 1, 2), prefill(0, 64, 1, 1, 1)}});
  expect_fault(several_loops, {"exactly one loop"});
  Plan dependent;
  dependent.submissions.push_back({{prefill(0, 64, 1, 1), prefill(64, 128, 1, 1)}});
  expect_fault(dependent, {"window 0"});
  Plan twice;
  twice.submissions.push_back({{prefill(0, 64, 1, 1), prefill(0, 64, 1, 1)}});
  expect_fault(twice, {"two items"});
}

TEST_F(PlanRules, DecodeRowsStandBeforePrefillRows) {
  add_request(64, 1);
  Plan p = plan({prefill(0, 150, 1, 4)});
  p.submissions.push_back({{prefill(0, 64, 1, 1, 1), decode(150, 1, 1)}});
  expect_fault(p, {"before prefill"});
}

TEST_F(PlanRules, ItemsOutsideTheTraceAreRefused) {
  expect_fault(plan({prefill(0, 64, 1, 4, 7)}), {"no such request"});
  expect_fault(plan({prefill(0, 151, 1, 4)}), {"prompt"});
  expect_fault(plan({prefill(64, 64, 1, 4)}), {"non-empty"});
  expect_fault(plan({prefill(0, 64, 0, 4)}), {"loops"});
  expect_fault(plan({prefill(0, 64, 1, 5)}), {"loops"});
  expect_fault(plan({prefill(0, 150, 1, 4), decode(152, 1, 4)}), {"[150, 152)"});
}

TEST_F(PlanRules, APlanIsComplete) {
  expect_fault(plan({prefill(0, 150, 1, 4), decode(150, 1, 4)}), {"ends with", "position 151"});
  expect_fault(plan({prefill(0, 150, 1, 3)}), {"3 of 4"});
  expect_fault(plan({}), {"position 0"});
}

TEST_F(PlanRules, ForcedTokensAreAllForwarded) {
  trace_.requests[0].forced = {1, 2, 3};
  expect_fault(plan({prefill(0, 150, 1, 4), decode(150, 1, 4), decode(151, 1, 4)}), {"position 152"});
}

}  // namespace
}  // namespace loopgauge
