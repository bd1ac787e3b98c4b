// SPDX-License-Identifier: Apache-2.0
// Legality of plans (S-PLAN-2..8, S-PLAN-11, S-ACT, S-FAIL-1, S-PFX-3): hand-made plans, each with one violation.
#include "models/plan.hpp"

#include <gtest/gtest.h>

#include <numeric>
#include <set>

#include "models/error.hpp"
#include "tests/reference/plan_rules.hpp"

namespace loopgauge {
namespace {

class PlanRules : public PlanRulesTest {
 protected:
  PlanRules() : PlanRulesTest(resolve()) { add_request(150, 3); }

  static EffectiveConfig resolve(const char* switches = "t1s0q0", ExitMode exit = ExitMode::full) {
    AlgorithmConfig config;
    apply_switches(config, switches);
    config.window = 64;
    config.exit.mode = exit;
    return resolve_for_small_model(config);
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
  // Actions alone.
  static Submission acts(std::initializer_list<Action> actions) { return {{}, actions}; }
  static Submission failing(const WorkItem& item, PlannedFailure failure = PlannedFailure::launch) { return {{item}, {}, failure}; }
  // Submissions one after the other.
  static Plan sequence(std::initializer_list<Submission> submissions) {
    Plan p;
    p.submissions = submissions;
    return p;
  }
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

// ---- actions ----

// Request 0 is 150 positions, then rows 150 and 151.
class ActionRules : public PlanRules {
 protected:
  Submission whole(int request = 0, int length = 150) const { return {{prefill(0, length, 1, 4, request)}}; }
  Submission row(int position, int request = 0) const { return {{decode(position, 1, 4, request)}}; }
};

TEST_F(ActionRules, ACancelledRequestNeedsNoMore) {
  EXPECT_EQ(fault(sequence({whole(), acts({{ActionKind::cancel, 0}})})), "");
  EXPECT_EQ(fault(sequence({acts({{ActionKind::cancel, 0}})})), "") << "before it began";
  EXPECT_EQ(fault(sequence({{{prefill(0, 150, 1, 2)}}, acts({{ActionKind::preempt, 0}}), acts({{ActionKind::cancel, 0}})})), "") << "while it is away";
}

TEST_F(ActionRules, NothingOfACancelledRequestRuns) {
  expect_fault(sequence({whole(), acts({{ActionKind::cancel, 0}}), row(150)}), {"submission 2", "position", "cancelled"});
  for (const ActionKind kind : {ActionKind::cancel, ActionKind::preempt, ActionKind::resume, ActionKind::rewind, ActionKind::publish, ActionKind::reuse}) {
    expect_fault(sequence({whole(), acts({{ActionKind::cancel, 0}}), acts({{kind, 0, 1}})}), {"submission 2", to_string(kind).data(), "cancelled"});
  }
}

TEST_F(ActionRules, PreemptAndResumeGoInPairs) {
  EXPECT_EQ(fault(sequence({{{prefill(0, 64, 1, 3)}}, acts({{ActionKind::preempt, 0}, {ActionKind::resume, 0}}), {{prefill(0, 64, 4, 4)}},
                            {{prefill(64, 150, 1, 4)}}, {{decode(150, 1, 2)}}, {{decode(150, 3, 4)}, {{ActionKind::preempt, 0}, {ActionKind::resume, 0}}},
                            row(151)})),
            "");
  expect_fault(sequence({acts({{ActionKind::preempt, 0}})}), {"preempt of request 0", "holds nothing"});
  expect_fault(sequence({whole(), acts({{ActionKind::preempt, 0}, {ActionKind::preempt, 0}})}), {"submission 1", "preempted already"});
  expect_fault(sequence({whole(), acts({{ActionKind::resume, 0}})}), {"resume of request 0", "not preempted"});
  expect_fault(sequence({whole(), acts({{ActionKind::preempt, 0}}), row(150)}), {"submission 2", "not resumed"});
  expect_fault(sequence({whole(), row(150), row(151), acts({{ActionKind::preempt, 0}})}), {"ends with request 0 preempted"});
}

TEST_F(ActionRules, OnlyCancelAndResumeReachAPreemptedRequest) {
  for (const ActionKind kind : {ActionKind::rewind, ActionKind::publish}) {
    expect_fault(sequence({{{prefill(0, 64, 1, 4)}}, acts({{ActionKind::preempt, 0}}), acts({{kind, 0, 1}})}), {"submission 2", "preempted"});
  }
}

TEST_F(ActionRules, ARewindStartsUnfinishedWindowsAndRowsOver) {
  EXPECT_EQ(fault(sequence({{{prefill(0, 64, 1, 4)}}, {{prefill(64, 150, 1, 3)}}, {{prefill(64, 150, 1, 4)}, {{ActionKind::rewind, 0}}}, {{decode(150, 1, 3)}},
                            {{decode(150, 1, 4)}, {{ActionKind::rewind, 0}}}, row(151)})),
            "");
  expect_fault(sequence({{{prefill(0, 150, 1, 3)}}, {{prefill(0, 150, 4, 4)}, {{ActionKind::rewind, 0}}}}), {"submission 1", "loop 1 is next"});
  expect_fault(sequence({{{prefill(0, 64, 1, 4)}}, {{prefill(0, 64, 1, 4)}, {{ActionKind::rewind, 0}}}}), {"submission 1", "completed 4 loops"});
  expect_fault(sequence({whole(), {{decode(150, 1, 2)}}, {{decode(150, 3, 4)}, {{ActionKind::rewind, 0}}}}), {"submission 2", "loop 1 is next"});
  expect_fault(sequence({acts({{ActionKind::rewind, 0}})}), {"rewind of request 0", "holds nothing"});
}

TEST_F(ActionRules, APieceIsForgottenByARewind) {
  expect_fault(sequence({{{prefill(0, 30, 1, 1)}}, {{prefill(30, 64, 1, 1)}, {{ActionKind::rewind, 0}}}}), {"submission 1", "position 0"});
}

TEST_F(ActionRules, AFailedSubmissionAdvancesNothingAndAsksForARewind) {
  for (const PlannedFailure failure : {PlannedFailure::allocation, PlannedFailure::launch}) {
    EXPECT_EQ(fault(sequence({failing(prefill(0, 150, 1, 4), failure), {{prefill(0, 150, 1, 4)}, {{ActionKind::rewind, 0}}}, row(150),
                              failing(decode(151, 1, 4), failure), {{decode(151, 1, 4)}, {{ActionKind::rewind, 0}}}})),
              "");
    EXPECT_EQ(fault(sequence({failing(prefill(0, 150, 1, 4), failure), acts({{ActionKind::cancel, 0}})})), "");
  }
  expect_fault(sequence({failing(prefill(0, 64, 1, 4)), whole()}), {"submission 1", "failed", "rewind"});
  expect_fault(sequence({failing(prefill(0, 64, 1, 4)), acts({{ActionKind::preempt, 0}})}), {"preempt of request 0", "undefined until a rewind"});
  expect_fault(sequence({whole(), row(150), row(151), failing(prefill(0, 64, 1, 1))}), {"completed 4 loops"});
  expect_fault(sequence({whole(), row(150), failing(decode(151, 1, 4))}), {"ends with request 0", "without a rewind"});
  Submission nothing = acts({});
  nothing.failure = PlannedFailure::allocation;
  expect_fault(sequence({nothing}), {"a planned failure needs an item"});
  Submission twice = failing(prefill(0, 64, 1, 1));
  twice.items.push_back(prefill(0, 64, 1, 1));
  expect_fault(sequence({twice}), {"two items"});
}

TEST_F(ActionRules, AFailureConcernsTheRequestsOfItsSubmissionOnly) {
  add_request(64, 1);
  Submission both = failing(prefill(0, 64, 1, 1));
  EXPECT_EQ(fault(sequence({both, whole(1, 64), {{prefill(0, 150, 1, 4)}, {{ActionKind::rewind, 0}}}, row(150), row(151)})), "");
  both.items.push_back(prefill(0, 64, 1, 1, 1));
  expect_fault(sequence({both, whole(1, 64)}), {"submission 1", "request 1", "rewind"});
}

TEST_F(ActionRules, AnIdIsTakenOverFromARequestThatIsCompleteOrCancelled) {
  add_request(64, 1);
  trace_.requests[1].id = 0;
  EXPECT_EQ(fault(sequence({whole(), row(150), row(151), whole(1, 64)})), "");
  EXPECT_EQ(fault(sequence({whole(), acts({{ActionKind::cancel, 0}}), whole(1, 64)})), "");
  EXPECT_EQ(fault(sequence({whole(1, 64), whole(), row(150), row(151)})), "") << "the one that is complete may come first";
  expect_fault(sequence({whole(), row(150), whole(1, 64)}), {"submission 2", "request 0", "id 0", "live"});
  expect_fault(sequence({{{prefill(0, 64, 1, 1), prefill(0, 64, 1, 1, 1)}}}), {"submission 0", "live"});
}

TEST_F(ActionRules, PublishedAreWholeCompleteWindowsBeforeTheLastOne) {
  const Submission publish = acts({{ActionKind::publish, 0, 2}});
  EXPECT_EQ(fault(sequence({{{prefill(0, 128, 1, 4)}}, publish, {{prefill(128, 150, 1, 4)}}, row(150), row(151)})), "");
  expect_fault(sequence({{{prefill(0, 64, 1, 4)}}, publish}), {"publish of request 0, windows 2", "(window 1, loop 4)", "completed 0 loops"});
  expect_fault(sequence({{{prefill(0, 128, 1, 3)}}, publish}), {"(window 0, loop 4)", "completed 3 loops"});
  for (const int windows : {-1, 0, 3}) {
    expect_fault(sequence({{{prefill(0, 128, 1, 4)}}, acts({{ActionKind::publish, 0, windows}})}), {"not in 1..2"});
  }
  expect_fault(sequence({acts({{ActionKind::publish, 0, 1}})}), {"(window 0, loop 4)"});
  expect_fault(sequence({failing(prefill(0, 64, 1, 4)), acts({{ActionKind::publish, 0, 1}})}), {"rewind"});
}

TEST_F(ActionRules, PublicationComesBeforeThePromptIsComplete) {
  for (const char* text : {"t0s0q0", "t1s1q1"}) {
    config_ = resolve(text);
    expect_fault(sequence({whole(), acts({{ActionKind::publish, 0, 1}})}), {"submission 1", "the prompt is complete"});
  }
}

TEST_F(ActionRules, ARequestBeginsWithWindowsThatArePublished) {
  add_request(130, 1);
  const Submission published = {{prefill(128, 150, 1, 4)}, {{ActionKind::publish, 0, 2}}};
  const Plan reusing = sequence({{{prefill(0, 128, 1, 4)}}, published, row(150), row(151), {{prefill(128, 130, 1, 4, 1)}, {{ActionKind::reuse, 1, 2}}}});
  EXPECT_EQ(fault(reusing), "");
  Plan partly = reusing;
  partly.submissions.back() = {{prefill(64, 130, 1, 4, 1)}, {{ActionKind::reuse, 1, 1}}};
  EXPECT_EQ(fault(partly), "") << "fewer than there are";
  Plan again = reusing;
  again.submissions.back() = {{prefill(0, 130, 1, 4, 1)}, {{ActionKind::reuse, 1, 2}}};
  expect_fault(again, {"completed 4 loops"});
  Plan early = reusing;
  early.submissions[1].actions.clear();
  expect_fault(early, {"reuse of request 1", "window 0 with these tokens is not published"});
  Plan late = reusing;
  late.submissions.insert(late.submissions.end() - 1, whole(1, 130));
  expect_fault(late, {"reuse of request 1", "has begun"});
  Plan too_many = reusing;
  too_many.submissions.back().actions[0].windows = 3;
  expect_fault(too_many, {"not in 1..2"});
  trace_.requests[1].prompt[100] = 2;
  expect_fault(reusing, {"window 1 with these tokens is not published"});
}

TEST_F(ActionRules, AWindowIsToldApartByEveryTokenBeforeIt) {
  add_request(130, 1);
  trace_.requests[1].prompt[3] = 2;  // window 1 has the published tokens, window 0 has not
  expect_fault(sequence({{{prefill(0, 128, 1, 4)}}, {{prefill(128, 150, 1, 4)}, {{ActionKind::publish, 0, 2}}}, acts({{ActionKind::reuse, 1, 2}})}),
               {"window 0 with these tokens"});
}

TEST_F(ActionRules, AnEvictedWindowIsFoundNoLonger) {
  add_request(130, 1);
  const auto plan_with = [&](int evicted_from, int reused) {
    const int begin = 64 * reused;
    Plan p = sequence({{{prefill(0, 128, 1, 4)}}, {{prefill(128, 150, 1, 4)}, {{ActionKind::publish, 0, 2}}}, row(150), row(151),
                       acts({{ActionKind::evict, 0, evicted_from}}), {{prefill(begin, 130, 1, 4, 1)}, {{ActionKind::reuse, 1, reused}}}});
    return p;
  };
  EXPECT_EQ(fault(plan_with(1, 1)), "") << "the windows before stay";
  expect_fault(plan_with(1, 2), {"window 1 with these tokens is not published"});
  expect_fault(plan_with(0, 1), {"window 0 with these tokens is not published"});
  EXPECT_EQ(fault(sequence({whole(), acts({{ActionKind::evict, 0, 0}}), row(150), row(151), whole(1, 130)})), "") << "nothing was published";
  expect_fault(sequence({acts({{ActionKind::evict, 0, -1}})}), {"-1 is no window"});
}

TEST_F(ActionRules, ReadersOfEvictedWindowsGoOn) {
  add_request(130, 1);
  EXPECT_EQ(fault(sequence({{{prefill(0, 128, 1, 4)}}, {{prefill(128, 150, 1, 4)}, {{ActionKind::publish, 0, 2}}}, acts({{ActionKind::reuse, 1, 2}}),
                            acts({{ActionKind::cancel, 0}, {ActionKind::evict, 0, 0}}), {{prefill(128, 130, 1, 4, 1)}}})),
            "");
}

TEST_F(ActionRules, OutsideTheTraceAreRefused) {
  for (const ActionKind kind : {ActionKind::cancel, ActionKind::preempt, ActionKind::resume, ActionKind::rewind, ActionKind::publish, ActionKind::reuse,
                                ActionKind::evict}) {
    for (const int request : {-1, 7}) expect_fault(sequence({acts({{kind, request, 1}})}), {"submission 0", to_string(kind).data(), "no such request"});
  }
}

TEST_F(ActionRules, AreAppliedInTheirOrderBeforeTheItems) {
  EXPECT_EQ(fault(sequence({{{prefill(0, 64, 1, 3)}}, {{prefill(0, 150, 1, 4)}, {{ActionKind::preempt, 0}, {ActionKind::resume, 0}, {ActionKind::rewind, 0}}},
                            row(150), row(151)})),
            "");
  expect_fault(sequence({{{prefill(0, 64, 1, 3)}}, acts({{ActionKind::preempt, 0}, {ActionKind::rewind, 0}, {ActionKind::resume, 0}})}),
               {"rewind of request 0", "preempted"});
}

// ---- submissions in flight ----

TEST_F(ActionRules, AtLeastOneSubmissionIsInFlight) {
  Plan p = sequence({whole(), row(150), row(151)});
  for (const int in_flight : {1, 2, 7}) {
    p.submissions_in_flight = in_flight;
    EXPECT_EQ(fault(p), "");
  }
  for (const int in_flight : {0, -1}) {
    p.submissions_in_flight = in_flight;
    expect_fault(p, {"at least one submission"});
  }
}

TEST_F(ActionRules, AnExitThatIsDecidedBeforeTheNextLoopExcludesLateResults) {
  Plan p = sequence({whole(), row(150), row(151)});
  config_ = resolve("t1s0q0", ExitMode::threshold);
  EXPECT_EQ(fault(p), "");
  p.submissions_in_flight = 2;
  expect_fault(p, {"exit threshold", "2 submissions in flight", "delayed"});
  config_ = resolve("t1s0q0", ExitMode::delayed);
  EXPECT_EQ(fault(p), "");
}

// ---- words ----

TEST(PlanWords, FailuresAreParsedAndOthersRefusedWithTheList) {
  for (const PlannedFailure failure : {PlannedFailure::none, PlannedFailure::allocation, PlannedFailure::launch}) {
    EXPECT_EQ(parse_planned_failure(to_string(failure)), failure);
  }
  try {
    parse_planned_failure("crash");
    ADD_FAILURE() << "accepted";
  } catch (const ConfigError& error) {
    EXPECT_STREQ(error.what(), "failure 'crash' is not one of: none, allocation, launch");
  }
}

TEST(PlanWords, OfActionsAreDistinct) {
  std::set<std::string_view> words;
  for (const ActionKind kind : {ActionKind::cancel, ActionKind::preempt, ActionKind::resume, ActionKind::rewind, ActionKind::publish, ActionKind::reuse,
                                ActionKind::evict}) {
    words.insert(to_string(kind));
  }
  EXPECT_EQ(words.size(), 7u);
}

}  // namespace
}  // namespace loopgauge
