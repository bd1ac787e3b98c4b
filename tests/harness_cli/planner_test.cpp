// SPDX-License-Identifier: Apache-2.0
// Plans against the legality rules of models/plan.hpp, which know nothing of the planners, and against what each mode promises.
#include "harness/planner/planner.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <random>
#include <set>

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

ModeSpec split_mode(int piece_tokens) { return {.schedule = "split", .piece_tokens = piece_tokens}; }

std::string text(const WorkItem& item) {
  const std::string kind = item.kind == RowKind::prefill ? "P" : item.kind == RowKind::decode ? "D" : std::string(to_string(item.kind));
  return "r" + std::to_string(item.request) + " " + kind + "[" + std::to_string(item.begin) + "," + std::to_string(item.end) + ") " +
         std::to_string(item.loop_first) + ".." + std::to_string(item.loop_last);
}

std::string text(const Action& action) {
  return std::string(to_string(action.kind)) + " r" + std::to_string(action.request) +
         (action.windows != 0 ? " " + std::to_string(action.windows) : "");
}

// "preempt r0 | r1 D[3,4) 1..1, r2 P[0,64) 2..2": actions, then items.
std::string text(const Submission& submission) {
  std::string line;
  for (const Action& action : submission.actions) line += (line.empty() ? "" : ", ") + text(action);
  if (!submission.actions.empty()) line += " | ";
  for (const WorkItem& item : submission.items) line += (&item == submission.items.data() ? "" : ", ") + text(item);
  if (submission.failure != PlannedFailure::none) line += " fails: " + std::string(to_string(submission.failure));
  return line;
}

std::vector<std::string> texts(const Plan& plan) {
  std::vector<std::string> lines;
  for (const Submission& submission : plan.submissions) lines.push_back(text(submission));
  return lines;
}

using Lines = std::vector<std::string>;

Plan planned(std::string_view mode, const Trace& trace, int window = 64, const PlanOptions& options = {}) {
  return make_plan(parse_mode(mode), trace, effective(window), options);
}

