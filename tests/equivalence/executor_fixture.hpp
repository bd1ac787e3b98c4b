// SPDX-License-Identifier: Apache-2.0
// Common ground of the tests that run whole traces on the device.
#pragma once

#include <unistd.h>

#include <filesystem>
#include <memory>
#include <string>

#include "harness/compare/record_compare.hpp"
#include "harness/io/checkpoint_writer.hpp"
#include "harness/io/synthetic_checkpoint.hpp"
#include "harness/io/trace_file.hpp"
#include "harness/planner/planner.hpp"
#include "models/executor.hpp"
#include "tests/equivalence/device_fixture.hpp"

namespace loopgauge::test {

inline const std::filesystem::path kRoot = LOOPGAUGE_SOURCE_DIR;

inline const Checkpoint& tiny() {
  static const Checkpoint checkpoint = load_checkpoint(kRoot / "models/ouro-tiny");
  return checkpoint;
}

inline Trace shipped(const std::string& name) { return harness::read_trace(kRoot / "data/traces" / (name + ".h5")); }

// The K/V shape of Ouro-1.4B, 24 layers with 16 heads of 128 channels, around hidden rows of 64 channels: what K/V takes, without the time of the rest.
inline Checkpoint narrow_ouro_1_4b() {
  ModelConfig model = harness::preset_config("ouro-1.4b");
  model.hidden = 64, model.intermediate = 128, model.vocab = 256;
  const std::filesystem::path folder = std::filesystem::path(::testing::TempDir()) / ("loopgauge-narrow-" + std::to_string(getpid()));
  harness::write_checkpoint(folder, model, harness::synthetic_values(model, {.seed = 3}), {});
  Checkpoint narrow = load_checkpoint(folder);
  std::filesystem::remove_all(folder);
  return narrow;
}

// One request with that prompt and one new token.
inline Trace long_prompt(int length, int vocab) {
  Trace trace;
  trace.name = "long-prompt";
  trace.vocab_size = vocab;
  TraceRequest request;
  for (int i = 0; i < length; ++i) request.prompt.push_back(static_cast<std::int32_t>((i * 37 + i / 91) % 251));
  request.max_new_tokens = 1;
  request.forced = {1};
  trace.requests.push_back(request);
  return trace;
}

struct Setting {
  std::string switches;
  EncodingPolicy policy = EncodingPolicy::rolling;
  int window = 256;
  std::string exit = "full";
};

inline EffectiveConfig config_of(const Setting& setting) {
  AlgorithmConfig config;
  apply_switches(config, setting.switches);
  config.kv_residual_quantization.policy = setting.policy;
  config.window = setting.window;
  config.exit = parse_exit_rule(setting.exit);
  return EffectiveConfig::resolve(config, tiny().config);
}

inline std::string text(const Setting& setting) {
  return setting.switches + ":" + std::string(to_string(setting.policy)) + ":w" + std::to_string(setting.window) + ":" + setting.exit;
}

inline const Setting kSettings[] = {
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

}  // namespace loopgauge::test
