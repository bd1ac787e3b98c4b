// SPDX-License-Identifier: Apache-2.0
// Plans against the legality rules of models/plan.hpp, which know nothing of the planners, and against what each mode promises.
#include "harness/planner/planner.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "models/error.hpp"

namespace loopgauge::harness {
namespace {

EffectiveConfig effective(int window, int loops = kLoops) {
  ModelConfig model;
  model.loops = loops;
  AlgorithmConfig config;
  config.window = window;
  return EffectiveConfig::resolve(config, model);
}

TraceRequest request_of(int prompt, int forced, int arrival = 0) {
  TraceRequest request;
  request.arrival = arrival;
  request.prompt.assign(static_cast<std::size_t>(prompt), 65);
  request.forced.assign(static_cast<std::size_t>(forced), 66);
  request.max_new_tokens = forced;
  return request;
}

Trace trace_of(std::vector<TraceRequest> requests) {
  Trace trace;
  trace.name = "planned";
  trace.vocab_size = 264;
  for (std::size_t i = 0; i < requests.size(); ++i) requests[i].id = static_cast<int>(i);
  trace.requests = std::move(requests);
  return trace;
}

ModeSpec split_mode(int piece_tokens) {
  ModeSpec mode;
  mode.name = "split";
  mode.piece_tokens = piece_tokens;
  return mode;
}

std::string text(const WorkItem& item) {
  return "r" + std::to_string(item.request) + (item.kind == RowKind::prefill ? " P[" : " D[") + std::to_string(item.begin) + "," +
         std::to_string(item.end) + ") " + std::to_string(item.loop_first) + ".." + std::to_string(item.loop_last);
}

std::vector<std::string> texts(const Plan& plan) {
  std::vector<std::string> lines;
  for (const Submission& submission : plan.submissions) {
    EXPECT_EQ(submission.items.size(), 1u);
    lines.push_back(text(submission.items.at(0)));
  }
  return lines;
}

TEST(Planner, SerialRunsWindowsAndTokensWhole) {
  const Plan plan = make_plan(ModeSpec{}, trace_of({request_of(129, 2), request_of(3, 1)}), effective(64));
  EXPECT_EQ(plan.mode, "serial");
  EXPECT_EQ(texts(plan), (std::vector<std::string>{"r0 P[0,64) 1..4", "r0 P[64,128) 1..4", "r0 P[128,129) 1..4", "r0 D[129,130) 1..4",
                                                   "r0 D[130,131) 1..4", "r1 P[0,3) 1..4", "r1 D[3,4) 1..4"}));
}

TEST(Planner, SplitRunsOneLoopAtATime) {
  const Plan plan = make_plan(split_mode(0), trace_of({request_of(65, 1)}), effective(64));
  EXPECT_EQ(plan.mode, "split");
  EXPECT_EQ(texts(plan), (std::vector<std::string>{"r0 P[0,64) 1..1", "r0 P[0,64) 2..2", "r0 P[0,64) 3..3", "r0 P[0,64) 4..4",
                                                   "r0 P[64,65) 1..1", "r0 P[64,65) 2..2", "r0 P[64,65) 3..3", "r0 P[64,65) 4..4",
                                                   "r0 D[65,66) 1..1", "r0 D[65,66) 2..2", "r0 D[65,66) 3..3", "r0 D[65,66) 4..4"}));
}

TEST(Planner, PiecesStayInsideTheirWindow) {
  const Plan plan = make_plan(split_mode(50), trace_of({request_of(70, 0)}), effective(64, 2));
  EXPECT_EQ(plan.mode, "split.p50");
  EXPECT_EQ(texts(plan), (std::vector<std::string>{"r0 P[0,50) 1..1", "r0 P[50,64) 1..1", "r0 P[0,50) 2..2", "r0 P[50,64) 2..2",
                                                   "r0 P[64,70) 1..1", "r0 P[64,70) 2..2"}));
}

TEST(Planner, FreeRunsForwardOneTokenLess) {
  TraceRequest request = request_of(5, 0);
  for (const auto& [max_new_tokens, rows] : {std::pair{0, 0}, {1, 0}, {2, 1}, {9, 8}}) {
    request.max_new_tokens = max_new_tokens;
    EXPECT_EQ(fed_tokens(request), rows);
    EXPECT_EQ(make_plan(ModeSpec{}, trace_of({request}), effective(64)).submissions.size(), static_cast<std::size_t>(1 + rows));
  }
  EXPECT_EQ(fed_tokens(request_of(5, 3)), 3);
}

TEST(Planner, SplitInterleavesRequests) {
  const Plan plan = make_plan(split_mode(0), trace_of({request_of(1, 2), request_of(1, 2), request_of(1, 2)}), effective(64));
  for (std::size_t i = 0; i < plan.submissions.size(); ++i) {
    EXPECT_EQ(plan.submissions[i].items[0].request, static_cast<int>(i % 3)) << "submission " << i;
  }
  // A short prompt decodes while a long one is still being read.
  const Plan uneven = make_plan(split_mode(0), trace_of({request_of(300, 1), request_of(1, 8)}), effective(64));
  bool decode_before_prefill = false, seen_decode = false;
  for (const Submission& submission : uneven.submissions) {
    seen_decode |= submission.items[0].request == 1 && submission.items[0].kind == RowKind::decode;
    decode_before_prefill |= seen_decode && submission.items[0].kind == RowKind::prefill;
  }
  EXPECT_TRUE(decode_before_prefill);
}

TEST(Planner, NothingRunsBeforeItsArrival) {
  const Trace trace = trace_of({request_of(64, 1, 6), request_of(1, 1, 0), request_of(2, 0, 100)});
  const Plan split = make_plan(split_mode(0), trace, effective(64));
  for (std::size_t i = 0; i < split.submissions.size(); ++i) {
    if (split.submissions[i].items[0].request == 0) {
      EXPECT_GE(i, 6u);
    }
  }
  EXPECT_EQ(plan_fault(split, trace, effective(64)), "");
  // Request 2 arrives after everything else has ended: the submission index skips to it.
  EXPECT_EQ(split.submissions.back().items[0].request, 2);

  const Plan serial = make_plan(ModeSpec{}, trace, effective(64));
  EXPECT_EQ(texts(serial),
            (std::vector<std::string>{"r1 P[0,1) 1..4", "r1 D[1,2) 1..4", "r0 P[0,64) 1..4", "r0 D[64,65) 1..4", "r2 P[0,2) 1..4"}));
}

TEST(Planner, ExecutorsWithFewerLoopsGetFewerLoops) {
  for (const ModeSpec& mode : {ModeSpec{}, split_mode(0)}) {
    const Trace trace = trace_of({request_of(65, 1)});
    const Plan plan = make_plan(mode, trace, effective(64, 3));
    for (const Submission& submission : plan.submissions) EXPECT_LE(submission.items[0].loop_last, 3);
    EXPECT_EQ(plan_fault(plan, trace, effective(64, 3)), "");
  }
}

TEST(Planner, EveryPlanIsLegalAndComplete) {
  const int lengths[] = {1, 2, 7, 63, 64, 65, 127, 128, 129, 191, 192, 255, 256, 257, 511, 512, 700};
  for (int window : {64, 128, 256, 512}) {
    for (int length : lengths) {
      const Trace trace = trace_of({request_of(length, 3)});
      EXPECT_EQ(plan_fault(make_plan(ModeSpec{}, trace, effective(window)), trace, effective(window)), "") << window << " " << length;
      for (int piece : {0, 1, 2, 63, 64, 100, 255, 256, 10000}) {
        EXPECT_EQ(plan_fault(make_plan(split_mode(piece), trace, effective(window)), trace, effective(window)), "")
            << "window " << window << ", prompt " << length << ", pieces " << piece;
      }
    }
  }
}

TEST(Planner, RandomTracesGiveLegalPlans) {
  std::mt19937 generator(11);
  const auto below = [&](int n) { return static_cast<int>(generator() % static_cast<unsigned>(n)); };
  for (int i = 0; i < 200; ++i) {
    std::vector<TraceRequest> requests;
    for (int r = 0; r <= below(5); ++r) {
      requests.push_back(request_of(1 + below(300), below(2) * below(20), below(2) * below(60)));
      if (!requests.back().teacher_forced()) requests.back().max_new_tokens = below(20);
    }
    const Trace trace = trace_of(requests);
    const EffectiveConfig config = effective(64 * (1 + below(4)));
    const ModeSpec mode = below(3) == 0 ? ModeSpec{} : split_mode(below(2) * below(200));
    EXPECT_EQ(plan_fault(make_plan(mode, trace, config), trace, config), "") << mode_text(mode) << ", trace " << i;
  }
}

TEST(Planner, RefusesWhatItDoesNotPlan) {
  Trace trace = trace_of({request_of(5, 1)});
  ModeSpec mode;
  mode.name = "wcpb";
  EXPECT_THROW(make_plan(mode, trace, effective(64)), UnsupportedError);
  mode.name = "nonsense";
  EXPECT_THROW(make_plan(mode, trace, effective(64)), ConfigError);
  EXPECT_THROW(make_plan(split_mode(-1), trace, effective(64)), ConfigError);
  trace.events.push_back({});
  EXPECT_THROW(make_plan(ModeSpec{}, trace, effective(64)), UnsupportedError);
}

}  // namespace
}  // namespace loopgauge::harness
