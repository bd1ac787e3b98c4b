// SPDX-License-Identifier: Apache-2.0
// Whatever is decoded after a handoff has the bits of the same executor without one (S-PD-8): all settings, policies, exits and schedules.
#include "harness/handoff/handoff_executor.hpp"

#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "harness/handoff/local_transport.hpp"
#include "harness/planner/planner.hpp"
#include "models/error.hpp"
#include "tests/reference/executor/modes.hpp"

namespace loopgauge::test {
namespace {

using harness::make_plan;
using harness::parse_mode;

std::unique_ptr<Executor> pair_of_references(const Checkpoint& checkpoint, harness::HandoffLimits limits = {}) {
  return harness::make_handoff_executor([&checkpoint] { return reference::make_reference_executor(checkpoint); },
                                        harness::make_host_transport, limits);
}

RunRecord run_handed(const Checkpoint& checkpoint, const Trace& trace, const AlgorithmConfig& requested, const char* mode,
                     RunOptions options = {}, harness::PlanOptions plan_options = {}, harness::HandoffLimits limits = {}) {
  const EffectiveConfig config = EffectiveConfig::resolve(requested, checkpoint.config);
  const Plan plan = make_plan(parse_mode(mode), trace, config, plan_options);
  options.record = RecordGroups::all();
  const auto executor = pair_of_references(checkpoint, limits);
  return replay(*executor, plan, trace, config, options);
}

// Partitions small enough that a region is cut in several.
constexpr harness::HandoffLimits kSmall{.partition_bytes = 1000, .bytes_in_flight = 2500, .export_bytes = 3000};

class Handoff : public testing::TestWithParam<AlgorithmConfig> {
 protected:
  static Trace trace() {
    Trace trace = trace_of({request(0, 150, 3), free_request(1, 64, 5), request(2, 70, 0), free_request(3, 129, 70)});
    give_depths(trace);
    return trace;
  }
  const Checkpoint checkpoint_ = tiny_checkpoint();
};

TEST_P(Handoff, DecodingAfterItHasTheBitsOfDecodingWithoutIt) {
  for (const ExitRule& exit : four_exits()) {
    AlgorithmConfig config = GetParam();
    config.exit = exit;
    const std::string what = setting_name(config) + ", exit " + std::string(to_string(exit.mode));
    const RunRecord whole = run(checkpoint_, trace(), config);
    const RunRecord handed = run_handed(checkpoint_, trace(), config, "pd", {}, {}, kSmall);
    expect_same_requests(whole, handed, what);
    expect_accounts(handed, what);
    ASSERT_EQ(handed.handoffs.size(), 4u) << what;
    for (const HandoffRecord& handoff : handed.handoffs) {
      EXPECT_EQ(handoff.outcome, "handed over") << what;
      EXPECT_LE(handoff.most_bytes_in_flight, 2500) << what;
      EXPECT_GE(handoff.partitions * 1000, handoff.bytes) << what;
    }
  }
}

TEST_P(Handoff, EveryScheduleAndModifierGivesTheSame) {
  const AlgorithmConfig config = GetParam();
  const auto& q = config.kv_residual_quantization;
  const bool encoded = q.enabled && q.policy == EncodingPolicy::streaming;
  const RunRecord whole = run(checkpoint_, trace(), config);
  for (const char* mode : {"split.p33+pd", "mixed.b40+pd", "wcpb+pd", "wcpb+pd+async", "mixed+pd+async+graph",
                           encoded ? "wcpb+prefix.encoded+pd" : "wcpb+prefix+pd"}) {
    const std::string what = setting_name(config) + ", " + mode;
    const RunRecord handed = run_handed(checkpoint_, trace(), config, mode);
    expect_same_requests(whole, handed, what);
    EXPECT_EQ(describe(handed.held_at_drain), "") << what;
    EXPECT_LE(handed.counters.most_in_flight, std::string(mode).find("async") == std::string::npos ? 1 : 2) << what;
  }
}

// What is committed after a handoff is what a serial run commits, whatever was drafted.
TEST_P(Handoff, SpeculationAfterItCommitsTheBitsOfASerialRun) {
  const AlgorithmConfig config = GetParam();
  const RunRecord whole = run(checkpoint_, trace(), config);
  for (const char* mode : {"block_spec.d2.k3+pd", "block_spec.d1.k2+pd+async", "pipeline_spec.d1+pd", "pipeline_spec.d2+pd+async"}) {
    const std::string what = setting_name(config) + ", " + mode;
    const RunRecord handed = run_handed(checkpoint_, trace(), config, mode, {}, {}, kSmall);
    expect_same_requests(whole, handed, what);
    EXPECT_EQ(describe(handed.held_at_drain), "") << what;
    EXPECT_GT(handed.counters.speculation_rounds, 0) << what;
    for (const HandoffRecord& handoff : handed.handoffs) EXPECT_EQ(handoff.outcome, "handed over") << what;
  }
}

TEST_P(Handoff, ExecutionDependentEncodingSeesWhatASerialRunSees) {
  AlgorithmConfig config = GetParam();
  if (!config.kv_residual_quantization.enabled) GTEST_SKIP() << "nothing is encoded";
  config.kv_residual_quantization.timing = EncodingTiming::execution_dependent;
  expect_same_requests(run(checkpoint_, trace(), config), run_handed(checkpoint_, trace(), config, "pd"), setting_name(config));
}

INSTANTIATE_TEST_SUITE_P(Settings, Handoff, testing::ValuesIn(sixteen_settings()),
                         [](const testing::TestParamInfo<AlgorithmConfig>& instance) { return setting_name(instance.param); });

class HandoffRun : public testing::Test {
 protected:
  const Checkpoint checkpoint_ = tiny_checkpoint();
  const AlgorithmConfig config_ = switches("t1s1q1");
};

TEST_F(HandoffRun, EveryProfileCanBeHandedOff) {
  const Trace trace = trace_of({request(0, 150, 4)});
  for (const Profile profile : {Profile::reordered, Profile::double_precision}) {
    expect_same_requests(run(checkpoint_, trace, config_, with_profile(profile)),
                         run_handed(checkpoint_, trace, config_, "pd", with_profile(profile)), std::string(to_string(profile)));
  }
}

TEST_F(HandoffRun, WindowsThatWereReusedAreHandedOffLikeOthers) {
  Trace trace = trace_of({request(0, 200, 3), request(1, 200, 3)});
  trace.requests[1].prompt = trace.requests[0].prompt;
  trace.requests[1].prompt.back() = 1;
  trace.requests[1].arrival = 40;
  for (const char* text : {"t1s1q0", "t1s1q1"}) {
    const RunRecord handed = run_handed(checkpoint_, trace, switches(text), "prefix+pd");
    EXPECT_EQ(handed.counters.reused_windows, 3) << text;
    expect_same_requests(run(checkpoint_, trace, switches(text)), handed, text);
    EXPECT_EQ(describe(handed.held_at_drain), "") << text;
  }
}

TEST_F(HandoffRun, PlanesLeaveAsLoopsComplete) {
  const Trace trace = trace_of({request(0, 256, 1)});
  for (const char* mode : {"wcpb+pd", "split+pd"}) {
    for (const auto policy : {EncodingPolicy::streaming, EncodingPolicy::rolling}) {
      AlgorithmConfig config = config_;
      config.kv_residual_quantization.policy = policy;
      const RunRecord handed = run_handed(checkpoint_, trace, config, mode);
      const HandoffRecord& handoff = handed.handoffs.at(0);
      // Under `streaming` all but the end of the last window has left; the other policies encode with the end of the prompt.
      if (policy == EncodingPolicy::streaming) {
        EXPECT_GT(handoff.bytes_before_prompt_end * 10, handoff.bytes * 9) << mode;
      } else {
        EXPECT_GT(handoff.bytes_before_prompt_end, 0) << mode;
        EXPECT_LT(handoff.bytes_before_prompt_end * 2, handoff.bytes) << mode;
      }
      EXPECT_GT(handoff.bytes_final_before_last_loop * 2, handoff.bytes) << mode;
      EXPECT_LT(handoff.bytes_final_before_last_loop, handoff.bytes) << mode;
    }
  }
}

TEST_F(HandoffRun, FailuresAndRewindsOnEitherSideChangeNothing) {
  const Trace trace = trace_of({request(0, 150, 3), free_request(1, 80, 4)});
  const EffectiveConfig config = EffectiveConfig::resolve(config_, checkpoint_.config);
  const RunRecord whole = run(checkpoint_, trace, config_);
  for (const char* mode : {"wcpb+pd", "mixed.b100+pd"}) {
    const int submissions = static_cast<int>(make_plan(parse_mode(mode), trace, config).submissions.size());
    for (int at = 0; at < submissions; ++at) {
      harness::PlanOptions options;
      options.failure = harness::PlanFailure{at, at % 2 == 0 ? PlannedFailure::launch : PlannedFailure::allocation};
      const std::string what = std::string(mode) + ", failure of " + std::to_string(at);
      RunRecord handed;
      try {
        handed = run_handed(checkpoint_, trace, config_, mode, {}, options, kSmall);
      } catch (const ConfigError&) {
        continue;  // that submission runs nothing
      }
      EXPECT_EQ(handed.counters.failures, 1) << what;
      for (std::size_t i = 0; i < whole.requests.size(); ++i) {
        EXPECT_EQ(differing_groups(whole.requests[i], handed.requests[i]), kNone) << what << ", request " << i;
      }
      EXPECT_EQ(describe(handed.held_at_drain), "") << what;
    }
  }
}

TEST_F(HandoffRun, ACancelledRequestHoldsNothingOnEitherSideAndDisturbsNobody) {
  const Trace undisturbed = trace_of({request(0, 150, 3), request(1, 200, 3)});
  const RunRecord whole = run(checkpoint_, undisturbed, config_);
  for (const char* mode : {"wcpb+pd", "split.p33+pd", "mixed.b100+pd+async"}) {
    const EffectiveConfig config = EffectiveConfig::resolve(config_, checkpoint_.config);
    const int submissions = static_cast<int>(make_plan(parse_mode(mode), undisturbed, config).submissions.size());
    for (int at = 0; at < submissions; ++at) {
      Trace trace = undisturbed;
      trace.events.push_back({at, TraceEventKind::cancel, 0});
      const std::string what = std::string(mode) + ", cancelled at " + std::to_string(at);
      const RunRecord handed = run_handed(checkpoint_, trace, config_, mode, {}, {}, kSmall);
      EXPECT_EQ(describe(handed.held_at_drain), "") << what;
      EXPECT_EQ(differing_groups(whole.requests[1], handed.requests[1]), kNone) << what;
      const RequestRecord& cut = handed.requests[0];
      if (cut.outcome == RequestOutcome::completed) {
        EXPECT_EQ(differing_groups(whole.requests[0], cut), kNone) << what;
        continue;
      }
      EXPECT_TRUE(std::equal(cut.logits.data.begin(), cut.logits.data.end(), whole.requests[0].logits.data.begin())) << what;
      EXPECT_EQ(cut.encoded_frontier.size() * static_cast<std::size_t>(checkpoint_.config.vocab), cut.logits.data.size()) << what;
    }
  }
}

// Writes of this transport never end.
class StuckSender final : public handoff::SenderTransport {
 public:
  explicit StuckSender(std::unique_ptr<handoff::SenderTransport> inner) : inner_(std::move(inner)) {}
  std::string_view name() const override { return "stuck"; }
  handoff::Channel& channel() override { return inner_->channel(); }
  void write(std::uint64_t, const handoff::Memory&, const handoff::Destination&, std::uint64_t) override {}
  std::vector<handoff::WriteResult> ended() override { return {}; }

