// SPDX-License-Identifier: Apache-2.0
// The CUDA executor as a whole: its records keep the specification's rules, repeat to the bit in any plan and any company, agree with the
// reference within its noise, and leave no memory behind.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <map>

#include "harness/compare/audit.hpp"
#include "harness/compare/memory_model.hpp"
#include "harness/compare/record_compare.hpp"
#include "harness/io/trace_file.hpp"
#include "harness/planner/planner.hpp"
#include "models/executor.hpp"
#include "reference/reference_executor.hpp"
#include "tests/equivalence/device_fixture.hpp"

namespace loopgauge::test {
namespace {

const std::filesystem::path kRoot = LOOPGAUGE_SOURCE_DIR;

const Checkpoint& tiny() {
  static const Checkpoint checkpoint = load_checkpoint(kRoot / "models/ouro-tiny");
  return checkpoint;
}

Trace shipped(const std::string& name) { return harness::read_trace(kRoot / "data/traces" / (name + ".h5")); }

struct Setting {
  std::string switches;
  EncodingPolicy policy = EncodingPolicy::rolling;
  int window = 256;
  std::string exit = "full";
};

EffectiveConfig config_of(const Setting& setting) {
  AlgorithmConfig config;
  apply_switches(config, setting.switches);
  config.kv_residual_quantization.policy = setting.policy;
  config.window = setting.window;
  config.exit = parse_exit_rule(setting.exit);
  return EffectiveConfig::resolve(config, tiny().config);
}

std::string text(const Setting& setting) {
  return setting.switches + ":" + std::string(to_string(setting.policy)) + ":w" + std::to_string(setting.window) + ":" + setting.exit;
}

const Setting kSettings[] = {
    {"t0s0q0"},
    {"t1s0q0", EncodingPolicy::rolling, 64},
    {"t0s1q0"},
    {"t1s1q0", EncodingPolicy::rolling, 64},
    {"t0s0q1"},
    {"t1s0q1", EncodingPolicy::fixed_prompt, 64},
    {"t0s1q1", EncodingPolicy::fixed_prompt},
    {"t1s1q1", EncodingPolicy::rolling, 64},
    {"t0s0q1", EncodingPolicy::streaming, 64},
    {"t1s1q1", EncodingPolicy::streaming, 64},
};

class ExecutorTest : public DeviceTest {
 protected:
  void SetUp() override {
    DeviceTest::SetUp();
    if (!IsSkipped()) executor_ = optimized::make_cuda_executor(tiny(), {.poison = true});
  }

  static RunRecord run(Executor& executor, const Trace& trace, const EffectiveConfig& config, RunOptions options = {.record = RecordGroups::all()},
                       const std::string& mode = "serial") {
    return replay(executor, harness::make_plan(harness::parse_mode(mode), trace, config), trace, config, options);
  }

  static void expect_identical(const RunRecord& expected, const RunRecord& actual, int window, const std::string& what) {
    const harness::RecordComparison comparison = harness::compare_records(expected, actual, window);
    EXPECT_TRUE(comparison.identical()) << what << ": " << (comparison.first ? comparison.first->text() : "nothing was compared");
  }

  std::unique_ptr<optimized::CudaExecutor> executor_;
};

// Relative Euclidean distance, pooled over tensors.
class Distance {
 public:
  void add(const Tensor<float>& expected, const Tensor<float>& actual) {
    ASSERT_EQ(expected.shape, actual.shape);
    for (std::size_t i = 0; i < expected.data.size(); ++i) {
      error_ += std::pow(double{actual.data[i]} - expected.data[i], 2);
      norm_ += std::pow(double{expected.data[i]}, 2);
    }
  }
  double value() const { return norm_ == 0.0 ? std::sqrt(error_) : std::sqrt(error_ / norm_); }

