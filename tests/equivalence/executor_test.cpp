// SPDX-License-Identifier: Apache-2.0
// The CUDA executor as a whole: its records keep the specification's rules, repeat to the bit in any plan and any company, agree with the
// reference within its noise, and leave no memory behind.
#include <algorithm>
#include <cstdio>

#include "harness/compare/audit.hpp"
#include "harness/compare/conformance.hpp"
#include "harness/compare/memory_model.hpp"
#include "harness/compare/record_compare.hpp"
#include "harness/planner/planner.hpp"
#include "models/executor.hpp"
#include "optimized/ops/reference_statistics.cuh"
#include "reference/reference_executor.hpp"
#include "tests/equivalence/executor_fixture.hpp"

namespace loopgauge::test {
namespace {

TEST_F(ExecutorTest, RecordsKeepTheRulesOfTheSpecification) {
  for (const char* name : {"boundary-short", "four", "flush-3"}) {
    const Trace trace = shipped(name);
    for (const Setting& setting : kSettings) {
      const EffectiveConfig config = config_of(setting);
      const harness::AuditResult result = harness::audit(run(*executor_, trace, config), trace, config, tiny());
      EXPECT_TRUE(result.clean()) << name << ", " << text(setting) << ": " << result.findings.size() << " findings, first: "
                                  << (result.clean() ? "" : result.findings.front().text);
    }
  }
}

// With the reference's tokens and decisions the arithmetic alone differs. The yardstick is the reference's own second order of additions,
// the floor double precision; distances are pooled over a trace, because few roundings flip in a few rows.
TEST_F(ExecutorTest, DecisionForcedRunsStayWithinTheNoiseOfTheReference) {
  const auto reference = reference::make_reference_executor(tiny());
  for (const char* name : {"four", "kv-700"}) {
    const Trace trace = shipped(name);
    for (const Setting& setting : kSettings) {
      const std::string what = std::string(name) + ", " + text(setting);
      const EffectiveConfig config = config_of(setting);
      const RunRecord expected = run(*reference, trace, config);
      const auto forced = [&](Executor& executor, Profile profile) {
        RunOptions options{.profile = profile, .record = RecordGroups::all()};
        options.decisions = &expected;
        return run(executor, trace, config, options);
      };
      const RunRecord actual = forced(*executor_, Profile::declared);
      ASSERT_EQ(harness::shape_difference(expected, actual), "") << what;
      EXPECT_EQ(harness::forced_decision_difference(expected, actual), "") << what;
      const harness::Yardstick yardstick{harness::pooled_distances(expected, forced(*reference, Profile::reordered)),
                                         harness::pooled_distances(expected, forced(*reference, Profile::double_precision))};
      const auto verdicts = harness::judge_distances(harness::pooled_distances(expected, actual), yardstick);
      EXPECT_GE(verdicts.size(), 19u) << what << ": hidden, K, V and gate of four loops, logits, KL, top-1";
      for (const harness::DistanceVerdict& verdict : verdicts) {
        EXPECT_TRUE(verdict.passed) << what << ", " << verdict.text();
        std::printf("  %-40s %4.2f of its limit, %s\n", what.c_str(), verdict.worst_ratio, verdict.text().c_str());
      }
    }
  }
}

TEST_F(ExecutorTest, RepeatsToTheBit) {
  const Trace trace = shipped("four");
  for (const Setting& setting : kSettings) {
    const EffectiveConfig config = config_of(setting);
    const RunRecord first = run(*executor_, trace, config);
    expect_identical(first, run(*executor_, trace, config), config.window(), text(setting) + ", again");
    const auto fresh = optimized::make_cuda_executor(tiny());
    expect_identical(first, run(*fresh, trace, config), config.window(), text(setting) + ", fresh executor without poison");
  }
}

TEST_F(ExecutorTest, SplitPlansGiveTheBitsOfTheSerialPlan) {
  for (const char* name : {"four", "boundary-short", "exit-depths"}) {
    const Trace trace = shipped(name);
    for (Setting setting : kSettings) {
      if (std::string(name) == "exit-depths") setting.exit = "trace";
      const EffectiveConfig config = config_of(setting);
      const RunRecord serial = run(*executor_, trace, config);
      expect_identical(serial, run(*executor_, trace, config, {.record = RecordGroups::all()}, "split"), config.window(), std::string(name) + " split, " + text(setting));
      expect_identical(serial, run(*executor_, trace, config, {.record = RecordGroups::all()}, "split.p23"), config.window(),
                       std::string(name) + " split.p23, " + text(setting));
    }
  }
}

// Every request of one step in one batch, in both orders, against each request alone.
TEST_F(ExecutorTest, ARequestInABatchHasTheBitsOfTheRequestAlone) {
  const Trace trace = shipped("four");
  for (const Setting& setting : kSettings) {
    const EffectiveConfig config = config_of(setting);
    const RunRecord alone = run(*executor_, trace, config);
    for (const bool reversed : {false, true}) {
      // Step k of every request, one loop each: windows in order, then tokens.
      Plan plan{"batched", {}};
      std::vector<std::vector<WorkItem>> steps(trace.requests.size());
      std::size_t longest = 0;
      for (std::size_t i = 0; i < trace.requests.size(); ++i) {
        const Plan split = harness::make_plan(harness::parse_mode("split"), trace, config);
        for (const Submission& submission : split.submissions) {
          if (submission.items.front().request == static_cast<int>(i)) steps[i].push_back(submission.items.front());
        }
        longest = std::max(longest, steps[i].size());
      }
      for (std::size_t k = 0; k < longest; ++k) {
        Submission submission;
        for (const RowKind kind : {RowKind::decode, RowKind::prefill}) {
          for (std::size_t j = 0; j < steps.size(); ++j) {
            const std::size_t i = reversed ? steps.size() - 1 - j : j;
            if (k < steps[i].size() && steps[i][k].kind == kind) submission.items.push_back(steps[i][k]);
          }
        }
        plan.submissions.push_back(submission);
      }
      ASSERT_EQ(plan_fault(plan, trace, config), "");
      expect_identical(alone, replay(*executor_, plan, trace, config, {.record = RecordGroups::all()}), config.window(), text(setting));
    }
  }
}

TEST_F(ExecutorTest, GreedyRunsStopWhereTheReferenceStops) {
  const Trace trace = shipped("greedy");
  const EffectiveConfig config = config_of({"t0s0q0"});
  const RunRecord record = run(*executor_, trace, config);
  for (std::size_t i = 0; i < trace.requests.size(); ++i) {
    const TraceRequest& request = trace.requests[i];
    const RequestRecord& r = record.requests[i];
    ASSERT_FALSE(r.tokens.empty());
    const auto end = std::find(r.tokens.begin(), r.tokens.end(), request.eos_token_id);
    if (end != r.tokens.end()) {
      EXPECT_EQ(end + 1, r.tokens.end()) << "tokens after the end-of-sequence id";
    } else {
      EXPECT_EQ(static_cast<int>(r.tokens.size()), request.max_new_tokens);
    }
    EXPECT_EQ(r.fed, static_cast<int>(r.tokens.size()) - 1);
  }
  expect_identical(record, run(*executor_, trace, config, {.record = RecordGroups::all()}, "split"), config.window(), "greedy split");
}

TEST_F(ExecutorTest, ExitsByThresholdKeepTheRules) {
  const Trace trace = shipped("exit-threshold");
  for (const char* rule : {"threshold:0.5", "threshold:0.9", "delayed:0.5"}) {
    for (const char* switches : {"t0s0q0", "t1s1q1"}) {
      const EffectiveConfig config = config_of({switches, EncodingPolicy::rolling, 64, rule});
      const RunRecord record = run(*executor_, trace, config);
      const harness::AuditResult result = harness::audit(record, trace, config, tiny());
      EXPECT_TRUE(result.clean()) << rule << ", " << switches << ": " << (result.clean() ? "" : result.findings.front().text);
      expect_identical(record, run(*executor_, trace, config, {.record = RecordGroups::all()}, "split"), config.window(), std::string(rule) + " split");
    }
  }
}

class CountingTap final : public Tap {
 public:
  void record(const TapPoint& point, std::span<const float> values) override {
    ++rows;
    if (point.operation == "linear.q_proj") widest = std::max(widest, values.size());
  }
  std::size_t rows = 0, widest = 0;
};

TEST_F(ExecutorTest, TapsChangeNothing) {
  const Trace trace = shipped("boundary-short");
  const EffectiveConfig config = config_of({"t1s1q1", EncodingPolicy::rolling, 64});
  const RunRecord without = run(*executor_, trace, config);
  CountingTap tap;
  RunOptions options{.record = RecordGroups::all()};
  options.tap = &tap;
  expect_identical(without, run(*executor_, trace, config, options), config.window(), "with taps");
  EXPECT_GT(tap.rows, 10000u);
  EXPECT_EQ(tap.widest, static_cast<std::size_t>(tiny().config.projection_width()));
}

TEST_F(ExecutorTest, LeavesNoMemoryBehind) {
  const Trace trace = shipped("four");
  static_cast<void>(run(*executor_, trace, config_of({"t0s0q0"})));  // the RoPE table grows once and stays with the weights
  const optimized::MemoryUsage idle = executor_->memory_usage();
  for (const Setting& setting : kSettings) {
    static_cast<void>(run(*executor_, trace, config_of(setting)));
    const optimized::MemoryUsage after = executor_->memory_usage();
    EXPECT_EQ(after.in_use, idle.in_use) << text(setting);
    EXPECT_EQ(after.live_buffers, idle.live_buffers) << text(setting);
    EXPECT_GT(after.total_peak, idle.total_in_use) << text(setting);
  }
}

// What the accounting model predicts is what the allocator counts, byte for byte, at the last committed token of a request.
TEST_F(ExecutorTest, MemoryEqualsThePrediction) {
  for (const char* name : {"flush-3", "kv-700"}) {
    const Trace trace = shipped(name);
    for (const Setting& setting : kSettings) {
      const EffectiveConfig config = config_of(setting);
      const RunRecord record = run(*executor_, trace, config);
      // All submissions but the last token's: the request is still live.
      Plan plan = harness::make_plan(harness::parse_mode("serial"), trace, config);
      plan.submissions.pop_back();
      executor_->begin(trace, config, {});
      for (const Submission& submission : plan.submissions) executor_->submit(submission);
      const optimized::MemoryUsage usage = executor_->memory_usage();
      static_cast<void>(executor_->finish());

      const RequestRecord& request = record.requests.front();
      harness::MemoryInput input;
      harness::RequestMemory memory;
      memory.prompt_length = request.prompt_length;
      memory.capacity = request.prompt_length + request.fed;
      memory.committed = memory.capacity - 1;
      memory.active = request.active;
      input.requests.push_back(memory);
      const harness::MemoryBytes predicted = harness::predict_memory(tiny().config, config, input).steady;
      const auto measured = [&](MemoryCategory category) { return static_cast<std::int64_t>(usage.in_use[static_cast<std::size_t>(category)]); };
      const std::string what = std::string(name) + ", " + text(setting);
      // Pages, tables and reference slots are allocated whole, so their padding is inside the allocator's category.
      std::int64_t kv = 0, padded = predicted.physical_of(MemoryCategory::padding);
      for (const MemoryCategory category : {MemoryCategory::base_payload, MemoryCategory::residual_payload, MemoryCategory::parameters}) {
        EXPECT_EQ(measured(category), predicted.physical_of(category)) << what << ", " << to_string(category);
      }
      for (const MemoryCategory category : {MemoryCategory::activity_maps, MemoryCategory::bf16_tail, MemoryCategory::bf16_planes,
                                            MemoryCategory::inherited_references, MemoryCategory::attention_reference_state}) {
        kv += measured(category);
        padded += predicted.physical_of(category);
      }
      EXPECT_EQ(kv, padded) << what << ", pages, tables and references";
      EXPECT_EQ(measured(MemoryCategory::hidden_rows), predicted.physical_of(MemoryCategory::hidden_rows)) << what;
      EXPECT_EQ(measured(MemoryCategory::weights), predicted.physical_of(MemoryCategory::weights)) << what;
    }
  }
}

// Logits rows of all layers of this small model are kept until its last layer; with taps, layer by layer, those of one are.
TEST_F(ExecutorTest, LayersThatAreSelectedTogetherTakeTheWorkspaceThatIsSaid) {
  const Trace trace = shipped("flush-3");
  const EffectiveConfig config = config_of({"t0s1q1"});
  Plan plan = harness::make_plan(harness::parse_mode("serial"), trace, config);
  plan.submissions.pop_back();
  const auto workspace = [&](Tap* tap) {
    RunOptions options;
    options.tap = tap;
    executor_->begin(trace, config, options);
    for (const Submission& submission : plan.submissions) executor_->submit(submission);
    const std::size_t bytes = executor_->memory_usage().in_use[static_cast<std::size_t>(MemoryCategory::workspace)];
    static_cast<void>(executor_->finish());
    return bytes;
  };
  CountingTap tap;
  const std::size_t layer_by_layer = workspace(&tap), together = workspace(nullptr);

  const ModelConfig& model = tiny().config;
  const optimized::KvShape shape{model.layers, model.heads, model.head_dim};
  const int stride = optimized::page_count(longest_sequence(trace)) * optimized::kPageTokens;
  const int group = optimized::reference_group_layers(shape, 1, stride);
  ASSERT_EQ(group, model.layers);
  const auto of_layers = [&](int layers) {  // logits, arrivals
    return static_cast<std::size_t>(layers) * static_cast<std::size_t>(model.heads) * (static_cast<std::size_t>(stride) + 1) * 4 +
           optimized::reference_statistics_workspace_bytes(shape, 1, layers);
  };
  EXPECT_EQ(together - layer_by_layer, of_layers(group) - of_layers(1));
}

// The K/V shape of Ouro-1.4B (24 layers, 16 heads of 128 channels) on a narrow model: what the allocator counts after a prompt of 8192
// tokens with everything on, tables and reference state included, against four BF16 planes of it.
TEST_F(ExecutorTest, APromptOf8192TakesAtMostOnePart5Point7OfFourPlanes) {
  constexpr int kPrompt = 8192;
  const Checkpoint narrow = narrow_ouro_1_4b();
  const ModelConfig& model = narrow.config;
  const Trace trace = long_prompt(kPrompt, model.vocab);
  const auto executor = optimized::make_cuda_executor(narrow);
  for (const EncodingPolicy policy : {EncodingPolicy::fixed_prompt, EncodingPolicy::rolling, EncodingPolicy::streaming}) {
    AlgorithmConfig algorithm;
    apply_switches(algorithm, "t1s1q1");
    algorithm.kv_residual_quantization.policy = policy;
    const EffectiveConfig config = EffectiveConfig::resolve(algorithm, narrow.config);
    Plan plan = harness::make_plan(harness::parse_mode("serial"), trace, config);
    plan.submissions.pop_back();  // the request is still live
    executor->begin(trace, config, {});
    for (const Submission& submission : plan.submissions) executor->submit(submission);
    const optimized::MemoryUsage usage = executor->memory_usage();
    static_cast<void>(executor->finish());

    std::size_t kv = 0;
    for (const MemoryCategory category :
         {MemoryCategory::base_payload, MemoryCategory::residual_payload, MemoryCategory::parameters, MemoryCategory::activity_maps,
          MemoryCategory::bf16_tail, MemoryCategory::bf16_planes, MemoryCategory::inherited_references, MemoryCategory::attention_reference_state})
      kv += usage.in_use[static_cast<std::size_t>(category)];
    const double planes = 4.0 * kPrompt * model.layers * model.heads * model.head_dim * 2 * sizeof(std::uint16_t);
    const double ratio = planes / static_cast<double>(kv);
    RecordProperty(std::string(to_string(policy)), std::to_string(kv) + " bytes, ratio " + std::to_string(ratio));
    std::printf("prompt of 8192, %s: %zu bytes of K/V, tables and reference state, four BF16 planes are %.3f times as much\n",
                std::string(to_string(policy)).c_str(), kv, ratio);
    EXPECT_GE(ratio, 5.7) << to_string(policy);
  }
}

TEST_F(ExecutorTest, OutOfMemoryIsAClearErrorAndTheExecutorStaysUsable) {
  const Trace small = shipped("boundary-short"), large = shipped("kv-700");
  const EffectiveConfig config = config_of({"t0s0q0"});
  static_cast<void>(run(*executor_, small, config));
  const std::size_t limit = executor_->memory_usage().total_peak + (8 << 20);
  const auto limited = optimized::make_cuda_executor(tiny(), {.memory_limit_bytes = limit});
  const RunRecord before = run(*limited, small, config);
  EXPECT_THROW(static_cast<void>(run(*limited, large, config)), optimized::DeviceMemoryError);
  expect_identical(before, run(*limited, small, config), config.window(), "after running out of memory");
}

TEST_F(ExecutorTest, UnsupportedRequestsSayWhat) {
  const Trace trace = shipped("boundary-short");
  const EffectiveConfig config = config_of({"t0s0q0"});
  RunOptions options;
  options.profile = Profile::reordered;
  EXPECT_THROW(executor_->begin(trace, config, options), UnsupportedError);
  const Trace no_depths = shipped("boundary-short");
  EXPECT_THROW(executor_->begin(no_depths, config_of({"t0s0q0", EncodingPolicy::rolling, 256, "trace"}), {}), ConfigError);
  Checkpoint odd = tiny();
  odd.config.head_dim = 96;
  EXPECT_THROW(static_cast<void>(optimized::make_cuda_executor(odd)), UnsupportedError);
}

TEST_F(ExecutorTest, EveryPlantedFaultShows) {
  const Trace trace = shipped("flush-3");
  const EffectiveConfig config = config_of({"t1s1q1", EncodingPolicy::rolling, 64});
  const auto acts = [&](Executor& executor, Fault fault) {
    RunOptions options{.record = RecordGroups::all()};
    const RunRecord sound = run(executor, trace, config, options);
    options.fault = fault;
    return !harness::compare_records(sound, run(executor, trace, config, options), config.window()).identical();
  };
  for (const FaultInfo& info : planted_faults()) {
    if (!info.in_optimized || !info.mode.empty() || info.fault == Fault::threshold_tie_by_arrival) continue;
    EXPECT_TRUE(acts(*executor_, info.fault)) << info.name;
  }
  // Logits of a trained model hardly ever tie; those of a head without keys all do.
  Checkpoint tied = tiny();
  for (LayerWeights& layer : tied.layers) std::fill_n(layer.k_proj.data.begin(), tied.config.head_dim * tied.config.hidden, Bfloat16Bits{0});
  const auto executor = optimized::make_cuda_executor(tied, {.poison = true});
  EXPECT_TRUE(acts(*executor, Fault::threshold_tie_by_arrival));
}

}  // namespace
}  // namespace loopgauge::test
