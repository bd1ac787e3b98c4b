// SPDX-License-Identifier: Apache-2.0
// Cancel, rewind, preempt, resume, published windows and planned failures on the device: whatever happens to a request between two
// submissions, what it computes has the bits of the undisturbed serial run, nobody else notices, and nothing is held at the end. Memory is
// poisoned wherever it is taken, so that what was not restored shows.
#include <algorithm>
#include <set>
#include <vector>

#include "models/error.hpp"
#include "reference/reference_executor.hpp"
#include "tests/equivalence/executor_fixture.hpp"

namespace loopgauge::test {
namespace {

constexpr int kWindow = 64;

std::vector<std::int32_t> random_tokens(int count, std::uint32_t seed) {
  std::mt19937 generator(seed);
  std::vector<std::int32_t> tokens(static_cast<std::size_t>(count));
  for (auto& token : tokens) token = static_cast<std::int32_t>(generator() % 256);
  return tokens;
}

TraceRequest request_of(int id, int prompt_length, int new_tokens, bool forced, std::uint32_t seed) {
  TraceRequest request;
  request.id = id;
  request.prompt = random_tokens(prompt_length, seed);
  request.max_new_tokens = new_tokens;
  if (forced) request.forced = random_tokens(new_tokens, seed + 1000);
  return request;
}

// One forced and one free request; prompts of three windows and of two.
Trace two_requests() {
  Trace trace;
  trace.name = "two";
  trace.vocab_size = 264;
  trace.requests = {request_of(0, 140, 5, true, 1), request_of(1, 100, 6, false, 2)};
  return trace;
}

// The second begins like the first for two windows, the third for one; they come when the first has published.
Trace common_prefixes(int arrival = 16) {
  Trace trace;
  trace.name = "prefixes";
  trace.vocab_size = 264;
  trace.requests = {request_of(0, 250, 4, true, 11), request_of(1, 200, 4, false, 12), request_of(2, 150, 4, true, 13)};
  std::copy_n(trace.requests[0].prompt.begin(), 2 * kWindow, trace.requests[1].prompt.begin());
  std::copy_n(trace.requests[0].prompt.begin(), kWindow, trace.requests[2].prompt.begin());
  trace.requests[1].arrival = trace.requests[2].arrival = arrival;
  return trace;
}

// Eight switches, and with Q on each policy.
std::vector<Setting> all_settings() {
  std::vector<Setting> settings;
  for (const char* switches : {"t0s0q0", "t1s0q0", "t0s1q0", "t1s1q0"}) settings.push_back({switches, EncodingPolicy::rolling, kWindow});
  for (const char* switches : {"t0s0q1", "t1s0q1", "t0s1q1", "t1s1q1"}) {
    for (const EncodingPolicy policy : {EncodingPolicy::fixed_prompt, EncodingPolicy::rolling, EncodingPolicy::streaming}) {
      settings.push_back({switches, policy, kWindow});
    }
  }
  return settings;
}

const Setting kAllOn[] = {{"t1s1q1", EncodingPolicy::rolling, kWindow},
                          {"t1s1q1", EncodingPolicy::streaming, kWindow},
                          {"t0s1q0", EncodingPolicy::rolling, kWindow}};

class ActionsTest : public ExecutorTest {
 protected:
  static RunRecord replay_plan(Executor& executor, const Plan& plan, const Trace& trace, const EffectiveConfig& config,
                               Fault fault = Fault::none) {
    RunOptions options{.record = RecordGroups::all()};
    options.fault = fault;
    return replay(executor, plan, trace, config, options);
  }

  // The planted fault changes a result, or makes one that is refused as not finite: memory that nobody wrote is poisoned here.
  static bool shows(Executor& executor, const Plan& plan, const Trace& trace, const EffectiveConfig& config, Fault fault) {
    const RunRecord sound = replay_plan(executor, plan, trace, config);
    try {
      return !harness::compare_records(sound, replay_plan(executor, plan, trace, config, fault), kWindow).identical();
    } catch (const NumericError&) {
      return true;
    }
  }

  static Plan plan_of(const std::string& mode, const Trace& trace, const EffectiveConfig& config) {
    return harness::make_plan(harness::parse_mode(mode), trace, config);
  }

