// SPDX-License-Identifier: Apache-2.0
// Execution modes of the CUDA executor: whatever is regrouped, overlapped or replayed, the record has the bits of the serial run, nothing is
// read to prepare a submission in asynchronous execution, and nothing is held at the end.
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <random>
#include <utility>

#include "models/error.hpp"
#include "optimized/kv/kv_cache.hpp"
#include "optimized/ops/prepare_rows.cuh"
#include "tests/equivalence/executor_fixture.hpp"

namespace loopgauge::test {
namespace {

class ExecutionModesTest : public ExecutorTest {
 protected:
  // Every group of the record, the executions of every row, and what was held at the end.
  static void expect_same_run(const RunRecord& expected, const RunRecord& actual, int window, const std::string& what) {
    expect_identical(expected, actual, window, what);
    for (std::size_t i = 0; i < expected.requests.size(); ++i) {
      EXPECT_EQ(expected.requests[i].executions, actual.requests[i].executions) << what << ", request " << i;
    }
    EXPECT_EQ(describe(actual.held_at_drain), "") << what;
    EXPECT_EQ(actual.counters.recomputed_rows, 0) << what;
  }

  static RunRecord run_in_flight(Executor& executor, const Trace& trace, const EffectiveConfig& config, int in_flight, const std::string& mode = "serial") {
    Plan plan = harness::make_plan(harness::parse_mode(mode), trace, config);
    plan.submissions_in_flight = in_flight;
    return replay(executor, plan, trace, config, {.record = RecordGroups::all()});
  }
};

TEST_F(ExecutionModesTest, RegroupedPlansHaveTheBitsOfTheSerialRun) {
  for (const char* name : {"four", "boundary-short"}) {
    const Trace trace = shipped(name);
    for (const Setting& setting : kSettings) {
      const EffectiveConfig config = config_of(setting);
      const RunRecord serial = run(*executor_, trace, config);
      EXPECT_EQ(describe(serial.held_at_drain), "") << text(setting);
      for (const char* mode : {"mixed.b64", "wcpb", "split.p23"}) {
        const RunRecord actual = run(*executor_, trace, config, {.record = RecordGroups::all()}, mode);
        expect_same_run(serial, actual, config.window(), std::string(name) + " " + mode + ", " + text(setting));
        EXPECT_EQ(actual.counters.executed_rows, serial.counters.executed_rows) << mode;
        EXPECT_EQ(actual.counters.most_in_flight, 1) << mode;
      }
    }
  }
}

// Windows of one item that go through a loop together, as many as a step has room for, and under `streaming` one after the other; whether the item has one
// loop, beside items at other loops, or all of them.
TEST_F(ExecutionModesTest, WindowsOfOneItemHaveTheBitsOfTheSerialRun) {
  Checkpoint checkpoint = tiny();
  checkpoint.config.max_positions = 4096;
  const auto executor = optimized::make_cuda_executor(checkpoint, {.prefill_step_rows = 2048, .poison = true});
  const Trace trace = long_prompt(2331, checkpoint.config.vocab);
  for (const Setting& setting : kSettings) {
    const EffectiveConfig config = config_of(setting);
    const Plan serial_plan = harness::make_plan(harness::parse_mode("serial"), trace, config);
    const RunRecord serial = replay(*executor, serial_plan, trace, config, {.record = RecordGroups::all()});
    for (const char* mode : {"wcpb.c3", "wcpb.c40+async"}) {
      expect_same_run(serial, run(*executor, trace, config, {.record = RecordGroups::all()}, mode), config.window(), std::string(mode) + ", " + text(setting));
    }
    Plan whole = serial_plan;
    while (whole.submissions.size() > 1 && whole.submissions[1].items.front().kind == RowKind::prefill) {
      whole.submissions.front().items.front().end = whole.submissions[1].items.front().end;
      whole.submissions.erase(whole.submissions.begin() + 1);
    }
    EXPECT_EQ(plan_fault(whole, trace, config), "");
    EXPECT_EQ(whole.submissions.front().items.front().end, trace.requests.front().prompt_length());
    expect_same_run(serial, replay(*executor, whole, trace, config, {.record = RecordGroups::all()}), config.window(), "one item, " + text(setting));
  }
}

// One layer with the extents from which projections go through the library (LinearImplementation::automatic).
Checkpoint wide_checkpoint() {
  constexpr int kWide = 2048;
  Checkpoint c;
  c.config.layers = 1, c.config.loops = kLoops, c.config.hidden = kWide, c.config.heads = 16, c.config.head_dim = 128;
  c.config.intermediate = kWide, c.config.vocab = kWide, c.config.max_positions = 1024;
  c.config.rms_norm_eps = 1e-6f, c.config.rope_theta = 1e6;
  c.sha256 = std::string(64, '8');
  std::mt19937 generator(11);
  const auto fill = [&](std::vector<std::int64_t> shape, float scale, float offset = 0.0f) {
    std::normal_distribution<float> normal(offset, scale);
    Tensor<Bfloat16Bits> tensor(std::move(shape));
    for (Bfloat16Bits& word : tensor.data)
      word = static_cast<Bfloat16Bits>(std::bit_cast<std::uint32_t>(reference::round_to_bfloat16(normal(generator))) >> 16);
    return tensor;
  };
  const auto linear = [&] { return fill({kWide, kWide}, 1.0f / std::sqrt(static_cast<float>(kWide))); };
  const auto norm = [&] { return fill({kWide}, 0.1f, 1.0f); };
  c.embed_tokens = fill({kWide, kWide}, 1.0f);
  LayerWeights w;
  for (auto* weights : {&w.q_proj, &w.k_proj, &w.v_proj, &w.o_proj, &w.gate_proj, &w.up_proj, &w.down_proj}) *weights = linear();
  for (auto* weights : {&w.input_layernorm, &w.input_layernorm_2, &w.post_attention_layernorm, &w.post_attention_layernorm_2}) *weights = norm();
  c.layers.push_back(std::move(w));
  c.norm = norm();
  c.early_exit_gate = fill({1, kWide}, 0.005f);
  c.early_exit_bias = fill({1}, 0.1f);
  c.lm_head = linear();
  return c;
}

TEST_F(ExecutionModesTest, AWideModelKeepsItsBitsWithEveryProduct) {
  const Checkpoint checkpoint = wide_checkpoint();
  Trace trace;
  trace.name = "wide";
  trace.vocab_size = checkpoint.config.vocab;
  std::mt19937 generator(3);
  for (const auto& [prompt, fed] : {std::pair{9, 12}, std::pair{150, 5}, std::pair{70, 3}}) {
    TraceRequest request;
    request.id = static_cast<int>(trace.requests.size());
    for (int i = 0; i < prompt; ++i) request.prompt.push_back(static_cast<std::int32_t>(generator() % 2048));
    for (int i = 0; i < fed; ++i) request.forced.push_back(static_cast<std::int32_t>(generator() % 2048));
    request.max_new_tokens = fed;
    trace.requests.push_back(std::move(request));
  }
  using optimized::LinearImplementation;
  for (const LinearImplementation linear : {LinearImplementation::automatic, LinearImplementation::tensor_core_tiles, LinearImplementation::split_k}) {
    const auto executor = optimized::make_cuda_executor(checkpoint, {.linear = linear, .poison = true});
    for (const Setting& setting : {Setting{"t0s0q0", EncodingPolicy::rolling, 64}, Setting{"t1s1q1", EncodingPolicy::rolling, 64}}) {
      AlgorithmConfig algorithm;
      apply_switches(algorithm, setting.switches);
      algorithm.window = setting.window;
      const EffectiveConfig config = EffectiveConfig::resolve(algorithm, checkpoint.config);
      const RunRecord serial = run(*executor, trace, config);
      for (const char* mode : {"mixed.b40", "split.p23", "wcpb", "wcpb.c2", "mixed.b64+graph"}) {
        expect_same_run(serial, run(*executor, trace, config, {.record = RecordGroups::all()}, mode), config.window(),
                        std::string(mode) + ", " + text(setting) + ", product " + std::to_string(static_cast<int>(linear)));
      }
    }
  }
}

TEST_F(ExecutionModesTest, SubmissionsInFlightChangeNoBitAndReadNothingToPrepareOne) {
  for (const char* name : {"four", "greedy"}) {
    const Trace trace = shipped(name);
    for (const Setting& setting : kSettings) {
      const EffectiveConfig config = config_of(setting);
      const RunRecord serial = run(*executor_, trace, config);
      const std::pair<const char*, int> overlaps[] = {{"serial", 2}, {"split.p23", 2}, {"mixed", 3}, {"wcpb", 2}};
      for (const auto& [mode, in_flight] : overlaps) {
        const std::string what = std::string(name) + " " + mode + ", " + std::to_string(in_flight) + " in flight, " + text(setting);
        const RunRecord actual = run_in_flight(*executor_, trace, config, in_flight, mode);
        expect_same_run(serial, actual, config.window(), what);
        EXPECT_EQ(actual.counters.host_reads, 0) << what;
        EXPECT_EQ(actual.counters.most_in_flight, in_flight) << what;
        EXPECT_EQ(actual.counters.executed_rows - actual.counters.discarded_rows, serial.counters.executed_rows) << what;
      }
    }
  }
}

// The end of the sequence is read after the rows behind it were issued: they run, and are part of nothing.
TEST_F(ExecutionModesTest, RowsPastAnEndThatIsReadLateAreDiscarded) {
  Trace trace = shipped("greedy");
  for (const Setting& setting : kSettings) {
    const EffectiveConfig config = config_of(setting);
    for (TraceRequest& request : trace.requests) request.eos_token_id = -1;
    const RunRecord endless = run(*executor_, trace, config);
    std::int64_t early_ends = 0;
    for (std::size_t i = 0; i < trace.requests.size(); ++i) {
      const auto& tokens = endless.requests[i].tokens;
      if (trace.requests[i].teacher_forced() || tokens.size() < 4) continue;
      trace.requests[i].eos_token_id = tokens[tokens.size() / 2];
      early_ends += std::find(tokens.begin(), tokens.end(), trace.requests[i].eos_token_id) < tokens.end() - 2;
    }
    ASSERT_GT(early_ends, 0) << "the trace has no request that an end-of-sequence token can cut";
    const RunRecord serial = run(*executor_, trace, config);
    for (const int in_flight : {2, 3}) {
      const RunRecord actual = run_in_flight(*executor_, trace, config, in_flight);
      expect_same_run(serial, actual, config.window(), text(setting) + ", " + std::to_string(in_flight) + " in flight");
      EXPECT_GE(actual.counters.discarded_rows, early_ends * kLoops) << text(setting);
      EXPECT_EQ(actual.counters.executed_rows - actual.counters.discarded_rows, serial.counters.executed_rows) << text(setting);
    }
  }
}

// Whoever reads the embedding of one token meets NaN. It is the token that ends the sequence, so only a row past the end does.
TEST_F(ExecutionModesTest, AnErrorPastTheEndIsDroppedWithItsRowAndAnyOtherSurfaces) {
  Trace trace = shipped("greedy");
  trace.requests = {trace.requests.at(1)};
  TraceRequest& request = trace.requests.front();
  for (const char* switches : {"t0s0q0", "t1s1q1"}) {
    const EffectiveConfig config = config_of({switches, EncodingPolicy::rolling, 64});
    request.eos_token_id = -1;
    const RunRecord endless = run(*executor_, trace, config);
    const std::vector<std::int32_t>& tokens = endless.requests.front().tokens;
    const auto fresh = std::find_if(tokens.begin(), tokens.end() - 3, [&](std::int32_t token) {
      return std::find(request.prompt.begin(), request.prompt.end(), token) == request.prompt.end();
    });
    ASSERT_NE(fresh, tokens.end() - 3) << "no generated token is absent from the prompt";
    Checkpoint checkpoint = tiny();
    std::ranges::fill(checkpoint.embed_tokens.row(*fresh), Bfloat16Bits{0x7FC0});
    const auto poisoned = optimized::make_cuda_executor(checkpoint, {.poison = true});
    for (const int in_flight : {1, 2, 3}) {
      EXPECT_THROW(static_cast<void>(run_in_flight(*poisoned, trace, config, in_flight)), NumericError) << switches << ", " << in_flight << " in flight";
    }
    request.eos_token_id = *fresh;
    const RunRecord serial = run(*executor_, trace, config);
    for (const int in_flight : {2, 3}) {
      RunRecord actual = run_in_flight(*poisoned, trace, config, in_flight);
      EXPECT_GE(actual.counters.discarded_rows, kLoops) << switches;
      expect_same_run(serial, actual, config.window(), std::string(switches) + ", " + std::to_string(in_flight) + " in flight");
    }
  }
}

TEST_F(ExecutionModesTest, ExitsThatAreKnownLateMaskTheirRowsOnTheDevice) {
  for (const char* rule : {"delayed:0.5", "delayed:0.9", "trace"}) {
    Trace trace = shipped(std::string(rule) == "trace" ? "exit-depths" : "exit-threshold");
    for (TraceRequest& request : trace.requests) {
      // Enough rows to leave after every loop, and over a boundary of 64 positions.
      request.max_new_tokens = std::min(request.max_new_tokens, 40);
      if (request.teacher_forced()) request.forced.resize(static_cast<std::size_t>(request.max_new_tokens));
      if (!request.exit_depths.empty()) request.exit_depths.resize(static_cast<std::size_t>(request.max_new_tokens));
    }
    for (const Setting& base : {Setting{"t0s0q0"}, Setting{"t1s1q0"}, Setting{"t1s1q1", EncodingPolicy::rolling, 64}}) {
      Setting setting = base;
      setting.exit = rule;
      const EffectiveConfig config = config_of(setting);
      const RunRecord serial = run(*executor_, trace, config);
      for (const char* mode : {"mixed+async", "graph", "async+graph"}) {
        const RunRecord actual = run(*executor_, trace, config, {.record = RecordGroups::all()}, mode);
        const std::string what = std::string(mode) + ", " + text(setting);
        expect_same_run(serial, actual, config.window(), what);
        EXPECT_EQ(actual.counters.executed_rows - actual.counters.discarded_rows, serial.counters.executed_rows) << what;
        EXPECT_EQ(actual.counters.unused_statistics_rows, serial.counters.unused_statistics_rows) << what;
        if (std::string(mode).find("async") != std::string::npos) {
          EXPECT_EQ(actual.counters.host_reads, 0) << what;
        }
      }
    }
  }
}

// A threshold is read between two loops, which a replay of one loop leaves room for.
TEST_F(ExecutionModesTest, ThresholdExitsBetweenReplays) {
  Trace trace = shipped("exit-threshold");
  for (TraceRequest& request : trace.requests) {
    request.max_new_tokens = std::min(request.max_new_tokens, 40);
    request.forced.resize(static_cast<std::size_t>(request.max_new_tokens));
  }
  const EffectiveConfig config = config_of({"t1s1q1", EncodingPolicy::rolling, 64, "threshold:0.5"});
  const RunRecord serial = run(*executor_, trace, config);
  const RunRecord replayed = run(*executor_, trace, config, {.record = RecordGroups::all()}, "graph");
  expect_same_run(serial, replayed, config.window(), "graph");
  EXPECT_EQ(replayed.counters.unused_statistics_rows, serial.counters.unused_statistics_rows);
  EXPECT_EQ(replayed.counters.host_reads, serial.counters.host_reads);
  EXPECT_GT(replayed.counters.graph_replays, replayed.counters.graph_fallbacks);
}

TEST_F(ExecutionModesTest, ReplayedStepsHaveTheBitsOfEagerOnes) {
  for (const char* name : {"four", "greedy"}) {
    const Trace trace = shipped(name);
    for (const Setting& setting : kSettings) {
      const EffectiveConfig config = config_of(setting);
      const RunRecord serial = run(*executor_, trace, config);
      for (const char* mode : {"graph", "async+graph", "mixed+graph", "wcpb+async+graph"}) {
        const std::string what = std::string(name) + " " + mode + ", " + text(setting);
        const RunRecord actual = run(*executor_, trace, config, {.record = RecordGroups::all()}, mode);
        expect_same_run(serial, actual, config.window(), what);
        EXPECT_GT(actual.counters.graph_captures, 0) << what;
        EXPECT_GE(actual.counters.graph_replays, actual.counters.graph_captures) << what;
        if (actual.counters.graph_fallbacks > actual.counters.graph_replays) {
          // Only steps that hold prompt rows as well may run eagerly that often.
          EXPECT_TRUE(std::string(mode).starts_with("mixed") || std::string(mode).starts_with("wcpb")) << what;
        }
      }
    }
  }
}

TEST_F(ExecutionModesTest, CombinationsThatCannotBeAreRefused) {
  const Trace exits = shipped("exit-threshold"), greedy = shipped("greedy");
  RunOptions options;
  options.submissions_in_flight = 2;
  EXPECT_THROW(executor_->begin(exits, config_of({"t0s0q0", EncodingPolicy::rolling, 256, "threshold:0.5"}), options), UnsupportedError);
  options.submissions_in_flight = 0;
  EXPECT_THROW(executor_->begin(greedy, config_of({"t0s0q0"}), options), ConfigError);
  options.submissions_in_flight = 4;
  AlgorithmConfig config;
  apply_switches(config, "t0s0q1");
  config.kv_residual_quantization.tail = 1;
  EXPECT_THROW(executor_->begin(greedy, EffectiveConfig::resolve(config, tiny().config), options), UnsupportedError);
}

// A row that needs nothing of the device, one from a selection, one whose token the device chose, one that has ended, one of padding.
TEST_F(ExecutionModesTest, RowsArePreparedFromWhatOnlyTheDeviceKnows) {
  using optimized::ExitState, optimized::QueryRow, optimized::RowSource;
  const optimized::KvShape shape{1, 1, 64};
  optimized::KvCache kv(shape, allocator_, *stream_);
  for (int slot = 0; slot < 3; ++slot) ASSERT_EQ(kv.open_request(200), slot);
  kv.upload();
  const auto selection = upload(std::vector<std::int32_t>{64, 70, 131});
  const auto chosen = upload(std::vector<std::int32_t>{11, 22, 33});
  auto exits = upload(std::vector<ExitState>{{0.5f, 2, 1, 0}, {0.5f, 2, 1, 0}, {0.5f, 4, 1, 0}});
  std::vector<RowSource> sources(5);
  sources[0] = {.request = 0, .position = 130, .loop = 1, .reference = 5, .origin = 130, .last_loop = 3, .gate_decides = 1};  // starts over
  sources[1] = {.request = 1, .position = 140, .loop = 3, .origin = 139};                                                     // has ended after loop 2
  sources[2] = {};                                                                                                            // padding
  sources[3] = {.request = 2, .position = 150, .loop = 2, .encoded_frontier = 64, .reference = 1, .origin = 148};
  sources[4] = {.request = 0, .position = 2, .loop = 4, .origin = 128, .positions = selection.as<std::int32_t>()};
  const auto rows_in = upload(sources);
  auto rows = poisoned<QueryRow>(5), dense = poisoned<QueryRow>(4), reference = poisoned<QueryRow>(4), corrected = poisoned<QueryRow>(4);
  auto positions = poisoned<std::int32_t>(5), tokens = poisoned<std::int32_t>(5), from = poisoned<std::int32_t>(5), to = poisoned<std::int32_t>(5);
  optimized::PrepareRowsArguments arguments;
  arguments.kv = kv.view();
  arguments.sources = rows_in.as<RowSource>();
  arguments.count = 5;
  arguments.decode_rows = 4;
  arguments.sparse_decode = true;
  arguments.exits = exits.as<ExitState>();
  arguments.chosen_tokens = chosen.as<std::int32_t>();
  arguments.rows = rows.as<QueryRow>();
  arguments.positions = positions.as<std::int32_t>();
  arguments.tokens = tokens.as<std::int32_t>();
  arguments.sources_of_states = from.as<std::int32_t>();
  arguments.targets_of_states = to.as<std::int32_t>();
  arguments.dense = dense.as<QueryRow>();
  arguments.at_reference = reference.as<QueryRow>();
  arguments.corrected = corrected.as<QueryRow>();
  optimized::prepare_rows(arguments, *stream_);

  using Numbers = std::vector<std::int32_t>;
  const auto requests = [&](const optimized::DeviceBuffer& buffer, std::size_t count) {
    Numbers numbers;
    for (const QueryRow& row : download<QueryRow>(buffer, count)) numbers.push_back(row.request);
    return numbers;
  };
  EXPECT_EQ(requests(rows, 5), (Numbers{0, -1, -1, 2, 0}));
  EXPECT_EQ(requests(dense, 4), (Numbers{0, -1, -1, -1}));
  EXPECT_EQ(requests(reference, 4), (Numbers{-1, -1, -1, 2}));
  EXPECT_EQ(requests(corrected, 4), (Numbers{-1, -1, -1, -1}));
  EXPECT_EQ(download<std::int32_t>(positions, 5), (Numbers{130, 140, 0, 150, 131}));
  EXPECT_EQ(download<std::int32_t>(tokens, 5), (Numbers{11, -1, -1, -1, -1}));
  EXPECT_EQ(download<std::int32_t>(from, 5), (Numbers{-1, -1, -1, 2, 3}));
  EXPECT_EQ(download<std::int32_t>(to, 5), (Numbers{0, -1, -1, 2, 3}));
  const ExitState started = download<ExitState>(exits, 1).front();
  EXPECT_EQ(started.survival, 1.0f);
  EXPECT_EQ(started.last_loop, 3);
  for (int slot = 0; slot < 3; ++slot) {
    kv.read_maps(slot);
    const optimized::ActivityMap& map = kv.maps(slot)[2];
    // Page 2 starts at position 128.
    const std::array<std::uint64_t, kLoops> expected{slot == 0 ? 1ull << 2 : 0, slot == 2 ? 1ull << 22 : 0, 0, slot == 0 ? 1ull << 3 : 0};
    for (std::size_t loop = 0; loop < kLoops; ++loop) EXPECT_EQ(map.active[loop], expected[loop]) << "slot " << slot << ", loop " << loop + 1;
  }
}

}  // namespace
}  // namespace loopgauge::test