int count(const Plan& plan, ActionKind kind) {
  int actions = 0;
  for (const Submission& submission : plan.submissions) {
    for (const Action& action : submission.actions) actions += action.kind == kind ? 1 : 0;
  }
  return actions;
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

TEST(Planner, ARequestAloneTakesADraftAndAVerificationARound) {
  EXPECT_EQ(texts(planned("block_spec.d2.k3", trace_of({request_of(70, 2)}))),
            (Lines{"r0 P[0,64) 1..4", "r0 P[64,70) 1..4", "r0 draft[0,4) 1..2", "r0 verify[0,4) 3..4", "r0 draft[0,4) 1..2",
                   "r0 verify[0,4) 3..4"}));
}

TEST(Planner, RequestsThatBeginARoundTogetherGoThroughItTogether) {
  // The second has one row: it takes part in one round.
  EXPECT_EQ(texts(planned("block_spec.d1.k1", trace_of({request_of(3, 2), request_of(5, 1)}))),
            (Lines{"r0 P[0,3) 1..4", "r1 P[0,5) 1..4", "r0 draft[0,1) 1..1, r1 draft[0,1) 1..1", "r0 draft[1,2) 1..1, r1 draft[1,2) 1..1",
                   "r0 verify[0,2) 2..2, r1 verify[0,2) 2..2", "r0 verify[0,2) 3..3, r1 verify[0,2) 3..3",
                   "r0 verify[0,2) 4..4, r1 verify[0,2) 4..4", "r0 draft[0,2) 1..1", "r0 verify[0,2) 2..4"}));
}

TEST(Planner, AnArrivalWaitsForTheRoundToEnd) {
  EXPECT_EQ(texts(planned("block_spec.d2.k1", trace_of({request_of(3, 1), request_of(5, 0, 2)}))),
            (Lines{"r0 P[0,3) 1..4", "r0 draft[0,2) 1..2", "r0 verify[0,2) 3..4", "r1 P[0,5) 1..4"}));
}

TEST(Planner, ACycleRunsEveryStageDeepestFirst) {
  EXPECT_EQ(texts(planned("pipeline_spec.d2", trace_of({request_of(3, 1)}))),
            (Lines{"r0 P[0,3) 1..4", "r0 stage[1,2) 3..3, r0 stage[0,1) 1..1", "r0 stage[1,2) 4..4, r0 stage[0,1) 2..2",
                   "r0 stage[1,2) 3..3, r0 stage[0,1) 1..1", "r0 stage[1,2) 4..4, r0 stage[0,1) 2..2"}));
  EXPECT_EQ(texts(planned("pipeline_spec.d3", trace_of({request_of(3, 1)})))[1], "r0 stage[1,2) 4..4, r0 stage[0,1) 1..1");
}

TEST(Planner, PreemptionWaitsForTheRoundToEnd) {
  Trace trace = trace_of({request_of(3, 2)});
  trace.events = {{2, TraceEventKind::preempt, 0}, {3, TraceEventKind::resume, 0}, {4, TraceEventKind::preempt, 0}};
  EXPECT_EQ(texts(planned("block_spec.d2.k1", trace)),
            (Lines{"r0 P[0,3) 1..4", "r0 draft[0,2) 1..2", "r0 verify[0,2) 3..4", "r0 draft[0,2) 1..2", "r0 verify[0,2) 3..4"}))
      << "the first was taken back before the round ended, the second came when all was done";
  trace.events = {{2, TraceEventKind::preempt, 0}, {4, TraceEventKind::resume, 0}};
  EXPECT_EQ(texts(planned("block_spec.d2.k1", trace)), (Lines{"r0 P[0,3) 1..4", "r0 draft[0,2) 1..2", "r0 verify[0,2) 3..4", "preempt r0 | ",
                                                              "resume r0 | r0 draft[0,2) 1..2", "r0 verify[0,2) 3..4"}));
}

TEST(Planner, RefusesWhatItDoesNotPlan) {
  const Trace trace = trace_of({request_of(5, 1)});
  EXPECT_THROW(make_plan({.schedule = "nonsense"}, trace, effective(64)), ConfigError);
  EXPECT_THROW(make_plan(split_mode(-1), trace, effective(64)), ConfigError);
  EXPECT_THROW(make_plan({.schedule = "mixed", .token_budget = 1}, trace, effective(64)), ConfigError);
  EXPECT_THROW(make_plan({.schedule = "wcpb", .chunk_windows = 0}, trace, effective(64)), ConfigError);
  EXPECT_THROW(make_plan({.preempt = true, .preempt_loops = 0}, trace, effective(64)), ConfigError);
  EXPECT_THROW(make_plan({.prefix = true, .published_windows = -1}, trace, effective(64)), ConfigError);
}

// ---- wcpb -------------------------------------------------------------------------------------------------------------------

TEST(PlannerWcpb, RunsAntiDiagonals) {
  EXPECT_EQ(texts(planned("wcpb", trace_of({request_of(129, 1)}))),
            (Lines{"r0 P[0,64) 1..1", "r0 P[0,64) 2..2, r0 P[64,128) 1..1", "r0 P[0,64) 3..3, r0 P[64,128) 2..2, r0 P[128,129) 1..1",
                   "r0 P[0,64) 4..4, r0 P[64,128) 3..3, r0 P[128,129) 2..2", "r0 P[64,128) 4..4, r0 P[128,129) 3..3", "r0 P[128,129) 4..4",
                   "r0 D[129,130) 1..4"}));
}

TEST(PlannerWcpb, ChunksAreWholeWindows) {
  EXPECT_EQ(texts(planned("wcpb.c2", trace_of({request_of(200, 0)}))),
            (Lines{"r0 P[0,128) 1..1", "r0 P[0,128) 2..2, r0 P[128,200) 1..1", "r0 P[0,128) 3..3, r0 P[128,200) 2..2",
                   "r0 P[0,128) 4..4, r0 P[128,200) 3..3", "r0 P[128,200) 4..4"}));
}

TEST(PlannerWcpb, AnyNumberOfChunksTakesChunksPlusLoopsMinusOneSubmissions) {
  for (int chunks : {1, 2, 3, 4, 5, 8, 20}) {
    EXPECT_EQ(planned("wcpb", trace_of({request_of(64 * chunks, 0)})).submissions.size(), static_cast<std::size_t>(chunks + kLoops - 1));
  }
}

// ---- mixed ------------------------------------------------------------------------------------------------------------------

TEST(PlannerMixed, DecodeRowsFirstThenPromptsAtOtherDepths) {
  const Plan plan = planned("mixed", trace_of({request_of(1, 2), request_of(70, 0, 5)}));
  EXPECT_EQ(texts(plan), (Lines{"r0 P[0,1) 1..1", "r0 P[0,1) 2..2", "r0 P[0,1) 3..3", "r0 P[0,1) 4..4", "r0 D[1,2) 1..1",
                                "r0 D[1,2) 2..2, r1 P[0,64) 1..1", "r0 D[1,2) 3..3, r1 P[0,64) 2..2", "r0 D[1,2) 4..4, r1 P[0,64) 3..3",
                                "r0 D[2,3) 1..1, r1 P[0,64) 4..4", "r0 D[2,3) 2..2, r1 P[64,70) 1..1", "r0 D[2,3) 3..3, r1 P[64,70) 2..2",
                                "r0 D[2,3) 4..4, r1 P[64,70) 3..3", "r1 P[64,70) 4..4"}));
}

TEST(PlannerMixed, KeepsItsBudgetAndServesEverybody) {
  const Trace trace = trace_of({request_of(1, 6), request_of(1, 6), request_of(1, 6), request_of(100, 1), request_of(100, 1)});
  for (int budget : {2, 3, 5, 64, 1000}) {
    const Plan plan = make_plan({.schedule = "mixed", .token_budget = budget}, trace, effective(64));
    std::vector<std::size_t> last(trace.requests.size(), 0);
    std::vector<int> left(trace.requests.size(), 0);  // positions times loops
    for (std::size_t r = 0; r < left.size(); ++r) left[r] = kLoops * (trace.requests[r].prompt_length() + fed_tokens(trace.requests[r]));
    for (std::size_t i = 0; i < plan.submissions.size(); ++i) {
      int tokens = 0;
      for (const WorkItem& item : plan.submissions[i].items) {
        tokens += item.end - item.begin;
        last[static_cast<std::size_t>(item.request)] = i;
        left[static_cast<std::size_t>(item.request)] -= item.end - item.begin;
      }
      EXPECT_LE(tokens, budget);
      for (std::size_t r = 0; r < last.size(); ++r) {
        if (left[r] == 0) continue;
        EXPECT_LE(i - last[r], trace.requests.size()) << "request " << r << " waits at submission " << i << ", budget " << budget;
      }
    }
  }
}

// ---- prefix -----------------------------------------------------------------------------------------------------------------

// Prompts of the given lengths that are alike up to `shared`.
Trace alike(std::vector<int> lengths, int shared) {
  std::vector<TraceRequest> requests;
  for (int length : lengths) {
    requests.push_back(request_of(length, 1));
    for (int i = shared; i < length; ++i) requests.back().prompt[static_cast<std::size_t>(i)] = static_cast<int>(requests.size());
  }
  return trace_of(requests);
}

TEST(PlannerPrefix, LaterRequestsBeginWithPublishedWindows) {
  EXPECT_EQ(texts(planned("prefix", alike({140, 130}, 128))),
            (Lines{"r0 P[0,64) 1..4", "publish r0 1 | r0 P[64,128) 1..4", "publish r0 2 | r0 P[128,140) 1..4", "r0 D[140,141) 1..4",
                   "reuse r1 2 | r1 P[128,130) 1..4", "r1 D[130,131) 1..4"}));
}

TEST(PlannerPrefix, TheWindowOfTheLastPromptPositionIsAlwaysRun) {
  // 128 tokens: the second window holds the last position, only the first one is shared.
  EXPECT_EQ(texts(planned("prefix", alike({128, 128}, 128))),
            (Lines{"r0 P[0,64) 1..4", "publish r0 1 | r0 P[64,128) 1..4", "r0 D[128,129) 1..4", "reuse r1 1 | r1 P[64,128) 1..4",
                   "r1 D[128,129) 1..4"}));
  EXPECT_EQ(count(planned("prefix", alike({64, 64}, 64)), ActionKind::publish), 0);
}

TEST(PlannerPrefix, OnlyAsFarAsThePromptsAreAlike) {
  for (const auto& [shared, windows] : {std::pair{63, 0}, {64, 1}, {127, 1}, {128, 2}}) {
    const Plan plan = planned("prefix", alike({200, 200}, shared));
    EXPECT_EQ(count(plan, ActionKind::reuse), windows > 0 ? 1 : 0) << shared;
    for (const Submission& submission : plan.submissions) {
      for (const Action& action : submission.actions) {
        EXPECT_TRUE(action.kind != ActionKind::reuse || action.windows == windows) << shared;
      }
    }
  }
}

TEST(PlannerPrefix, AFullStoreEvictsTheLeastRecentlyUsedEnd) {
  // r0 and r1 publish three windows each of different prompts, r2 continues r0, r3 continues r1.
  Trace trace = alike({200, 200, 200, 200}, 0);
  trace.requests[2].prompt = trace.requests[0].prompt;
  trace.requests[3].prompt = trace.requests[1].prompt;
  const Plan plan = planned("prefix.k4", trace);
  EXPECT_EQ(texts(plan), (Lines{"r0 P[0,64) 1..4", "publish r0 1 | r0 P[64,128) 1..4", "publish r0 2 | r0 P[128,192) 1..4",
                                "publish r0 3 | r0 P[192,200) 1..4", "r0 D[200,201) 1..4", "r1 P[0,64) 1..4",
                                "publish r1 1 | r1 P[64,128) 1..4", "publish r1 2, evict r0 2 | r1 P[128,192) 1..4",
                                "publish r1 3, evict r0 1 | r1 P[192,200) 1..4", "r1 D[200,201) 1..4", "reuse r2 1 | r2 P[64,128) 1..4",
                                "publish r2 2, evict r1 2 | r2 P[128,192) 1..4", "publish r2 3, evict r1 1 | r2 P[192,200) 1..4",
                                "r2 D[200,201) 1..4", "reuse r3 1 | r3 P[64,128) 1..4", "publish r3 2, evict r2 2 | r3 P[128,192) 1..4",
                                "publish r3 3, evict r2 1 | r3 P[192,200) 1..4", "r3 D[200,201) 1..4"}));
}

TEST(PlannerPrefix, PublishesDuringAWavefront) {
  const Plan plan = planned("wcpb+prefix", alike({260, 260}, 256));
  // The second prompt arrives with the first one and takes its turn before any window is complete: it shares nothing.
  EXPECT_EQ(count(plan, ActionKind::reuse), 0);
  Trace later = alike({260, 260}, 256);
  later.requests[1].arrival = 5;
  const Plan shared = planned("wcpb+prefix", later);
  ASSERT_GT(shared.submissions.size(), 5u);
  EXPECT_EQ(text(shared.submissions[4]), "publish r0 1 | r0 P[64,128) 4..4, r0 P[128,192) 3..3, r0 P[192,256) 2..2, r0 P[256,260) 1..1");
  EXPECT_EQ(text(shared.submissions[5]), "publish r0 2, reuse r1 2 | r1 P[128,192) 1..1");
}

TEST(PlannerPrefix, WindowsArePublishedBeforeThePromptIsComplete) {
  ModelConfig model;
  model.loops = kLoops;
  AlgorithmConfig config;
  config.window = 64;
  config.kv_residual_quantization.enabled = true;
  const Trace trace = alike({140, 140, 140}, 140);
  for (EncodingPolicy policy : {EncodingPolicy::fixed_prompt, EncodingPolicy::rolling}) {
    config.kv_residual_quantization.policy = policy;
    const EffectiveConfig effective_config = EffectiveConfig::resolve(config, model);
    // A chunk of four windows completes all of them at once, with the prompt: nothing is left to publish.
    EXPECT_EQ(count(make_plan(parse_mode("wcpb.c4+prefix"), trace, effective_config), ActionKind::publish), 0);
    EXPECT_EQ(count(make_plan(parse_mode("wcpb.c2+prefix"), trace, effective_config), ActionKind::publish), 1);
    EXPECT_EQ(count(make_plan(parse_mode("prefix"), trace, effective_config), ActionKind::reuse), 2);
  }
  EXPECT_EQ(count(planned("wcpb.c4+prefix", trace), ActionKind::publish), 0);
}

// ---- preempt ----------------------------------------------------------------------------------------------------------------

TEST(PlannerPreempt, SerialIsCutBetweenLoops) {
  EXPECT_EQ(texts(planned("preempt", trace_of({request_of(65, 1)}))),
            (Lines{"r0 P[0,64) 1..3", "preempt r0 | ", "resume r0 | r0 P[0,64) 4..4", "r0 P[64,65) 1..2", "preempt r0 | ",
                   "resume r0 | r0 P[64,65) 3..4", "r0 D[65,66) 1..1", "preempt r0 | ", "resume r0 | r0 D[65,66) 2..4"}));
}

// Loops after which something of a request was preempted: of windows, of decode rows.
std::pair<std::set<int>, std::set<int>> preemption_boundaries(const Plan& plan) {
  std::pair<std::set<int>, std::set<int>> loops;
  std::map<int, std::vector<WorkItem>> last;  // of each request's last submission
  for (const Submission& submission : plan.submissions) {
    for (const Action& action : submission.actions) {
      if (action.kind != ActionKind::preempt) continue;
      for (const WorkItem& item : last.at(action.request))
        (item.kind == RowKind::prefill ? loops.first : loops.second).insert(item.loop_last);
    }
    for (const WorkItem& item : submission.items) last[item.request].clear();
    for (const WorkItem& item : submission.items) last[item.request].push_back(item);
  }
  return loops;
}

TEST(PlannerPreempt, EveryBoundaryBetweenLoopsComesUpRepeatedly) {
  const Trace trace = trace_of({request_of(300, 12), request_of(200, 14), request_of(70, 10, 3)});
  for (const char* mode : {"preempt", "split+preempt", "split.p50+preempt", "mixed+preempt", "mixed.b40+preempt", "wcpb+preempt",
                           "split+preempt.p1", "preempt.p5"}) {
    const Plan plan = planned(mode, trace);
    const auto [prompt, decode] = preemption_boundaries(plan);
    EXPECT_EQ(prompt, (std::set<int>{1, 2, 3, 4})) << mode;
    EXPECT_EQ(decode, (std::set<int>{1, 2, 3, 4})) << mode;
    EXPECT_EQ(count(plan, ActionKind::preempt), count(plan, ActionKind::resume)) << mode;
    EXPECT_GE(count(plan, ActionKind::preempt), 10) << mode;
  }
}

TEST(PlannerPreempt, OthersRunInBetween) {
  const Plan plan = planned("split+preempt", trace_of({request_of(64, 4), request_of(64, 4)}));
  bool other_ran = false;
  int away = -1;
  for (const Submission& submission : plan.submissions) {
    for (const Action& action : submission.actions) {
      if (action.kind == ActionKind::preempt) away = action.request;
      if (action.kind == ActionKind::resume && action.request == away) away = -1;
    }
    for (const WorkItem& item : submission.items) other_ran |= away >= 0 && item.request != away;
  }
  EXPECT_TRUE(other_ran);
}

// ---- async, graph -----------------------------------------------------------------------------------------------------------

TEST(Planner, AsyncAndGraphAreProperties) {
  const Trace trace = trace_of({request_of(70, 2), request_of(3, 2)});
  const Plan serial = planned("serial", trace), async = planned("async", trace), graph = planned("graph", trace),
             both = planned("async+graph", trace);
  EXPECT_EQ(texts(async), texts(serial));
  EXPECT_EQ(texts(both), texts(serial));
  EXPECT_EQ(serial.submissions_in_flight, 1);
  EXPECT_FALSE(serial.graph_replay);
  EXPECT_EQ(async.submissions_in_flight, 2);
  EXPECT_FALSE(async.graph_replay);
  EXPECT_TRUE(graph.graph_replay);
  EXPECT_EQ(both.submissions_in_flight, 2);
  EXPECT_TRUE(both.graph_replay);
  EXPECT_EQ(both.mode, "async+graph");
}

// ---- events -----------------------------------------------------------------------------------------------------------------

TEST(PlannerEvents, CancelInThePromptAndInDecode) {
  Trace trace = trace_of({request_of(65, 2), request_of(2, 3)});
  trace.events = {{1, TraceEventKind::cancel, 0}, {4, TraceEventKind::cancel, 1}};
  EXPECT_EQ(texts(planned("serial", trace)),
            (Lines{"r0 P[0,64) 1..4", "cancel r0 | r1 P[0,2) 1..4", "r1 D[2,3) 1..4", "r1 D[3,4) 1..4", "cancel r1 | "}));
  EXPECT_EQ(texts(planned("split", trace)),
            (Lines{"r0 P[0,64) 1..1", "cancel r0 | r1 P[0,2) 1..1", "r1 P[0,2) 2..2", "r1 P[0,2) 3..3", "cancel r1 | "}));
}

TEST(PlannerEvents, CancelBeforeTheBeginAndAfterTheEnd) {
  Trace trace = trace_of({request_of(3, 0), request_of(2, 1, 2), request_of(2, 0, 5)});
  trace.events = {{1, TraceEventKind::cancel, 1}, {5, TraceEventKind::cancel, 0}};
  EXPECT_EQ(texts(planned("serial", trace)), (Lines{"r0 P[0,3) 1..4", "cancel r1 | ", "r2 P[0,2) 1..4"}));
}

TEST(PlannerEvents, PreemptAndResume) {
  Trace trace = trace_of({request_of(2, 2), request_of(2, 0)});
  trace.events = {{1, TraceEventKind::preempt, 0}, {3, TraceEventKind::resume, 0}, {4, TraceEventKind::preempt, 0}};
  // Request 1 runs in between; time goes on from 2 to the event at 3; the second preemption is never resumed by the trace.
  EXPECT_EQ(texts(planned("serial", trace)), (Lines{"r0 P[0,2) 1..4", "preempt r0 | r1 P[0,2) 1..4", "resume r0 | r0 D[2,3) 1..4",
                                                    "preempt r0 | ", "resume r0 | r0 D[3,4) 1..4"}));
}

TEST(PlannerEvents, PreemptBeforeTheBeginHoldsTheRequestBack) {
  Trace trace = trace_of({request_of(2, 0), request_of(2, 1)});
  trace.events = {{0, TraceEventKind::preempt, 0}, {2, TraceEventKind::resume, 0}};
  EXPECT_EQ(texts(planned("serial", trace)), (Lines{"r1 P[0,2) 1..4", "r1 D[2,3) 1..4", "r0 P[0,2) 1..4"}));
}

TEST(PlannerEvents, AnIdIsTakenWhenItsBearerHasEnded) {
  Trace trace = trace_of({request_of(2, 1), request_of(3, 0)});
  trace.requests[1].id = trace.requests[0].id;
  trace.events = {{1, TraceEventKind::reuse_id, 1}};
  EXPECT_EQ(texts(planned("split", trace)),
            (Lines{"r0 P[0,2) 1..1", "r0 P[0,2) 2..2", "r0 P[0,2) 3..3", "r0 P[0,2) 4..4", "r0 D[2,3) 1..1", "r0 D[2,3) 2..2",
                   "r0 D[2,3) 3..3", "r0 D[2,3) 4..4", "r1 P[0,3) 1..1", "r1 P[0,3) 2..2", "r1 P[0,3) 3..3", "r1 P[0,3) 4..4"}));
  // Cancelled in the same breath: the next bearer begins while the old work may be in flight.
  trace.events = {{3, TraceEventKind::cancel, 0}, {3, TraceEventKind::reuse_id, 1}};
  EXPECT_EQ(texts(planned("async", trace)), (Lines{"r0 P[0,2) 1..4", "r0 D[2,3) 1..4", "r1 P[0,3) 1..4"}));
  trace.events = {{1, TraceEventKind::cancel, 0}, {1, TraceEventKind::reuse_id, 1}};
  EXPECT_EQ(texts(planned("async", trace)), (Lines{"r0 P[0,2) 1..4", "cancel r0 | r1 P[0,3) 1..4"}));
}

// ---- failures ---------------------------------------------------------------------------------------------------------------

TEST(PlannerFailure, RewindsToTheCompletedFrontier) {
  PlanOptions options;
  options.failure = PlanFailure{3, PlannedFailure::launch};
  EXPECT_EQ(
      texts(planned("wcpb", trace_of({request_of(129, 0)}), 64, options)),
      (Lines{"r0 P[0,64) 1..1", "r0 P[0,64) 2..2, r0 P[64,128) 1..1", "r0 P[0,64) 3..3, r0 P[64,128) 2..2, r0 P[128,129) 1..1",
             "r0 P[0,64) 4..4, r0 P[64,128) 3..3, r0 P[128,129) 2..2 fails: launch", "rewind r0 | r0 P[0,64) 1..1",
             "r0 P[0,64) 2..2, r0 P[64,128) 1..1", "r0 P[0,64) 3..3, r0 P[64,128) 2..2, r0 P[128,129) 1..1",
             "r0 P[0,64) 4..4, r0 P[64,128) 3..3, r0 P[128,129) 2..2", "r0 P[64,128) 4..4, r0 P[128,129) 3..3", "r0 P[128,129) 4..4"}));
  options.failure = PlanFailure{4, PlannedFailure::allocation};
  EXPECT_EQ(texts(planned("wcpb", trace_of({request_of(129, 0)}), 64, options)),
            (Lines{"r0 P[0,64) 1..1", "r0 P[0,64) 2..2, r0 P[64,128) 1..1", "r0 P[0,64) 3..3, r0 P[64,128) 2..2, r0 P[128,129) 1..1",
                   "r0 P[0,64) 4..4, r0 P[64,128) 3..3, r0 P[128,129) 2..2", "r0 P[64,128) 4..4, r0 P[128,129) 3..3 fails: allocation",
                   "rewind r0 | r0 P[64,128) 1..1", "r0 P[64,128) 2..2, r0 P[128,129) 1..1", "r0 P[64,128) 3..3, r0 P[128,129) 2..2",
                   "r0 P[64,128) 4..4, r0 P[128,129) 3..3", "r0 P[128,129) 4..4"}));
}

TEST(PlannerFailure, ARowStartsOver) {
  PlanOptions options;
  options.failure = PlanFailure{6, PlannedFailure::launch};
  const Plan plan = planned("split", trace_of({request_of(1, 1)}), 64, options);
  EXPECT_EQ(texts(plan),
            (Lines{"r0 P[0,1) 1..1", "r0 P[0,1) 2..2", "r0 P[0,1) 3..3", "r0 P[0,1) 4..4", "r0 D[1,2) 1..1", "r0 D[1,2) 2..2",
                   "r0 D[1,2) 3..3 fails: launch", "rewind r0 | r0 D[1,2) 1..1", "r0 D[1,2) 2..2", "r0 D[1,2) 3..3", "r0 D[1,2) 4..4"}));
}

TEST(PlannerFailure, WhatCannotFailIsAUsageError) {
  PlanOptions options;
  options.failure = PlanFailure{2, PlannedFailure::launch};
  EXPECT_THROW(planned("serial", trace_of({request_of(1, 1)}), 64, options), ConfigError);  // two submissions
  options.failure = PlanFailure{1, PlannedFailure::launch};
  EXPECT_THROW(planned("preempt", trace_of({request_of(1, 1)}), 64, options), ConfigError);  // a preemption alone
  EXPECT_EQ(parse_plan_failure("launch@17").submission, 17);
  EXPECT_EQ(parse_plan_failure("allocation@0").kind, PlannedFailure::allocation);
  for (const char* wrong : {"", "launch", "launch@", "launch@-1", "launch@1x", "none@3", "melt@3", "@3"}) {
    EXPECT_THROW(parse_plan_failure(wrong), ConfigError) << wrong;
  }
}

// ---- everything together ----------------------------------------------------------------------------------------------------

ModeSpec random_mode(const std::function<int(int)>& below) {
  ModeSpec mode;
  mode.schedule = schedule_names()[static_cast<std::size_t>(below(static_cast<int>(schedule_names().size())))];
  mode.draft_depth = 1 + below(2);
  mode.draft_length = 1 + below(5);
  if (mode.schedule == "split") mode.piece_tokens = below(2) * below(100);
  if (mode.schedule == "mixed") mode.token_budget = 2 + below(2) * below(300);
  if (mode.schedule == "wcpb") mode.chunk_windows = 1 + below(3);
  if (below(2) == 0) mode.prefix = true, mode.published_windows = below(2) * below(5);
  if (below(2) == 0) mode.preempt = true, mode.preempt_loops = 1 + below(6);
  mode.pd = !mode.preempt && below(2) == 0;
  mode.async = below(2) == 0;
  mode.graph = below(2) == 0;
  return mode;
}

Trace random_trace(const std::function<int(int)>& below) {
  std::vector<TraceRequest> requests;
  for (int r = 0; r <= below(5); ++r) {
    requests.push_back(request_of(1 + below(300), below(2) * below(9), below(2) * below(40)));
    if (!requests.back().teacher_forced()) requests.back().max_new_tokens = below(9);
    for (int i = below(300); i < requests.back().prompt_length(); ++i) requests.back().prompt[static_cast<std::size_t>(i)] = r;
  }
  Trace trace = trace_of(requests);
  std::vector<int> held(requests.size(), 0), cancelled(requests.size(), 0);
  int submission = 0;
  for (int e = below(2) * below(12); e > 0; --e) {
    submission += below(12);
    const int request = below(static_cast<int>(requests.size()));
    const auto r = static_cast<std::size_t>(request);
    if (cancelled[r] != 0) continue;
    const TraceEventKind kind = below(4) == 0 ? TraceEventKind::cancel : held[r] != 0 ? TraceEventKind::resume : TraceEventKind::preempt;
    trace.events.push_back({submission, kind, request});
    cancelled[r] = kind == TraceEventKind::cancel ? 1 : 0;
    held[r] = kind == TraceEventKind::preempt ? 1 : 0;
  }
  const int reusing = below(static_cast<int>(requests.size()));
  if (reusing > 0) {
    trace.requests[static_cast<std::size_t>(reusing)].id = trace.requests[static_cast<std::size_t>(below(reusing))].id;
    const int at = below(30);
    const auto after =
        std::find_if(trace.events.begin(), trace.events.end(), [&](const TraceEvent& event) { return event.submission > at; });
    trace.events.insert(after, {at, TraceEventKind::reuse_id, reusing});
  }
  return trace;
}

TEST(Planner, RandomModesTracesEventsAndFailuresGiveLegalPlans) {
  std::mt19937 generator(23);
  const auto below = [&](int n) { return static_cast<int>(generator() % static_cast<unsigned>(n)); };
  int cancels = 0, preemptions = 0, reuses = 0, evictions = 0, rewinds = 0;
  for (int i = 0; i < 1500; ++i) {
    const Trace trace = random_trace(below);
    ASSERT_EQ(trace_faults(trace), std::vector<std::string>{});
    const EffectiveConfig config = effective(64 * (1 + below(3)));
    const ModeSpec mode = random_mode(below);
    PlanOptions options;
    const std::string what = mode_text(mode) + ", trace " + std::to_string(i);
    if (below(2) == 0) {
      const Plan whole = make_plan(mode, trace, config);
      const int submission = below(static_cast<int>(whole.submissions.size()));
      if (!whole.submissions[static_cast<std::size_t>(submission)].items.empty())
        options.failure = PlanFailure{submission, PlannedFailure::launch};
    }
    const Plan plan = make_plan(mode, trace, config, options);
    EXPECT_EQ(plan_fault(plan, trace, config), "") << what;
    EXPECT_EQ(texts(make_plan(mode, trace, config, options)), texts(plan)) << what;
    EXPECT_EQ(plan.mode, mode_text(mode));
    for (const Submission& submission : plan.submissions) EXPECT_FALSE(submission.items.empty() && submission.actions.empty()) << what;
    if (options.failure) {
      EXPECT_EQ(plan.submissions[static_cast<std::size_t>(options.failure->submission)].failure, options.failure->kind) << what;
    }
    cancels += count(plan, ActionKind::cancel);
    preemptions += count(plan, ActionKind::preempt);
    reuses += count(plan, ActionKind::reuse);
    evictions += count(plan, ActionKind::evict);
    rewinds += count(plan, ActionKind::rewind);
  }
  EXPECT_TRUE(cancels > 100 && preemptions > 1000 && reuses > 50 && evictions > 50 && rewinds > 100)
      << cancels << " " << preemptions << " " << reuses << " " << evictions << " " << rewinds;
}

}  // namespace
}  // namespace loopgauge::harness
