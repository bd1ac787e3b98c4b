// SPDX-License-Identifier: Apache-2.0
// Every legal plan gives the bits of the serial one (S-PLAN-10, S-INV-3): orders, companies, actions, failures, results read late.
#include <gtest/gtest.h>

#include <functional>

#include "models/error.hpp"
#include "tests/reference/executor/modes.hpp"

namespace loopgauge::test {
namespace {

// ------------------------------------------------------------------------------------------------ linear extensions of wcpb

using Unit = std::pair<int, int>;  // chunk, loop
using Order = std::vector<Unit>;

// Every linear extension of (c, r-1) -> (c, r) and (c', r) -> (c, r), c' < c.
std::vector<Order> linear_extensions(int chunks) {
  std::vector<Order> all;
  Order order;
  std::vector<int> done(static_cast<std::size_t>(chunks), 0);
  const std::function<void()> extend = [&] {
    if (order.size() == static_cast<std::size_t>(chunks) * kLoops) all.push_back(order);
    for (int c = 0; c < chunks; ++c) {
      int& loops = done[static_cast<std::size_t>(c)];
      if (loops == kLoops || (c > 0 && done[static_cast<std::size_t>(c - 1)] <= loops)) continue;
      order.emplace_back(c, ++loops);
      extend();
      order.pop_back();
      --loops;
    }
  };
  extend();
  return all;
}

// The order one unit a submission, or with units that do not depend on one another joined as long as they follow each other.
Plan plan_of(const Order& order, bool joined, const Trace& trace, const EffectiveConfig& config) {
  Plan plan{"wcpb", {}};
  std::set<Unit> in_submission;
  const int prompt = trace.requests[0].prompt_length();
  for (const auto& [chunk, loop] : order) {
    bool independent = joined && !plan.submissions.empty();
    for (const auto& [c, r] : in_submission) independent &= !(c == chunk || (c < chunk && r >= loop));
    if (!independent) {
      plan.submissions.push_back({});
      in_submission.clear();
    }
    in_submission.insert({chunk, loop});
    const PositionRange range = window_range(chunk, prompt, config.window());
    plan.submissions.back().items.push_back({0, RowKind::prefill, range.begin, range.end, loop, loop});
  }
  for (int j = 0; j < fed_tokens(trace.requests[0]); ++j)
    plan.submissions.push_back({{{0, RowKind::decode, prompt + j, prompt + j + 1, 1, kLoops}}});
  return plan;
}

class LinearExtensions : public testing::TestWithParam<AlgorithmConfig> {
 protected:
  const Checkpoint checkpoint_ = tiny_checkpoint();
};

TEST_P(LinearExtensions, OfUpToThreeChunksGiveTheBitsOfSerial) {
  const EffectiveConfig config = EffectiveConfig::resolve(GetParam(), checkpoint_.config);
  const std::size_t counts[] = {1, 14, 462};
  for (int chunks = 1; chunks <= 3; ++chunks) {
    const Trace trace = trace_of({request(0, 64 * (chunks - 1) + 9, 2)});
    const std::vector<Order> orders = linear_extensions(chunks);
    ASSERT_EQ(orders.size(), counts[chunks - 1]);
    const auto serial = fingerprint(run(checkpoint_, trace, GetParam()).requests[0]);
    std::set<std::vector<std::size_t>> seen;  // joined orders that give the same submissions
    for (const Order& order : orders) {
      for (const bool joined : {false, true}) {
        const Plan plan = plan_of(order, joined, trace, config);
        std::vector<std::size_t> shape;
        for (const Submission& s : plan.submissions) {
          shape.push_back(s.items.size());
          for (const WorkItem& item : s.items) shape.push_back(static_cast<std::size_t>(item.begin * 8 + item.loop_first));
        }
        if (!seen.insert(shape).second) continue;
        const RunRecord other = run(checkpoint_, trace, GetParam(), {}, &plan);
        ASSERT_EQ(fingerprint(other.requests[0]), serial) << testing::PrintToString(order) << (joined ? " joined" : "");
        ASSERT_EQ(other.counters.recomputed_rows, 0);
      }
    }
  }
}

std::vector<AlgorithmConfig> wavefront_settings() {
  AlgorithmConfig streaming = switches("t1s1q1");
  streaming.kv_residual_quantization.policy = EncodingPolicy::streaming;
  return {switches("t1s1q0"), streaming};
}
INSTANTIATE_TEST_SUITE_P(All, LinearExtensions, testing::ValuesIn(wavefront_settings()),
                         [](const auto& setting) { return setting_name(setting.param); });

// -------------------------------------------------------------------------------------------------------------- random plans

class RandomPlans : public testing::TestWithParam<AlgorithmConfig> {
 protected:
  // Two requests share their first windows, one free run may end early, one takes the id of another.
  Trace trace(const AlgorithmConfig& config) const {
    TraceRequest long_prompt = request(0, 150, 5);
    TraceRequest shared = free_request(1, 140, 9);
    std::copy_n(long_prompt.prompt.begin(), 128, shared.prompt.begin());
    TraceRequest reused_id = request(2, 62, 4);
    reused_id.id = 0;
    shared.arrival = 25;
    Trace trace = trace_of({long_prompt, shared, reused_id, request(3, 1, 4)});
    give_depths(trace);
    trace.requests[1].eos_token_id = run(checkpoint_, trace, config).requests[1].tokens[4];
    return trace;
  }
  const Checkpoint checkpoint_ = tiny_checkpoint();
};

TEST_P(RandomPlans, GiveTheBitsOfSerial) {
  std::uint64_t seed = 1000;
  std::int64_t preemptions = 0, reused = 0, failures = 0, recomputed = 0;
  int in_flight = 0;
  for (const ExitRule& exit : four_exits()) {
    AlgorithmConfig requested = GetParam();
    requested.exit = exit;
    requested.kv_residual_quantization.tail = exit.mode == ExitMode::full || exit.mode == ExitMode::delayed ? 0 : 64;
    const EffectiveConfig config = EffectiveConfig::resolve(requested, checkpoint_.config);
    const Trace requests = trace(requested);
    const RunRecord serial = run(checkpoint_, requests, requested);
    expect_accounts(serial, "serial");
    const PlanMix mixes[] = {{},
                             {.preempt = 15, .rewind = 3, .failure = 5, .publish = 40, .reuse = 60, .evict = 3},
                             {.several = 40, .piece = 60, .preempt = 25, .publish = 60, .reuse = 90},
                             {.several = 90, .piece = 0, .preempt = 5, .rewind = 5, .failure = 15}};
    for (const PlanMix& mix : mixes) {
      const int f = exit.mode == ExitMode::threshold ? 1 : 1 + in_flight++ % 3;
      const Plan plan = RandomPlan(requests, config, ++seed, mix).finish("random", f);
      const std::string what =
          std::string(to_string(exit.mode)) + ", seed " + std::to_string(seed) + ", " + std::to_string(f) + " in flight";
      const RunRecord other = run(checkpoint_, requests, requested, {}, &plan);
      expect_same_requests(serial, other, what);
      expect_accounts(other, what);
      EXPECT_EQ(other.counters.submissions, static_cast<std::int64_t>(plan.submissions.size()));
      EXPECT_EQ(other.counters.most_in_flight, f);
      preemptions += other.counters.preemptions, reused += other.counters.reused_windows, failures += other.counters.failures;
      recomputed += other.counters.recomputed_rows;
    }
  }
  EXPECT_GT(preemptions, 5);
  EXPECT_GT(failures, 5);
  EXPECT_GT(reused, 0);
  EXPECT_GT(recomputed, 0);
}

INSTANTIATE_TEST_SUITE_P(All, RandomPlans, testing::ValuesIn(sixteen_settings()),
                         [](const auto& setting) { return setting_name(setting.param); });

// --------------------------------------------------------------------------------------------------------- failures, cancels

class Lifecycle : public testing::Test {
 protected:
  const Checkpoint checkpoint_ = tiny_checkpoint();
  const AlgorithmConfig requested_ = switches("t1s1q1");
  const EffectiveConfig config_ = EffectiveConfig::resolve(requested_, checkpoint_.config);
};

TEST_F(Lifecycle, AFailureAtEverySubmissionLosesNothing) {
  AlgorithmConfig streaming = requested_;
  streaming.kv_residual_quantization.policy = EncodingPolicy::streaming;
  const Trace trace = trace_of({request(0, 70, 3), request(1, 130, 2), request(2, 5, 3)});
  for (const AlgorithmConfig& requested : {requested_, streaming}) {
    const EffectiveConfig config = EffectiveConfig::resolve(requested, checkpoint_.config);
    const RunRecord serial = run(checkpoint_, trace, requested);
    const std::size_t submissions = RandomPlan(trace, config, 7).finish("random").submissions.size();
    for (std::size_t at = 0; at < submissions; ++at) {
      for (const PlannedFailure failure : {PlannedFailure::allocation, PlannedFailure::launch}) {
        RandomPlan random(trace, config, 7);
        Plan plan{"random", {}};
        while (!random.complete()) plan.submissions.push_back(random.next(plan.submissions.size() == at ? failure : PlannedFailure::none));
        const std::string what = std::string(to_string(failure)) + " at submission " + std::to_string(at);
        const RunRecord other = run(checkpoint_, trace, requested, {}, &plan);
        expect_same_requests(serial, other, what);
        expect_accounts(other, what);
        EXPECT_EQ(other.counters.failures, 1) << what;
      }
    }
  }
}

TEST_F(Lifecycle, ACancelAtEverySubmissionConcernsNobodyElse) {
  const Trace trace = trace_of({request(0, 70, 3), free_request(1, 130, 4), request(2, 5, 3)});
  const RunRecord serial = run(checkpoint_, trace, requested_);
  int cancelled = 0;
  for (int victim = 0; victim < 3; ++victim) {
    for (const int in_flight : {1, 3}) {
      for (std::size_t at = 0;; ++at) {
        RandomPlan random(trace, config_, 7);
        Plan plan{"random", {}};
        plan.submissions_in_flight = in_flight;
        while (!random.complete() && plan.submissions.size() < at) plan.submissions.push_back(random.next());
        if (random.complete()) break;
        if (!random.live(victim)) continue;
        plan.submissions.push_back(random.next(PlannedFailure::none, victim));
        while (!random.complete()) plan.submissions.push_back(random.next());
        const RunRecord other = run(checkpoint_, trace, requested_, {}, &plan);
        const std::string what = "request " + std::to_string(victim) + " at " + std::to_string(at);
        expect_same_requests(serial, other, what, {static_cast<std::size_t>(victim)});
        expect_accounts(other, what);
        // What had been read is in the record, as the serial run has it; K/V and codec groups are not.
        const RequestRecord &whole = serial.requests[static_cast<std::size_t>(victim)],
                            &part = other.requests[static_cast<std::size_t>(victim)];
        ASSERT_EQ(part.outcome, RequestOutcome::cancelled) << what;
        ASSERT_LE(part.fed, whole.fed);
        EXPECT_TRUE(std::equal(part.tokens.begin(), part.tokens.end(), whole.tokens.begin()));
        EXPECT_TRUE(std::equal(part.logits.data.begin(), part.logits.data.end(), whole.logits.data.begin()));
        EXPECT_EQ(part.exit_depths.size(), part.tokens.size());
        EXPECT_EQ(part.keys.size(), static_cast<std::size_t>(part.fed));
        const std::size_t rows = part.encoded_frontier.size();
        EXPECT_EQ(rows, part.logits.empty() ? 0 : static_cast<std::size_t>(1 + part.fed));
        for (std::size_t r = 0; r < kLoops; ++r) {
          EXPECT_EQ(part.hidden[r].empty(), rows == 0);
          EXPECT_TRUE(std::equal(part.hidden[r].data.begin(), part.hidden[r].data.end(), whole.hidden[r].data.begin()));
        }
        for (std::size_t r = 0; r < 2; ++r)
          EXPECT_TRUE(std::includes(whole.active[r].begin(), whole.active[r].end(), part.active[r].begin(), part.active[r].end()));
        EXPECT_TRUE(part.kv.empty());
        EXPECT_TRUE(part.blocks.empty());
        ++cancelled;
      }
    }
  }
  EXPECT_GT(cancelled, 40);
}

TEST_F(Lifecycle, WhoeverFailedOrIsAwayRunsNothing) {
  const Trace trace = trace_of({request(0, 64, 0)});
  const auto executor = reference::make_reference_executor(checkpoint_);
  const WorkItem item{0, RowKind::prefill, 0, 64, 1, 1};
  Submission failing{{item}};
  failing.failure = PlannedFailure::launch;
  executor->begin(trace, config_, {});
  executor->submit(failing);
  EXPECT_THROW(executor->submit({{item}}), InternalError) << "without a rewind";
  executor->begin(trace, config_, {});
  executor->submit({{item}});
  executor->submit({{}, {{ActionKind::preempt, 0}}});
  EXPECT_THROW(executor->submit({{{0, RowKind::prefill, 0, 64, 2, 2}}}), InternalError) << "preempted";
  executor->begin(trace, config_, {});
  executor->submit({{item}, {}});
  executor->submit({{}, {{ActionKind::cancel, 0}}});
  EXPECT_THROW(executor->submit({{{0, RowKind::prefill, 0, 64, 2, 2}}}), InternalError) << "cancelled";
}

// A request that is not complete when the run ends is counted as held, not hidden.
TEST_F(Lifecycle, WhatIsHeldAtTheEndIsCounted) {
  const Trace trace = trace_of({request(0, 70, 2), request(1, 140, 2)});
  const auto executor = reference::make_reference_executor(checkpoint_);
  AlgorithmConfig requested = requested_;
  requested.kv_residual_quantization.tail = 0;
  executor->begin(trace, EffectiveConfig::resolve(requested, checkpoint_.config), {});
  executor->submit({{{0, RowKind::prefill, 0, 70, 1, 4}}});
  executor->submit({{{0, RowKind::decode, 70, 71, 1, 2}}});
  executor->submit({{{1, RowKind::prefill, 0, 140, 1, 4}}});
  executor->submit({{}, {{ActionKind::preempt, 1}}});
  const RunRecord record = executor->finish();
  EXPECT_EQ(describe(record.held_at_drain), "1 request slot, 2 pages, 1 sealed block, 1 attention reference, 1 snapshot");
}

TEST_F(Lifecycle, ACancelledRequestLeavesTheIdToAnother) {
  Trace trace = trace_of({request(0, 70, 3), request(1, 70, 3)});
  trace.requests[1].id = 0;
  const RunRecord serial = run(checkpoint_, trace, requested_);
  for (const int in_flight : {1, 2, 4}) {
    Plan plan{"mixed", {}};
    plan.submissions_in_flight = in_flight;
    plan.submissions.push_back({{{0, RowKind::prefill, 0, 70, 1, 4}}});
    plan.submissions.push_back({{{0, RowKind::decode, 70, 71, 1, 4}}});  // unread when its request is cancelled
    plan.submissions.push_back({{{1, RowKind::prefill, 0, 70, 1, 4}}, {{ActionKind::cancel, 0}}});
    for (int j = 0; j < 3; ++j) plan.submissions.push_back({{{1, RowKind::decode, 70 + j, 71 + j, 1, 4}}});
    const RunRecord other = run(checkpoint_, trace, requested_, {}, &plan);
    EXPECT_EQ(differing_groups(serial.requests[1], other.requests[1]), kNone);
    EXPECT_EQ(other.requests[0].encoded_frontier.size(), in_flight == 1   ? 2u
                                                         : in_flight == 2 ? 1u
                                                                          : 0u)
        << "results read before the cancel";
    expect_accounts(other, "id reuse");
  }
}

// -------------------------------------------------------------------------------------------------------- results read late

class Asynchronous : public testing::Test {
 protected:
  const Checkpoint checkpoint_ = tiny_checkpoint();
};

// The end of the sequence at every step, read 1 to 4 submissions late.
TEST_F(Asynchronous, AnEndThatIsReadLateGivesTheRecordOfSerial) {
  for (const EncodingPolicy policy : {EncodingPolicy::rolling, EncodingPolicy::streaming}) {
    for (const int tail : {0, 64}) {
      for (const ExitRule& exit : {ExitRule{ExitMode::full, 1.0f, 1}, ExitRule{ExitMode::delayed, 0.5f, 1}}) {
        AlgorithmConfig requested = switches("t1s1q1");
        requested.kv_residual_quantization.policy = policy;
        requested.kv_residual_quantization.tail = tail;
        requested.exit = exit;
        Trace trace = trace_of({free_request(0, 61, 9), request(1, 3, 9)});
        const std::vector<std::int32_t> tokens = run(checkpoint_, trace, requested).requests[0].tokens;
        for (std::size_t end = 0; end < tokens.size(); end += 2) {
          trace.requests[0].eos_token_id = tokens[end];
          const RunRecord serial = run(checkpoint_, trace, requested);
          const EffectiveConfig config = EffectiveConfig::resolve(requested, checkpoint_.config);
          for (int f = 1; f <= 4; ++f) {
            Plan plan = serial_plan(trace, config);
            plan.submissions_in_flight = f;
            const RunRecord other = run(checkpoint_, trace, requested, {}, &plan);
            const std::string what = std::to_string(f) + " in flight, tail " + std::to_string(tail) + ", end " + std::to_string(end);
            expect_same_requests(serial, other, what);
            expect_accounts(other, what);
            EXPECT_EQ(other.counters.most_in_flight, f);
            EXPECT_EQ(other.counters.host_reads, 0);
            const bool ran_past = f > 1 && serial.requests[0].tokens.size() < tokens.size();
            EXPECT_EQ(other.counters.discarded_rows > 0, ran_past) << what;
          }
        }
      }
    }
  }
}

TEST_F(Asynchronous, APreemptedRequestTakesItsUnreadResults) {
  for (const int tail : {0, 64}) {
    AlgorithmConfig requested = switches("t1s1q1");
    requested.kv_residual_quantization.tail = tail;
    Trace trace = trace_of({free_request(0, 61, 9)});
    trace.requests[0].eos_token_id = run(checkpoint_, trace, requested).requests[0].tokens[5];
    const RunRecord serial = run(checkpoint_, trace, requested);
    const Plan undisturbed = serial_plan(trace, EffectiveConfig::resolve(requested, checkpoint_.config));
    for (std::size_t at = 1; at < undisturbed.submissions.size(); ++at) {
      for (int f = 1; f <= 4; ++f) {
        for (int away = 0; away <= 4; ++away) {  // submissions between the preemption and the resumption
          Plan plan = undisturbed;
          plan.submissions_in_flight = f;
          std::vector<Submission> gap(static_cast<std::size_t>(away) + 2);
          gap.front().actions.push_back({ActionKind::preempt, 0});
          gap.back().actions.push_back({ActionKind::resume, 0});
          plan.submissions.insert(plan.submissions.begin() + static_cast<std::ptrdiff_t>(at), gap.begin(), gap.end());
          const RunRecord other = run(checkpoint_, trace, requested, {}, &plan);
          const std::string what =
              "preempted at " + std::to_string(at) + " for " + std::to_string(away) + ", " + std::to_string(f) + " in flight";
          expect_same_requests(serial, other, what);
          expect_accounts(other, what);
        }
      }
    }
  }
}

// Encoding that waits for commits is later with more in flight: only what is read from K/V may differ.
TEST_F(Asynchronous, ExecutionDependentTimingChangesWhatIsReadFromEncodedPositionsOnly) {
  AlgorithmConfig requested = switches("t1s1q1");
  requested.kv_residual_quantization.timing = EncodingTiming::execution_dependent;
  requested.kv_residual_quantization.tail = 0;
  const Trace trace = trace_of({free_request(0, 70, 70)});
  const EffectiveConfig config = EffectiveConfig::resolve(requested, checkpoint_.config);
  const RunRecord serial = run(checkpoint_, trace, requested);
  Plan plan = serial_plan(trace, config);
  plan.submissions_in_flight = 3;
  const RunRecord late = run(checkpoint_, trace, requested, {}, &plan);
  const RequestRecord &a = serial.requests[0], &b = late.requests[0];
  EXPECT_EQ(a.encoded_frontier, b.encoded_frontier);
  EXPECT_EQ(a.active, b.active);
  EXPECT_TRUE(std::equal(a.hidden[3].data.begin(), a.hidden[3].data.begin() + 70 * 48, b.hidden[3].data.begin()))
      << "the prompt reads no encoded K/V";
  const auto differing = differing_groups(a, b);
  EXPECT_TRUE(std::find(differing.begin(), differing.end(), "logits") != differing.end()) << "the setting is to make a difference";
  expect_accounts(late, "execution dependent");
  // Random plans whose results are read at once commit as the serial one does.
  const RunRecord again = run(checkpoint_, trace, requested);
  for (std::uint64_t seed = 1; seed <= 5; ++seed) {
    const Plan random = RandomPlan(trace, config, seed).finish("random");
    EXPECT_EQ(differing_groups(a, run(checkpoint_, trace, requested, {}, &random).requests[0]), kNone) << seed;
  }
}

// The row past the end meets a logit that is not finite: it is no part of the run.
TEST_F(Asynchronous, ARowPastTheEndRaisesNoError) {
  const AlgorithmConfig dense = switches("t0s0q0");
  Trace trace;
  std::vector<std::int32_t> tokens;
  for (int id = 0; id < 50; ++id) {  // a run whose third token is fed by nobody before
    trace = trace_of({free_request(id, 4, 6)});
    tokens = run(checkpoint_, trace, dense).requests[0].tokens;
    std::vector<std::int32_t> earlier = trace.requests[0].prompt;
    earlier.insert(earlier.end(), tokens.begin(), tokens.begin() + 2);
    if (std::find(earlier.begin(), earlier.end(), tokens[2]) == earlier.end()) break;
  }
  Checkpoint checkpoint = checkpoint_;
  for (auto& word : checkpoint.embed_tokens.row(tokens[2])) word = 0x7fc0;  // NaN
  Plan plan = serial_plan(trace, EffectiveConfig::resolve(dense, checkpoint.config));
  plan.submissions_in_flight = 3;
  EXPECT_THROW(run(checkpoint, trace, dense, {}, &plan), NumericError) << "the row is of the sequence";
  trace.requests[0].eos_token_id = tokens[2];
  const RunRecord serial = run(checkpoint, trace, dense), late = run(checkpoint, trace, dense, {}, &plan);
  EXPECT_EQ(serial.requests[0].tokens.size(), 3u);
  expect_same_requests(serial, late, "past the end");
  expect_accounts(late, "past the end");
}

// ------------------------------------------------------------------------------------------------------------------ counters

TEST(Counters, StatisticsOfRowsThatExitAtLoopTwoAreUnused) {
  const Checkpoint checkpoint = tiny_checkpoint();
  Trace trace = trace_of({request(0, 10, 8)});
  give_depths(trace);
  AlgorithmConfig requested = switches("t0s1q0");
  requested.exit.mode = ExitMode::trace;
  const RunRecord record = run(checkpoint, trace, requested);
  EXPECT_EQ(record.counters.unused_statistics_rows, 2) << "of depths 1, 2, 3, 4, 1, 2, 3, 4";
  EXPECT_EQ(record.counters.executed_rows, 10 * 4 + 2 * (1 + 2 + 3 + 4));
  requested.sparse_decode_attention.enabled = false;
  EXPECT_EQ(run(checkpoint, trace, requested).counters.unused_statistics_rows, 0);
  EXPECT_EQ(record.requests[0].executions[11 * kLoops + 1], 1) << "depth 2";
  EXPECT_EQ(record.requests[0].executions[11 * kLoops + 2], 0);
}

// A captured step computes what an eager one does; there is nothing to capture here.
TEST(Counters, ReplayedPlansAreCarriedOutAsOthers) {
  const Checkpoint checkpoint = tiny_checkpoint();
  const Trace trace = trace_of({request(0, 20, 4)});
  const AlgorithmConfig requested = switches("t1s1q1");
  Plan plan = serial_plan(trace, EffectiveConfig::resolve(requested, checkpoint.config));
  plan.graph_replay = true;
  const RunRecord replayed = run(checkpoint, trace, requested, {}, &plan);
  expect_same_requests(run(checkpoint, trace, requested), replayed, "replayed");
  EXPECT_EQ(replayed.counters.graph_captures + replayed.counters.graph_replays + replayed.counters.graph_fallbacks, 0);
}

// --------------------------------------------------------------------------------------------------------- row order, S-EX-0

class RowOrder : public Tap {
 public:
  void record(const TapPoint& point, std::span<const float>) override {
    if (point.operation == "linear.q_proj" && point.layer == 0 && point.loop == 3 && point.submission == submission) {
      rows.emplace_back(point.request, point.position);
    }
  }
  int submission = -1;
  std::vector<std::pair<int, int>> rows;
};

TEST(RowOrderExample, DecodeRowsThenActivePrefillRows) {
  const Checkpoint checkpoint = tiny_checkpoint();
  AlgorithmConfig requested = switches("t1s0q0");
  requested.token_sparse_prefill.retention_bp = {10000, 10000, 5000, 2500};
  // A prompt of four tokens P0..P3 of which P1 and P3 are active at loop 3.
  TraceRequest prompt;
  for (std::uint64_t seed = 1; seed < 200; ++seed) {
    prompt = request(2, 4, 0, seed);
    if (run(checkpoint, trace_of({prompt}), requested).requests[0].active[0] == std::vector<std::int32_t>{1, 3}) break;
  }
  const Trace trace = trace_of({request(0, 3, 1), request(1, 5, 1), prompt});
  ASSERT_EQ(run(checkpoint, trace, requested).requests[2].active[0], (std::vector<std::int32_t>{1, 3}));
  Plan plan{"mixed", {}};
  plan.submissions.push_back({{{0, RowKind::prefill, 0, 3, 1, 4}}});
  plan.submissions.push_back({{{1, RowKind::prefill, 0, 5, 1, 4}}});
  for (int loop = 1; loop <= 4; ++loop) {
    plan.submissions.push_back(
        {{{0, RowKind::decode, 3, 4, loop, loop}, {1, RowKind::decode, 5, 6, loop, loop}, {2, RowKind::prefill, 0, 4, loop, loop}}});
  }
  RowOrder order;
  order.submission = 4;
  run(checkpoint, trace, requested, with_tap(order), &plan);
  EXPECT_EQ(order.rows, (std::vector<std::pair<int, int>>{{0, 3}, {1, 5}, {2, 1}, {2, 3}}));
}

}  // namespace
}  // namespace loopgauge::test