  static std::string difference_of(const RunRecord& expected, const RunRecord& actual, std::size_t request) {
    const auto comparison = harness::compare_records(expected, actual, kWindow);
    return comparison.requests.at(request) ? comparison.requests[request]->text() : "";
  }
};

TEST_F(ActionsTest, PreemptedRequestsGoOnAsIfUndisturbed) {
  const Trace trace = two_requests();
  for (const Setting& setting : all_settings()) {
    const EffectiveConfig config = config_of(setting);
    const RunRecord serial = run(*executor_, trace, config);
    for (const char* mode : {"mixed+preempt", "wcpb+preempt.p5+async"}) {
      const std::string what = std::string(mode) + ", " + text(setting);
      const RunRecord actual = replay_plan(*executor_, plan_of(mode, trace, config), trace, config);
      expect_identical(serial, actual, kWindow, what);
      EXPECT_GE(actual.counters.preemptions, 8) << what;
      EXPECT_GT(actual.counters.snapshot_bytes, 0) << what;
      EXPECT_EQ(actual.counters.executed_rows - actual.counters.discarded_rows, serial.counters.executed_rows)
          << what << ": nothing is computed again";
      EXPECT_EQ(describe(actual.held_at_drain), "") << what;
      for (std::size_t i = 0; i < trace.requests.size(); ++i)
        EXPECT_EQ(actual.requests[i].executions, serial.requests[i].executions) << what;
    }
  }
}

TEST_F(ActionsTest, EveryBoundaryBetweenTwoLoopsIsAPlaceToStop) {
  const Trace trace = two_requests();
  for (const Setting& setting : kAllOn) {
    const EffectiveConfig config = config_of(setting);
    const RunRecord serial = run(*executor_, trace, config);
    for (const char* mode : {"mixed+preempt.p1", "split.p23+preempt.p1"}) {
      const RunRecord actual = replay_plan(*executor_, plan_of(mode, trace, config), trace, config);
      expect_identical(serial, actual, kWindow, std::string(mode) + ", " + text(setting));
      EXPECT_GE(actual.counters.preemptions, 50) << mode;
      EXPECT_EQ(describe(actual.held_at_drain), "") << mode;
    }
  }
}

TEST_F(ActionsTest, ExitStateComesBackWithTheRow) {
  for (const char* rule : {"threshold:0.5", "delayed:0.5", "trace"}) {
    const Trace trace = shipped(std::string(rule) == "trace" ? "exit-depths" : "exit-threshold");
    const EffectiveConfig config = config_of({"t1s1q1", EncodingPolicy::rolling, kWindow, rule});
    const RunRecord serial = run(*executor_, trace, config);
    const RunRecord actual = replay_plan(*executor_, plan_of("mixed+preempt", trace, config), trace, config);
    expect_identical(serial, actual, kWindow, rule);
    EXPECT_GT(actual.counters.preemptions, 0) << rule;
    EXPECT_EQ(describe(actual.held_at_drain), "") << rule;
  }
}

// The end of the sequence may be read while the request is in host memory.
TEST_F(ActionsTest, ARequestMayEndWhileItIsPreempted) {
  Trace trace = two_requests();
  trace.requests[1].max_new_tokens = 12;
  const EffectiveConfig config = config_of({"t1s1q1", EncodingPolicy::rolling, kWindow});
  const RunRecord endless = run(*executor_, trace, config);
  const auto& tokens = endless.requests[1].tokens;
  std::set<std::int32_t> ends(tokens.begin() + 1, tokens.end());
  for (const std::int32_t end : ends) {
    trace.requests[1].eos_token_id = end;
    const RunRecord serial = run(*executor_, trace, config);
    for (const char* mode : {"mixed+preempt+async", "mixed+preempt.p5+async+graph"}) {
      const RunRecord actual = replay_plan(*executor_, plan_of(mode, trace, config), trace, config);
      expect_identical(serial, actual, kWindow, std::string(mode) + ", end of sequence " + std::to_string(end));
      EXPECT_EQ(describe(actual.held_at_drain), "") << mode;
    }
  }
}

TEST_F(ActionsTest, APrefixHitHasTheRecordOfAColdRun) {
  const Trace trace = common_prefixes();
  for (const Setting& setting : all_settings()) {
    const EffectiveConfig config = config_of(setting);
    const RunRecord cold = run(*executor_, trace, config);
    for (const char* mode : {"mixed+prefix", "wcpb+prefix+async", "mixed+prefix.k1+preempt"}) {
      const std::string what = std::string(mode) + ", " + text(setting);
      const Plan plan = plan_of(mode, trace, config);
      const RunRecord actual = replay_plan(*executor_, plan, trace, config);
      expect_identical(cold, actual, kWindow, what);
      std::int64_t reused = 0;
      std::vector<int> windows(trace.requests.size(), 0);
      for (const Submission& submission : plan.submissions) {
        for (const Action& action : submission.actions) {
          if (action.kind != ActionKind::reuse) continue;
          reused += action.windows;
          windows[static_cast<std::size_t>(action.request)] = action.windows;
        }
      }
      ASSERT_GT(reused, 0) << what;
      EXPECT_EQ(actual.counters.reused_windows, reused) << what;
      EXPECT_GT(actual.counters.published_windows, 0) << what;
      EXPECT_LT(actual.counters.executed_rows - actual.counters.discarded_rows, cold.counters.executed_rows) << what;
      EXPECT_EQ(describe(actual.held_at_drain), "") << what;
      for (std::size_t i = 0; i < trace.requests.size(); ++i) {
        std::vector<std::uint8_t> expected = cold.requests[i].executions;
        std::fill_n(expected.begin(), static_cast<std::size_t>(windows[i]) * kWindow * kLoops, std::uint8_t{0});
        EXPECT_EQ(actual.requests[i].executions, expected) << what << ", request " << i;
      }
    }
  }
}

// Published windows that nobody reads give way to a request that needs the memory. Who would have begun with them runs cold.
TEST_F(ActionsTest, MemoryPressureDropsPublishedWindowsAndChangesNoBit) {
  Trace trace;
  trace.name = "pressure";
  trace.vocab_size = 264;
  trace.requests = {request_of(0, 700, 2, true, 21), request_of(1, 700, 2, true, 22), request_of(2, 700, 2, true, 21)};
  trace.requests[1].arrival = 100;  // one after the other
  trace.requests[2].arrival = 200;
  const EffectiveConfig config = config_of({"t1s0q0", EncodingPolicy::rolling, kWindow});
  const Plan plan = plan_of("split+prefix", trace, config);
  const auto run_limited = [&](std::size_t limit, const Plan& what) {
    const auto executor = optimized::make_cuda_executor(tiny(), {.memory_limit_bytes = limit, .poison = true});
    const RunRecord record = replay_plan(*executor, what, trace, config);
    return std::pair(record, executor->memory_usage().total_peak);
  };
  constexpr std::size_t kUnlimited = std::numeric_limits<std::size_t>::max();
  const auto [cold, cold_peak] = run_limited(kUnlimited, plan_of("split", trace, config));
  const auto [hit, hit_peak] = run_limited(kUnlimited, plan);
  EXPECT_GT(hit.counters.reused_windows, 0);
  EXPECT_EQ(hit.counters.evicted_windows, 0);
  ASSERT_GT(hit_peak, cold_peak) << "published windows take memory";
  const auto [pressed, pressed_peak] = run_limited(cold_peak + (hit_peak - cold_peak) / 4, plan);
  EXPECT_GT(pressed.counters.evicted_windows, 0);
  EXPECT_LT(pressed.counters.reused_windows, hit.counters.reused_windows);
  expect_identical(cold, hit, kWindow, "prefix hit");
  expect_identical(cold, pressed, kWindow, "under memory pressure");
  EXPECT_EQ(describe(pressed.held_at_drain), "");
  std::printf("  peak: cold %zu, with published windows %zu, limited %zu bytes; %lld windows dropped\n", cold_peak, hit_peak, pressed_peak,
              static_cast<long long>(pressed.counters.evicted_windows));
}

TEST_F(ActionsTest, AFailedSubmissionLosesNothingOfAnybody) {
  const Trace trace = two_requests();
  // Under fixed_prompt the last window is sealed when the prompt is complete, by the rows that its selection found: those of the re-run.
  std::vector<Setting> settings(std::begin(kAllOn), std::end(kAllOn));
  settings.push_back({"t1s0q1", EncodingPolicy::fixed_prompt, kWindow});
  for (const Setting& setting : settings) {
    const EffectiveConfig config = config_of(setting);
    const RunRecord serial = run(*executor_, trace, config);
    for (const char* mode : {"mixed", "wcpb", "wcpb.c2"}) {
      const std::size_t submissions = plan_of(mode, trace, config).submissions.size();
      for (std::size_t i = 0; i < submissions; ++i) {
        for (const PlannedFailure kind : {PlannedFailure::allocation, PlannedFailure::launch}) {
          const std::string what = std::string(mode) + ", " + text(setting) + ", " + std::string(to_string(kind)) + "@" + std::to_string(i);
          harness::PlanOptions options;
          options.failure = harness::PlanFailure{static_cast<int>(i), kind};
          const Plan plan = harness::make_plan(harness::parse_mode(mode), trace, config, options);
          const RunRecord actual = replay_plan(*executor_, plan, trace, config);
          expect_identical(serial, actual, kWindow, what);
          EXPECT_EQ(actual.counters.failures, 1) << what;
          EXPECT_EQ(describe(actual.held_at_drain), "") << what;
          std::set<int> failed;
          for (const WorkItem& item : plan.submissions[i].items) failed.insert(item.request);
          for (std::size_t r = 0; r < trace.requests.size(); ++r) {
            if (failed.contains(static_cast<int>(r))) continue;
            EXPECT_EQ(actual.requests[r].executions, serial.requests[r].executions) << what;
          }
          EXPECT_EQ(actual.counters.executed_rows, serial.counters.executed_rows + actual.counters.recomputed_rows) << what;
        }
      }
    }
  }
}

// The plan without what follows submission `at` of one request, which is cancelled there.
Plan cancelled_at(Plan plan, std::size_t at, int request) {
  for (std::size_t i = at; i < plan.submissions.size(); ++i) {
    std::erase_if(plan.submissions[i].items, [&](const WorkItem& item) { return item.request == request; });
    std::erase_if(plan.submissions[i].actions, [&](const Action& action) { return action.request == request; });
  }
  plan.submissions[at].actions.insert(plan.submissions[at].actions.begin(), {ActionKind::cancel, request});
  return plan;
}

TEST_F(ActionsTest, ACancelledRequestKeepsWhatWasCommittedAndDisturbsNobody) {
  const Trace trace = two_requests();
  const auto reference = reference::make_reference_executor(tiny());
  for (const Setting& setting : kAllOn) {
    const EffectiveConfig config = config_of(setting);
    const RunRecord serial = run(*executor_, trace, config);
    for (const char* mode : {"mixed", "wcpb+async", "mixed+preempt.p2"}) {
      const Plan whole = plan_of(mode, trace, config);
      const std::size_t stride = std::string(mode) == "mixed" ? 1 : 7;
      for (std::size_t at = 0; at < whole.submissions.size(); at += stride) {
        for (const int request : {0, 1}) {
          const Plan plan = cancelled_at(whole, at, request);
          const std::string what =
              std::string(mode) + ", " + text(setting) + ", request " + std::to_string(request) + " cancelled at " + std::to_string(at);
          ASSERT_EQ(plan_fault(plan, trace, config), "") << what;
          const RunRecord actual = replay_plan(*executor_, plan, trace, config);
          EXPECT_EQ(describe(actual.held_at_drain), "") << what;
          EXPECT_EQ(difference_of(serial, actual, static_cast<std::size_t>(1 - request)), "") << what;
          const RequestRecord& full = serial.requests[static_cast<std::size_t>(request)];
          const RequestRecord& cut = actual.requests[static_cast<std::size_t>(request)];
          if (cut.outcome == RequestOutcome::completed) {  // it had ended before
            EXPECT_EQ(difference_of(serial, actual, static_cast<std::size_t>(request)), "") << what;
            continue;
          }
          const auto fed = static_cast<std::size_t>(cut.fed);
          EXPECT_TRUE(cut.kv.empty() && cut.blocks.empty()) << what;
          EXPECT_TRUE(std::equal(cut.tokens.begin(), cut.tokens.end(), full.tokens.begin())) << what;
          EXPECT_TRUE(std::equal(cut.encoded_frontier.begin(), cut.encoded_frontier.end(), full.encoded_frontier.begin())) << what;
          EXPECT_EQ(cut.executions.size(), (static_cast<std::size_t>(cut.prompt_length) + fed) * kLoops) << what;
          EXPECT_EQ(cut.exit_depths.size(), cut.tokens.size()) << what;
          EXPECT_TRUE(std::equal(cut.logits.data.begin(), cut.logits.data.end(), full.logits.data.begin())) << what;
          for (std::size_t r = 0; r < kLoops; ++r) {
            const auto& rows = cut.hidden[r].data;
            EXPECT_TRUE(std::equal(rows.begin(), rows.end(), full.hidden[r].data.begin())) << what;
            EXPECT_EQ(rows.empty(), cut.encoded_frontier.empty()) << what;
          }
          for (std::size_t late = 0; late < 2; ++late) {
            EXPECT_TRUE(std::equal(cut.active[late].begin(), cut.active[late].end(), full.active[late].begin())) << what;
          }
        }
      }
    }
    // The reference agrees on what a cancelled request leaves.
    const Plan whole = plan_of("mixed", trace, config);
    for (const std::size_t at :
         {std::size_t{1}, whole.submissions.size() / 3, whole.submissions.size() / 2, whole.submissions.size() - 2}) {
      const Plan plan = cancelled_at(whole, at, 0);
      const RequestRecord actual = replay_plan(*executor_, plan, trace, config).requests[0];
      const RequestRecord expected = replay_plan(*reference, plan, trace, config).requests[0];
      const std::string what = text(setting) + ", cancelled at " + std::to_string(at);
      EXPECT_EQ(actual.outcome, expected.outcome) << what;
      EXPECT_EQ(actual.fed, expected.fed) << what;
      EXPECT_EQ(actual.tokens, expected.tokens) << what;
      EXPECT_EQ(actual.exit_depths, expected.exit_depths) << what;
      EXPECT_EQ(actual.encoded_frontier, expected.encoded_frontier) << what;
      EXPECT_EQ(actual.executions.size(), expected.executions.size()) << what;
      EXPECT_EQ(actual.logits.shape, expected.logits.shape) << what;
      EXPECT_EQ(actual.keys.size(), expected.keys.size()) << what;
      EXPECT_EQ(actual.gate.shape, expected.gate.shape) << what;
      for (std::size_t late = 0; late < 2; ++late) EXPECT_EQ(actual.active[late].size(), expected.active[late].size()) << what;
    }
  }
}

// With results in flight, at every fifth submission.
TEST_F(ActionsTest, ARewindOfWorkInFlightGivesTheSameBitsAgain) {
  const Trace trace = two_requests();
  for (const Setting& setting : kAllOn) {
    const EffectiveConfig config = config_of(setting);
    const RunRecord serial = run(*executor_, trace, config);
    const std::size_t submissions = plan_of("wcpb", trace, config).submissions.size();
    for (std::size_t i = 0; i < submissions; i += 5) {
      harness::PlanOptions options;
      options.failure = harness::PlanFailure{static_cast<int>(i), PlannedFailure::launch};
      Plan plan = harness::make_plan(harness::parse_mode("wcpb+async"), trace, config, options);
      const RunRecord actual = replay_plan(*executor_, plan, trace, config);
      expect_identical(serial, actual, kWindow, text(setting) + ", asynchronous, launch@" + std::to_string(i));
      EXPECT_EQ(describe(actual.held_at_drain), "");
    }
  }
}

TEST_F(ActionsTest, MemoryIsBackAfterEveryRun) {
  const Trace two = two_requests(), prefixes = common_prefixes();
  for (const Setting& setting : kAllOn) {
    const EffectiveConfig config = config_of(setting);
    static_cast<void>(run(*executor_, prefixes, config));
    const optimized::MemoryUsage idle = executor_->memory_usage();
    static_cast<void>(replay_plan(*executor_, plan_of("mixed+preempt", two, config), two, config));
    EXPECT_EQ(executor_->memory_usage().in_use, idle.in_use) << text(setting);
    static_cast<void>(replay_plan(*executor_, plan_of("mixed+prefix", prefixes, config), prefixes, config));
    EXPECT_EQ(executor_->memory_usage().in_use, idle.in_use) << text(setting);
    EXPECT_EQ(executor_->memory_usage().live_buffers, idle.live_buffers) << text(setting);
  }
}

// It acts when one row is at loop 2 while another is at loop 4: some distance between the requests brings that about.
TEST_F(ActionsTest, AReferenceSlotThatIsReusedEarlyShows) {
  const EffectiveConfig config = config_of({"t0s1q0", EncodingPolicy::rolling, kWindow});
  int shown = 0;
  for (int arrival = 0; arrival < 4; ++arrival) {
    Trace trace = two_requests();
    trace.requests[1].arrival = arrival;
    const Plan plan = plan_of("mixed", trace, config);
    shown += shows(*executor_, plan, trace, config, Fault::slot_reused_early);
  }
  EXPECT_GT(shown, 0);
}

TEST_F(ActionsTest, PlantedFaultsOfActionsShow) {
  const struct {
    Fault fault;
    const char* mode;
    Trace trace;
  } cases[] = {
      {Fault::resume_without_token, "mixed+preempt", two_requests()},
      {Fault::resume_without_reference, "mixed+preempt", two_requests()},
      {Fault::publish_before_last_loop, "mixed+prefix", common_prefixes()},
  };
  for (const auto& c : cases) {
    for (const Setting& setting : kAllOn) {
      const EffectiveConfig config = config_of(setting);
      const Plan plan = plan_of(c.mode, c.trace, config);
      EXPECT_TRUE(shows(*executor_, plan, c.trace, config, c.fault)) << to_string(c.fault) << ", " << text(setting);
    }
  }
}

}  // namespace
}  // namespace loopgauge::test
