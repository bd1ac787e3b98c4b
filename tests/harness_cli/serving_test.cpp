// SPDX-License-Identifier: Apache-2.0
// The online server of `bench e2e`: arrivals, what runs when, and that requests served together generate what each generates alone.
#include "harness/bench/serving.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <utility>

#include "harness/case.hpp"
#include "harness/handoff/local_transport.hpp"
#include "harness/planner/planner.hpp"
#include "models/checkpoint.hpp"
#include "models/error.hpp"
#include "optimized/runtime/device_error.hpp"
#include "reference/reference_executor.hpp"

namespace loopgauge::harness {
namespace {

const Checkpoint& tiny() {
  static const Checkpoint checkpoint = load_checkpoint(LOOPGAUGE_SOURCE_DIR "/models/ouro-tiny");
  return checkpoint;
}

EffectiveConfig config_of(const std::string& switches) {
  AlgorithmConfig config;
  apply_switches(config, switches);
  config.window = 64;
  return EffectiveConfig::resolve(config, tiny().config);
}

LoadOptions small_load() {
  LoadOptions options;
  options.name = "test";
  options.requests = 5;
  options.requests_per_s = 20;
  options.prompt_tokens = {40, 100, 150};
  options.new_tokens = 4;
  options.seed = 7;
  return options;
}

ServingLoad load_of(const LoadOptions& options) { return make_load(options, tiny().config.vocab); }

std::vector<RequestBytes> equal_bytes(const ServingLoad& load, std::int64_t prompt = 1, std::int64_t afterwards = 1) {
  return std::vector<RequestBytes>(load.trace.requests.size(), {prompt, afterwards});
}

// Time passes when a submission runs and when somebody sleeps.
class ManualClock final : public ServingClock {
 public:
  double now() override { return time; }
  void sleep_until(double seconds) override { time = std::max(time, seconds); }
  double time = 0;
};

class TimedExecutor final : public Executor {
 public:
  explicit TimedExecutor(ManualClock& clock) : clock_(clock), inner_(reference::make_reference_executor(tiny())) {}
  std::string name() const override { return inner_->name(); }
  void begin(const Trace& trace, const EffectiveConfig& config, const RunOptions& options) override {
    submissions_ = 0;
    inner_->begin(trace, config, options);
  }
  void submit(const Submission& submission) override {
    if (submissions_++ == out_of_memory_at) throw optimized::DeviceMemoryError("out of device memory: for a test");
    inner_->submit(submission);
    clock_.time += submission.items.empty() ? 0 : 0.01;
  }
  RunRecord finish() override { return inner_->finish(); }

  int out_of_memory_at = -1;