 private:
  std::unique_ptr<handoff::SenderTransport> inner_;
};

// Writes of this transport take their time.
class SlowSender final : public handoff::SenderTransport {
 public:
  explicit SlowSender(std::unique_ptr<handoff::SenderTransport> inner) : inner_(std::move(inner)) {}
  std::string_view name() const override { return "slow"; }
  handoff::Channel& channel() override { return inner_->channel(); }
  void write(std::uint64_t ticket, const handoff::Memory& source, const handoff::Destination& destination, std::uint64_t offset) override {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    inner_->write(ticket, source, destination, offset);
  }
  std::vector<handoff::WriteResult> ended() override { return inner_->ended(); }

 private:
  std::unique_ptr<handoff::SenderTransport> inner_;
};

// Also when all of it happens before the decode side asks for the request.
TEST_F(HandoffRun, TheTimeOfAHandoffBeginsWithTheEndOfThePrompt) {
  const auto slow = [] {
    handoff::TransportEnds ends = harness::make_host_transport();
    ends.sender = std::make_unique<SlowSender>(std::move(ends.sender));
    return ends;
  };
  const EffectiveConfig config = EffectiveConfig::resolve(config_, checkpoint_.config);
  const Trace trace = trace_of({request(0, 70, 2), request(1, 150, 2)});
  const auto executor = harness::make_handoff_executor([this] { return reference::make_reference_executor(checkpoint_); }, slow);
  const RunRecord record = replay(*executor, make_plan(parse_mode("pd"), trace, config), trace, config, {});
  ASSERT_EQ(record.handoffs.size(), 2u);
  for (const HandoffRecord& handoff : record.handoffs) EXPECT_GE(handoff.seconds, 0.005) << "request " << handoff.request;
}

TEST_F(HandoffRun, ATransferThatDoesNotMoveIsGivenUpAfterTheLease) {
  const auto stuck = [] {
    handoff::TransportEnds ends = harness::make_host_transport();
    ends.sender = std::make_unique<StuckSender>(std::move(ends.sender));
    return ends;
  };
  const EffectiveConfig config = EffectiveConfig::resolve(config_, checkpoint_.config);
  Trace cancelled = trace_of({request(0, 256, 2), request(1, 70, 2)});
  cancelled.events.push_back({6, TraceEventKind::cancel, 0});  // when the first rows have left
  for (const auto& [trace, sentence] : {std::pair{trace_of({request(0, 256, 2)}), std::string("was not handed over (expired)")},
                                        std::pair{cancelled, "request 0 of trace " + cancelled.name + " was cancelled, and its handoff has not ended within the lease"}}) {
    const auto executor = harness::make_handoff_executor([this] { return reference::make_reference_executor(checkpoint_); }, stuck,
                                                         {.lease = std::chrono::milliseconds(20)});
    const Plan plan = make_plan(parse_mode("wcpb+pd"), trace, config);
    try {
      static_cast<void>(replay(*executor, plan, trace, config, {}));
      ADD_FAILURE() << "the run went on";
    } catch (const FileError& error) {
      EXPECT_NE(std::string(error.what()).find(sentence), std::string::npos) << error.what();
    }
  }
}

TEST_F(HandoffRun, ARequestWithoutNewTokensHasItsLogitsFromTheOtherSide) {
  const Trace trace = trace_of({free_request(0, 100, 0), free_request(1, 1, 1)});
  const RunRecord handed = run_handed(checkpoint_, trace, config_, "pd");
  expect_same_requests(run(checkpoint_, trace, config_), handed, "no new tokens");
  EXPECT_EQ(handed.requests[0].encoded_frontier.size(), 1u);
}

TEST_F(HandoffRun, AnExecutorKeepsToItsStage) {
  const Trace trace = trace_of({request(0, 70, 2)});
  const EffectiveConfig config = EffectiveConfig::resolve(config_, checkpoint_.config);
  const auto executor = reference::make_reference_executor(checkpoint_);
  RunOptions options;
  options.stage = Stage::decode;
  executor->begin(trace, config, options);
  EXPECT_EQ(executor->handoff_source(), nullptr);
  EXPECT_NE(executor->handoff_target(), nullptr);
  EXPECT_THROW(executor->submit({{{0, RowKind::prefill, 0, 64, 1, 4}}}), InternalError);
  EXPECT_THROW(executor->submit({{{0, RowKind::decode, 70, 71, 1, 4}}}), InternalError) << "nothing was handed in";
  options.stage = Stage::prefill;
  executor->begin(trace, config, options);
  EXPECT_NE(executor->handoff_source(), nullptr);
  EXPECT_EQ(executor->handoff_target(), nullptr);
  executor->submit({{{0, RowKind::prefill, 0, 70, 1, 4}}});
  EXPECT_THROW(executor->submit({{{0, RowKind::decode, 70, 71, 1, 4}}}), InternalError);
  EXPECT_THROW(executor->submit({{}, {{ActionKind::hand_off, 0}}}), InternalError);
}

}  // namespace
}  // namespace loopgauge::test