 private:
  double error_ = 0.0, norm_ = 0.0;
};

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

// With the reference's tokens and decisions the arithmetic alone differs. The yardstick is the reference's own second order of additions;
// half a BF16 spacing is granted beside it, because few roundings flip in short traces.
constexpr double kBfloat16Spacing = 1.0 / 512;

TEST_F(ExecutorTest, DecisionForcedRunsStayWithinTheNoiseOfTheReference) {
  const auto reference = reference::make_reference_executor(tiny());
  for (const char* name : {"four", "kv-700"}) {
    const Trace trace = shipped(name);
    for (const Setting& setting : kSettings) {
      const EffectiveConfig config = config_of(setting);
      const RunRecord expected = run(*reference, trace, config);
      RunOptions options{.record = RecordGroups::all()};
      options.decisions = &expected;
      const RunRecord actual = run(*executor_, trace, config, options);
      RunOptions other{.profile = Profile::reordered, .record = RecordGroups::all()};
      other.decisions = &expected;
      const RunRecord reordered = run(*reference, trace, config, other);
      std::map<std::string, Distance> measured, noise;
      for (std::size_t i = 0; i < trace.requests.size(); ++i) {
        const RequestRecord &e = expected.requests[i], &a = actual.requests[i], &r = reordered.requests[i];
        EXPECT_EQ(e.tokens, a.tokens);
        EXPECT_EQ(e.active, a.active) << name << ", " << text(setting);
        EXPECT_EQ(e.exit_depths, a.exit_depths);
        EXPECT_EQ(e.encoded_frontier, a.encoded_frontier) << name << ", " << text(setting);
        ASSERT_EQ(e.keys.size(), a.keys.size());
        for (std::size_t step = 0; step < e.keys.size(); ++step) {
          ASSERT_EQ(e.keys[step].layers.size(), a.keys[step].layers.size());
          for (std::size_t layer = 0; layer < e.keys[step].layers.size(); ++layer) {
            EXPECT_EQ(e.keys[step].layers[layer].data, a.keys[step].layers[layer].data) << name << ", " << text(setting) << ", step " << step;
          }
        }
        ASSERT_EQ(e.blocks.size(), a.blocks.size()) << name << ", " << text(setting);
        for (std::size_t block = 0; block < e.blocks.size(); ++block) {
          EXPECT_EQ(e.blocks[block].positions, a.blocks[block].positions);
          for (std::size_t stream = 0; stream < kLoops; ++stream) EXPECT_EQ(e.blocks[block].streams[stream].rows, a.blocks[block].streams[stream].rows);
        }
        for (std::size_t loop = 0; loop < kLoops; ++loop) {
          const std::string what = "hidden of loop " + std::to_string(loop + 1);
          measured[what].add(e.hidden[loop], a.hidden[loop]);
          noise[what].add(e.hidden[loop], r.hidden[loop]);
        }
        measured["logits"].add(e.logits, a.logits);
        noise["logits"].add(e.logits, r.logits);
        for (std::size_t plane = 0; plane < e.kv.size(); ++plane) {
          const std::string what = " of loop " + std::to_string(plane % kLoops + 1);
          measured["k" + what].add(e.kv[plane].k, a.kv[plane].k);
          noise["k" + what].add(e.kv[plane].k, r.kv[plane].k);
          measured["v" + what].add(e.kv[plane].v, a.kv[plane].v);
          noise["v" + what].add(e.kv[plane].v, r.kv[plane].v);
        }
      }
      for (const auto& [what, distance] : measured) {
        EXPECT_LE(distance.value(), 1.5 * noise[what].value() + kBfloat16Spacing)
            << name << ", " << text(setting) << ", " << what << ", reordered reference " << noise[what].value();
        std::printf("  %-9s %-34s %-16s %.2e, reordered reference %.2e\n", name, text(setting).c_str(), what.c_str(), distance.value(), noise[what].value());
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
  for (const FaultInfo& info : planted_faults()) {
    const EffectiveConfig config = config_of({"t1s1q1", EncodingPolicy::rolling, 64});
    const RunRecord sound = run(*executor_, trace, config);
    RunOptions options{.record = RecordGroups::all()};
    options.fault = info.fault;
    const RunRecord faulty = run(*executor_, trace, config, options);
    EXPECT_FALSE(harness::compare_records(sound, faulty, config.window()).identical()) << info.name;
  }
}

}  // namespace
}  // namespace loopgauge::test