 private:
  ManualClock& clock_;
  std::unique_ptr<Executor> inner_;
  int submissions_ = 0;
};

std::vector<std::int32_t> tokens_alone(const ServingLoad& load, std::size_t request, const EffectiveConfig& config) {
  Trace trace = load.trace;
  trace.requests = {load.trace.requests[request]};
  const auto executor = reference::make_reference_executor(tiny());
  RunOptions options;
  options.record = {.logits = false};
  return replay(*executor, make_plan(ModeSpec{}, trace, config), trace, config, options).requests.front().tokens;
}

void expect_tokens_of_requests_alone(const ServingResult& result, const ServingLoad& load, const EffectiveConfig& config) {
  for (std::size_t i = 0; i < result.requests.size(); ++i) {
    if (result.requests[i].outcome != ServedOutcome::finished) continue;
    EXPECT_EQ(result.requests[i].tokens, tokens_alone(load, i, config)) << "request " << i;
  }
}

std::map<ServedOutcome, int> outcomes(const ServingResult& result) {
  std::map<ServedOutcome, int> counts;
  for (const ServedRequest& request : result.requests) ++counts[request.outcome];
  return counts;
}

Plan plan_of(const ServingResult& result) {
  Plan plan;
  plan.mode = "served";
  for (const Submission& submission : result.submissions) {
    if (!submission.items.empty() || !submission.actions.empty()) plan.submissions.push_back(submission);
  }
  return plan;
}

TEST(ServingLoad, IsTheSameForTheSameSeed) {
  const ServingLoad load = load_of(small_load()), again = load_of(small_load());
  EXPECT_EQ(load.arrival_s, again.arrival_s);
  EXPECT_EQ(load.trace.requests[3].prompt, again.trace.requests[3].prompt);
  EXPECT_EQ(load.arrival_s.front(), 0);
  EXPECT_TRUE(std::is_sorted(load.arrival_s.begin(), load.arrival_s.end()));
  LoadOptions other = small_load();
  other.seed = 8;
  EXPECT_NE(load_of(other).arrival_s, load.arrival_s);
  // The schedule itself is a promise: results of different days are compared.
  EXPECT_EQ(load.trace.requests[0].prompt_length(), load_of(small_load()).trace.requests[0].prompt_length());
}

TEST(ServingLoad, GapsHaveTheMeanThatTheRateSays) {
  LoadOptions options = small_load();
  options.requests = 4000;
  options.prompt_tokens = {1};
  EXPECT_NEAR(load_of(options).arrival_s.back(), 4000 / 20.0, 10);
  options.requests_per_s = 0;
  EXPECT_EQ(load_of(options).arrival_s.back(), 0);
}

TEST(ServingLoad, HoldsTheRequestsThatFail) {
  LoadOptions options = small_load();
  options.cancelled = 2;
  options.patience_s = 3;
  options.oversized = 1;
  options.oversized_tokens = 1000;
  const ServingLoad load = load_of(options);
  ASSERT_EQ(load.trace.requests.size(), 6u);
  const auto given_up = [](double at) { return at != kNever; };
  EXPECT_EQ(std::count_if(load.cancel_s.begin(), load.cancel_s.end(), given_up), 2);
  EXPECT_EQ(std::count_if(load.trace.requests.begin(), load.trace.requests.end(), [](const auto& r) { return r.prompt_length() == 1000; }), 1);
  for (std::size_t i = 0; i < load.cancel_s.size(); ++i) {
    EXPECT_GE(load.cancel_s[i], load.arrival_s[i]);
    EXPECT_TRUE(!given_up(load.cancel_s[i]) || load.cancel_s[i] <= load.arrival_s[i] + 3);
  }
}

TEST(ServingLoad, HalvesShareOutEveryRequest) {
  const ServingLoad load = load_of(small_load()), first = half_of(load, 0), second = half_of(load, 1);
  ASSERT_EQ(first.trace.requests.size(), 3u);
  ASSERT_EQ(second.trace.requests.size(), 2u);
  EXPECT_EQ(first.arrival_s, (std::vector<double>{load.arrival_s[0], load.arrival_s[2], load.arrival_s[4]}));
  EXPECT_EQ(second.trace.requests[1].prompt, load.trace.requests[3].prompt);
}

TEST(ServingLoad, RefusesWhatIsNoLoad) {
  for (auto spoil : {+[](LoadOptions& o) { o.requests = 0; }, +[](LoadOptions& o) { o.requests_per_s = -1; }, +[](LoadOptions& o) { o.new_tokens = 0; },
                     +[](LoadOptions& o) { o.prompt_tokens = {5, 0}; }, +[](LoadOptions& o) { o.cancelled = 6; }, +[](LoadOptions& o) { o.oversized = 1; }}) {
    LoadOptions options = small_load();
    spoil(options);
    EXPECT_THROW(load_of(options), ConfigError);
  }
}

TEST(ServingScheduler, AdmitsInOrderAndNeverBeyondItsMemory) {
  const ServingLoad load = load_of(small_load());
  const EffectiveConfig config = config_of("t0s0q0");
  SchedulerOptions options;
  options.prefill_requests = 5;
  ServingScheduler scheduler(load.trace, config, options, equal_bytes(load, 10, 4), 25);
  for (int i = 0; i < 5; ++i) EXPECT_EQ(scheduler.arrive(i), "");
  const std::vector<Submission> round = scheduler.next_round();
  ASSERT_EQ(round.size(), 4u);
  EXPECT_EQ(scheduler.live(), 2);  // 10 + 10, a third would be 30
  EXPECT_TRUE(scheduler.holds(0) && scheduler.holds(1) && scheduler.queued(2));
  std::set<int> begun;
  while (true) {
    const std::vector<Submission> next = begun.empty() ? round : scheduler.next_round();
    if (next.empty()) break;
    for (const Submission& submission : next) {
      for (const WorkItem& item : submission.items) begun.insert(item.request);
      for (const EmittedToken& token : scheduler.issued(submission)) {
        if (token.token == 3) scheduler.release(token.request);
      }
      EXPECT_LE(scheduler.held_bytes(), 25);
    }
  }
  EXPECT_EQ(begun.size(), 5u);
  EXPECT_EQ(scheduler.live(), 0);
  EXPECT_EQ(scheduler.held_bytes(), 0);
}

TEST(ServingScheduler, RefusesWhatWouldNotFitAlone) {
  const ServingLoad load = load_of(small_load());
  const EffectiveConfig config = config_of("t0s0q0");
  std::vector<RequestBytes> bytes = equal_bytes(load, 10, 4);
  bytes[1] = {101, 4};
  ServingScheduler scheduler(load.trace, config, {}, bytes, 100);
  const std::string reason = scheduler.arrive(1);
  EXPECT_NE(reason.find("101 bytes"), std::string::npos) << reason;
  EXPECT_NE(reason.find("100 are"), std::string::npos) << reason;
  const std::vector<Submission> round = scheduler.next_round();
  ASSERT_EQ(round.size(), 1u);
  EXPECT_EQ(round[0].actions, (std::vector<Action>{{ActionKind::cancel, 1}}));
}

TEST(ServingScheduler, DecodeRowsAndPromptsTakeTurnsOrShareASubmission) {
  const ServingLoad load = load_of(small_load());
  const EffectiveConfig config = config_of("t0s0q0");
  for (const bool mixed : {false, true}) {
    SchedulerOptions options;
    options.mixed = mixed;
    options.prefill_tokens = 64;
    ServingScheduler scheduler(load.trace, config, options, equal_bytes(load), 1000);
    std::vector<std::set<RowKind>> kinds;
    scheduler.arrive(0);
    const auto run_round = [&] {
      kinds.emplace_back();
      for (const Submission& submission : scheduler.next_round()) {
        for (const WorkItem& item : submission.items) kinds.back().insert(item.kind);
        scheduler.issued(submission);
      }
    };
    while (!scheduler.prompt_complete(0)) run_round();
    kinds.clear();
    scheduler.arrive(1);
    for (int i = 0; i < 2; ++i) run_round();
    const std::set<RowKind> prompts{RowKind::prefill}, rows{RowKind::decode}, both{RowKind::prefill, RowKind::decode};
    if (mixed) {
      EXPECT_EQ(kinds.front(), both);
    } else {
      EXPECT_EQ((std::set<std::set<RowKind>>{kinds.begin(), kinds.end()}), (std::set<std::set<RowKind>>{prompts, rows}));
    }
  }
}

TEST(ServingScheduler, HeldDecodingBeginsWhenNoPromptCanRun) {
  const ServingLoad load = load_of(small_load());
  const EffectiveConfig config = config_of("t0s0q0");
  SchedulerOptions options;
  options.hold_decode = true;
  ServingScheduler scheduler(load.trace, config, options, equal_bytes(load), 3);  // three at once
  for (int i = 0; i < 5; ++i) scheduler.arrive(i);
  std::set<int> decoding;
  while (decoding.empty()) {
    for (const Submission& submission : scheduler.next_round()) {
      for (const WorkItem& item : submission.items) {
        if (item.kind == RowKind::decode) decoding.insert(item.request);
      }
      scheduler.issued(submission);
    }
  }
  EXPECT_EQ(decoding, (std::set<int>{0, 1, 2}));
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(scheduler.prompt_complete(i));
}

TEST(ServingScheduler, RefusesOptionsThatLetNothingRun) {
  const ServingLoad load = load_of(small_load());
  const EffectiveConfig config = config_of("t0s0q0");
  for (auto spoil : {+[](SchedulerOptions& o) { o.most_live = 0; }, +[](SchedulerOptions& o) { o.most_decode_rows = 0; },
                     +[](SchedulerOptions& o) { o.prefill_tokens = 0; }, +[](SchedulerOptions& o) { o.prefill_requests = 0; }}) {
    SchedulerOptions options;
    spoil(options);
    EXPECT_THROW(ServingScheduler(load.trace, config, options, equal_bytes(load), 1000), ConfigError);
  }
}

struct ServedCase {
  const char* switches;
  bool mixed;
  int in_flight, prefill_requests, most_decode_rows;
};

class Serving : public ::testing::TestWithParam<ServedCase> {};

TEST_P(Serving, RequestsGenerateWhatTheyGenerateAlone) {
  const ServedCase& c = GetParam();
  const ServingLoad load = load_of(small_load());
  const EffectiveConfig config = config_of(c.switches);
  ManualClock clock;
  TimedExecutor executor(clock);
  ServingOptions options;
  options.scheduler = {.most_decode_rows = c.most_decode_rows, .prefill_tokens = 128, .prefill_requests = c.prefill_requests, .mixed = c.mixed};
  options.submissions_in_flight = c.in_flight;
  options.bytes = equal_bytes(load);
  const ServingResult result = serve(executor, load, config, options, clock);

  EXPECT_EQ(outcomes(result), (std::map<ServedOutcome, int>{{ServedOutcome::finished, 5}}));
  EXPECT_EQ(plan_fault(plan_of(result), load.trace, config), "");
  expect_tokens_of_requests_alone(result, load, config);
  EXPECT_EQ(describe(result.held_at_drain), "");
  for (const ServedRequest& request : result.requests) {
    EXPECT_GE(request.begun_s, request.arrival_s);
    ASSERT_EQ(request.token_s.size(), 4u);
    EXPECT_GT(request.token_s.front(), request.begun_s);
    EXPECT_TRUE(std::is_sorted(request.token_s.begin(), request.token_s.end()));
    EXPECT_EQ(request.end_s, request.token_s.back());
  }
}

INSTANTIATE_TEST_SUITE_P(Schedules, Serving,
                         ::testing::Values(ServedCase{"t0s0q0", false, 1, 1, 64}, ServedCase{"t0s0q0", true, 2, 3, 64}, ServedCase{"t0s0q0", false, 2, 1, 2},
                                           ServedCase{"t1s1q1", false, 2, 2, 64}, ServedCase{"t1s1q1", true, 1, 1, 64}),
                         [](const auto& test) {
                           const ServedCase& c = test.param;
                           return std::string(c.switches) + (c.mixed ? "_mixed" : "_split") + "_f" + std::to_string(c.in_flight) + "_p" +
                                  std::to_string(c.prefill_requests) + "_d" + std::to_string(c.most_decode_rows);
                         });

TEST(ServingTimes, AreThoseOfTheClock) {
  LoadOptions one = small_load();
  one.requests = 1;
  one.prompt_tokens = {100};
  const ServingLoad load = load_of(one);
  const EffectiveConfig config = config_of("t0s0q0");
  ManualClock clock;
  TimedExecutor executor(clock);
  ServingOptions options;
  options.submissions_in_flight = 1;
  options.bytes = equal_bytes(load);
  const ServingResult result = serve(executor, load, config, options, clock);
  // Four submissions of the prompt, one of every row after it, 10 ms each.
  const ServedRequest& request = result.requests.front();
  ASSERT_EQ(request.token_s.size(), 4u);
  for (std::size_t i = 0; i < 4; ++i) EXPECT_NEAR(request.token_s[i], 0.04 + 0.01 * static_cast<double>(i), 1e-9);
  EXPECT_EQ(result.most_live, 1);
}

TEST(ServingFailures, AreCountedAndHurtNobodyElse) {
  LoadOptions options = small_load();
  options.requests = 6;
  options.cancelled = 2;
  options.patience_s = 0.02;
  options.oversized = 1;
  options.oversized_tokens = 200;
  const ServingLoad load = load_of(options);
  for (const int in_flight : {1, 2}) {
    for (const char* switches : {"t0s0q0", "t1s1q1"}) {
      const EffectiveConfig config = config_of(switches);
      ManualClock clock;
      TimedExecutor executor(clock);
      ServingOptions serving;
      serving.scheduler = {.prefill_tokens = 64, .prefill_requests = 2, .mixed = true};
      serving.submissions_in_flight = in_flight;
      serving.failures = {{3, PlannedFailure::launch}, {9, PlannedFailure::allocation}};
      for (const TraceRequest& request : load.trace.requests) serving.bytes.push_back({request.prompt_length(), request.prompt_length()});
      serving.budget = 199;
      const ServingResult result = serve(executor, load, config, serving, clock);
      std::map<ServedOutcome, int> counts = outcomes(result);
      EXPECT_EQ(counts[ServedOutcome::refused], 1);
      EXPECT_EQ(counts[ServedOutcome::cancelled], 2);
      EXPECT_EQ(counts[ServedOutcome::finished], 4);
      EXPECT_EQ(result.failed_submissions, 2);
      EXPECT_EQ(result.counters.failures, 2);
      EXPECT_EQ(plan_fault(plan_of(result), load.trace, config), "");
      expect_tokens_of_requests_alone(result, load, config);
      EXPECT_EQ(describe(result.held_at_drain), "");
    }
  }
}

TEST(ServingFailures, MemoryThatIsNotThereEndsTheNewestRequest) {
  const ServingLoad load = load_of(small_load());
  const EffectiveConfig config = config_of("t0s0q0");
  ManualClock clock;
  TimedExecutor executor(clock);
  executor.out_of_memory_at = 14;
  ServingOptions options;
  options.scheduler = {.prefill_tokens = 64, .prefill_requests = 5, .mixed = true};
  options.submissions_in_flight = 1;
  options.bytes = equal_bytes(load);
  const ServingResult result = serve(executor, load, config, options, clock);
  std::map<ServedOutcome, int> counts = outcomes(result);
  EXPECT_EQ(counts[ServedOutcome::failed], 1);
  EXPECT_EQ(counts[ServedOutcome::finished], 4);
  for (const ServedRequest& request : result.requests) {
    EXPECT_EQ(request.outcome == ServedOutcome::failed, request.reason.find("out of device memory") != std::string::npos) << request.reason;
  }
  expect_tokens_of_requests_alone(result, load, config);
}

TEST(ServingHandoff, RequestsGenerateWhatTheyGenerateAlone) {
  const ServingLoad load = load_of(small_load());
  for (const char* switches : {"t0s0q0", "t1s1q1"}) {
    for (const int in_flight : {1, 2}) {
      const EffectiveConfig config = config_of(switches);
      const auto prefill = reference::make_reference_executor(tiny()), decode = reference::make_reference_executor(tiny());
      ServingOptions options;
      options.submissions_in_flight = in_flight;
      options.bytes = equal_bytes(load);
      WallClock clock;
      const ServingResult result = serve_handed_over(*prefill, *decode, make_host_transport(), {}, load, config, options, clock);
      EXPECT_EQ(outcomes(result), (std::map<ServedOutcome, int>{{ServedOutcome::finished, 5}}));
      expect_tokens_of_requests_alone(result, load, config);
      EXPECT_GT(result.transfer_bytes, 0);
      EXPECT_GT(result.transfer_s, 0);
      EXPECT_EQ(describe(result.held_at_drain), "");
    }
  }
}

TEST(ServingHandoff, WhatDoesNotFitIsRefusedAndTheOthersAreServed) {
  LoadOptions with_oversized = small_load();
  with_oversized.oversized = 1;
  with_oversized.oversized_tokens = 200;
  const ServingLoad load = load_of(with_oversized);
  const EffectiveConfig config = config_of("t0s0q0");
  const auto prefill = reference::make_reference_executor(tiny()), decode = reference::make_reference_executor(tiny());
  ServingOptions options;
  for (const TraceRequest& request : load.trace.requests) options.bytes.push_back({request.prompt_length(), request.prompt_length()});
  options.budget = 199;
  WallClock clock;
  const ServingResult result = serve_handed_over(*prefill, *decode, make_host_transport(), {}, load, config, options, clock);
  std::map<ServedOutcome, int> counts = outcomes(result);
  EXPECT_EQ(counts[ServedOutcome::finished], 5);
  EXPECT_EQ(counts[ServedOutcome::refused], 1);
}

// Memory of the first request that asks for it cannot be shared.
class RefusingOnce final : public handoff::ReceiverTransport {
 public:
  explicit RefusingOnce(std::unique_ptr<handoff::ReceiverTransport> inner) : inner_(std::move(inner)) {}
  handoff::Channel& channel() override { return inner_->channel(); }
  handoff::Destination expose(const handoff::Memory& memory) override {
    if (!std::exchange(refused_, true)) throw handoff::HandoffError("not shared");
    return inner_->expose(memory);
  }
  void withdraw(const handoff::Destination& destination) override { inner_->withdraw(destination); }

 private:
  std::unique_ptr<handoff::ReceiverTransport> inner_;
  bool refused_ = false;
};

TEST(ServingHandoff, AHandoffThatFailsIsCountedOnceAndTheOthersAreServed) {
  const ServingLoad load = load_of(small_load());
  const EffectiveConfig config = config_of("t1s1q1");
  const auto prefill = reference::make_reference_executor(tiny()), decode = reference::make_reference_executor(tiny());
  ServingOptions options;
  options.bytes = equal_bytes(load);
  handoff::TransportEnds ends = make_host_transport();
  ends.receiver = std::make_unique<RefusingOnce>(std::move(ends.receiver));
  WallClock clock;
  const ServingResult result = serve_handed_over(*prefill, *decode, std::move(ends), {}, load, config, options, clock);
  EXPECT_EQ(outcomes(result), (std::map<ServedOutcome, int>{{ServedOutcome::finished, 4}, {ServedOutcome::failed, 1}}));
  for (const ServedRequest& request : result.requests) {
    if (request.outcome == ServedOutcome::failed) {
      EXPECT_NE(request.reason.find("not shared"), std::string::npos) << request.reason;
    }
  }
  expect_tokens_of_requests_alone(result, load, config);
  EXPECT_EQ(describe(result.held_at_drain), "");
}

TEST(ServingHalves, EveryRequestIsServedByOneOfTwo) {
  const ServingLoad load = load_of(small_load());
  const EffectiveConfig config = config_of("t0s0q0");
  const auto first = reference::make_reference_executor(tiny()), second = reference::make_reference_executor(tiny());
  ServingOptions options;
  options.bytes = equal_bytes(load);
  WallClock clock;
  const ServingResult result = serve_halves(*first, *second, load, config, options, clock);
  EXPECT_EQ(outcomes(result), (std::map<ServedOutcome, int>{{ServedOutcome::finished, 5}}));
  expect_tokens_of_requests_alone(result, load, config);
}

}  // namespace
}  // namespace loopgauge::harness
