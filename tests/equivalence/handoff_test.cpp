// SPDX-License-Identifier: Apache-2.0
// Handoffs of the CUDA executor: whatever is decoded after one has the bits of the same executor without it, the regions are those of the
// reference's layout, and nothing that is incomplete or damaged is activated.
#include "harness/handoff/handoff_executor.hpp"

#include <algorithm>
#include <cstdio>
#include <map>

#include "harness/handoff/local_transport.hpp"
#include "models/error.hpp"
#include "optimized/device_copies.hpp"
#include "optimized/kv/region_copy.cuh"
#include "reference/reference_executor.hpp"
#include "tests/equivalence/executor_fixture.hpp"

namespace loopgauge::test {
namespace {

// Partitions small enough that regions are cut in several, and that what is exported waits for room.
constexpr harness::HandoffLimits kSmall{.partition_bytes = 10000, .bytes_in_flight = 25000, .export_bytes = 30000};

constexpr Setting kAllPolicies[] = {
    {"t0s0q0"},
    {"t1s0q0", EncodingPolicy::rolling, 64},
    {"t0s1q0"},
    {"t1s1q0", EncodingPolicy::rolling, 128},
    {"t0s0q1"},
    {"t1s0q1", EncodingPolicy::rolling, 128},
    {"t0s1q1", EncodingPolicy::rolling, 64},
    {"t1s1q1", EncodingPolicy::rolling, 64},
    {"t0s0q1", EncodingPolicy::fixed_prompt},
    {"t1s0q1", EncodingPolicy::fixed_prompt, 64},
    {"t0s1q1", EncodingPolicy::fixed_prompt, 128},
    {"t1s1q1", EncodingPolicy::fixed_prompt, 64},
    {"t0s0q1", EncodingPolicy::streaming, 64},
    {"t1s0q1", EncodingPolicy::streaming, 128},
    {"t0s1q1", EncodingPolicy::streaming, 64},
    {"t1s1q1", EncodingPolicy::streaming, 64},
};

std::unique_ptr<Executor> make_cuda(int device = 0) { return optimized::make_cuda_executor(tiny(), {.device = device, .poison = true}); }

class CudaHandoffTest : public ExecutorTest {
 protected:
  static std::unique_ptr<optimized::CudaExecutor> executor_of(const Checkpoint& checkpoint, int device = 0) {
    return optimized::make_cuda_executor(checkpoint, {.device = device});
  }
  void SetUp() override {
    ExecutorTest::SetUp();
    if (IsSkipped()) return;
    over_host_ = harness::make_handoff_executor([] { return make_cuda(); }, harness::make_host_transport, kSmall);
    over_device_ = harness::make_handoff_executor([] { return make_cuda(); }, harness::make_device_transport, kSmall);
  }

  void expect_handed(const RunRecord& whole, const RunRecord& handed, const EffectiveConfig& config, const std::string& what) {
    expect_identical(whole, handed, config.window(), what);
    for (std::size_t i = 0; i < whole.requests.size(); ++i) {
      EXPECT_EQ(whole.requests[i].executions, handed.requests[i].executions) << what << ", request " << i;
      EXPECT_EQ(whole.requests[i].tokens, handed.requests[i].tokens) << what << ", request " << i;
    }
    EXPECT_EQ(handed.counters.executed_rows - handed.counters.discarded_rows - handed.counters.rejected_rows, whole.counters.executed_rows) << what;
    EXPECT_EQ(describe(handed.held_at_drain), "") << what;
    EXPECT_EQ(handed.handoffs.size(), whole.requests.size()) << what;
    for (const HandoffRecord& handoff : handed.handoffs) {
      EXPECT_EQ(handoff.outcome, "handed over") << what;
      EXPECT_LE(handoff.most_bytes_in_flight, 25000) << what;
      EXPECT_GE(handoff.partitions * 10000, handoff.bytes) << what;
    }
  }

  std::unique_ptr<Executor> over_host_, over_device_;
};

TEST_F(CudaHandoffTest, DecodingAfterItHasTheBitsOfDecodingWithoutIt) {
  for (const char* name : {"four", "greedy"}) {
    const Trace trace = shipped(name);
    for (const Setting& setting : kAllPolicies) {
      const EffectiveConfig config = config_of(setting);
      const RunRecord whole = run(*executor_, trace, config);
      for (const auto& [transport, executor] : {std::pair{"host", over_host_.get()}, {"device", over_device_.get()}}) {
        const std::string what = std::string(name) + ", " + text(setting) + " over " + transport;
        const RunRecord handed = run(*executor, trace, config, {.record = RecordGroups::all()}, "pd");
        expect_handed(whole, handed, config, what);
        for (const HandoffRecord& handoff : handed.handoffs) EXPECT_EQ(handoff.transport, transport) << what;
      }
    }
  }
}

TEST_F(CudaHandoffTest, EveryScheduleAndModifierGivesTheSame) {
  const Trace trace = shipped("four");
  for (const Setting& setting : kAllPolicies) {
    const EffectiveConfig config = config_of(setting);
    const RunRecord whole = run(*executor_, trace, config);
    const bool encoded = config.q().enabled && config.q().policy == EncodingPolicy::streaming;
    for (const char* mode : {"split.p23+pd", "wcpb+pd+async", "mixed.b64+pd+async+graph", encoded ? "wcpb+prefix.encoded+pd" : "wcpb+prefix+pd"}) {
      const std::string what = std::string(mode) + ", " + text(setting);
      const RunRecord handed = run(*over_device_, trace, config, {.record = RecordGroups::all()}, mode);
      expect_handed(whole, handed, config, what);
      const bool async = std::string(mode).find("async") != std::string::npos;
      EXPECT_LE(handed.counters.most_in_flight, async ? 2 : 1) << what;
      if (async) {
        EXPECT_EQ(handed.counters.host_reads, 0) << what;
      }
    }
  }
}

TEST_F(CudaHandoffTest, SpeculationAfterItCommitsTheBitsOfASerialRun) {
  for (const char* name : {"spec-flush", "greedy"}) {
    Trace trace = shipped(name);
    for (const Setting& setting : kAllPolicies) {
      const EffectiveConfig config = config_of(setting);
      const RunRecord whole = run(*executor_, trace, config);
      const RunRecord handed = run(*over_device_, trace, config, {.record = RecordGroups::all()}, "block_spec.d2.k4+pd");
      expect_handed(whole, handed, config, std::string(name) + ", " + text(setting));
      EXPECT_GT(handed.counters.speculation_rounds, 0) << name << ", " << text(setting);
    }
  }
}

TEST_F(CudaHandoffTest, WindowsThatWereReusedAreHandedOffLikeOthers) {
  const Trace trace = shipped("shared-prefix");
  for (const Setting& setting : {Setting{"t1s1q0", EncodingPolicy::rolling, 64}, Setting{"t1s1q1", EncodingPolicy::rolling, 64}}) {
    const EffectiveConfig config = config_of(setting);
    const RunRecord whole = run(*executor_, trace, config);
    const RunRecord handed = run(*over_device_, trace, config, {.record = RecordGroups::all()}, "prefix+pd");
    EXPECT_GT(handed.counters.reused_windows, 0) << text(setting);
    expect_identical(whole, handed, config.window(), text(setting));
    EXPECT_EQ(describe(handed.held_at_drain), "") << text(setting);
  }
}

TEST_F(CudaHandoffTest, ExitsAfterItAreThoseWithoutIt) {
  for (const char* rule : {"threshold:0.5", "delayed:0.5", "trace"}) {
    Trace trace = shipped(std::string(rule) == "trace" ? "exit-depths" : "exit-threshold");
    for (TraceRequest& request : trace.requests) {
      request.max_new_tokens = std::min(request.max_new_tokens, 40);
      if (request.teacher_forced()) request.forced.resize(static_cast<std::size_t>(request.max_new_tokens));
      if (!request.exit_depths.empty()) request.exit_depths.resize(static_cast<std::size_t>(request.max_new_tokens));
    }
    for (const char* switches : {"t0s0q0", "t1s1q0", "t1s1q1"}) {
      const EffectiveConfig config = config_of({switches, EncodingPolicy::rolling, 64, rule});
      const RunRecord whole = run(*executor_, trace, config);
      for (const char* mode : {"pd", "mixed+pd+async"}) {
        if (std::string(rule).starts_with("threshold") && std::string(mode).find("async") != std::string::npos) continue;
        expect_handed(whole, run(*over_device_, trace, config, {.record = RecordGroups::all()}, mode), config, std::string(mode) + ", " + rule + ", " + switches);
      }
    }
  }
}

TEST_F(CudaHandoffTest, ExecutionDependentEncodingSeesWhatASerialRunSees) {
  const Trace trace = shipped("flush-3");
  for (const EncodingPolicy policy : {EncodingPolicy::fixed_prompt, EncodingPolicy::rolling, EncodingPolicy::streaming}) {
    AlgorithmConfig requested;
    apply_switches(requested, "t1s1q1");
    requested.window = 64;
    requested.kv_residual_quantization.policy = policy;
    requested.kv_residual_quantization.timing = EncodingTiming::execution_dependent;
    const EffectiveConfig config = EffectiveConfig::resolve(requested, tiny().config);
    expect_handed(run(*executor_, trace, config), run(*over_device_, trace, config, {.record = RecordGroups::all()}, "pd"), config,
                  std::string(to_string(policy)));
  }
}

bool same_bytes(const Tensor<float>& a, const Tensor<float>& b) {
  return a.shape == b.shape && std::memcmp(a.data.data(), b.data.data(), a.data.size() * sizeof(float)) == 0;
}

// K and V as a reader of every loop sees them, and every code and parameter.
void expect_same_prompt(const RequestRecord& expected, const RequestRecord& actual, const std::string& what) {
  ASSERT_EQ(expected.kv.size(), actual.kv.size()) << what;
  for (std::size_t i = 0; i < expected.kv.size(); ++i) {
    EXPECT_TRUE(same_bytes(expected.kv[i].k, actual.kv[i].k)) << what << ", K of plane " << i;
    EXPECT_TRUE(same_bytes(expected.kv[i].v, actual.kv[i].v)) << what << ", V of plane " << i;
  }
  ASSERT_EQ(expected.blocks.size(), actual.blocks.size()) << what;
  for (std::size_t b = 0; b < expected.blocks.size(); ++b) {
    EXPECT_EQ(expected.blocks[b].positions, actual.blocks[b].positions) << what;
    for (std::size_t r = 0; r < kLoops; ++r) {
      const CodecStream &x = expected.blocks[b].streams[r], &y = actual.blocks[b].streams[r];
      ASSERT_EQ(x.rows, y.rows) << what << ", block " << b << ", stream " << r + 1;
      for (std::size_t layer = 0; layer < x.layers.size(); ++layer) {
        const CodecLayer &p = x.layers[layer], &q = y.layers[layer];
        EXPECT_TRUE(p.k_codes.data == q.k_codes.data && p.v_codes.data == q.v_codes.data && same_bytes(p.k_min, q.k_min) &&
                    same_bytes(p.k_scale, q.k_scale) && same_bytes(p.v_min, q.v_min) && same_bytes(p.v_scale, q.v_scale))
            << what << ", block " << b << ", stream " << r + 1 << ", layer " << layer;
      }
    }
  }
}

// Regions are the same layout for every executor: what one computes the other goes on from, with every bit of it.
TEST_F(CudaHandoffTest, TheReferenceGoesOnFromDeviceRegionsAndTheDeviceFromTheReferences) {
  Trace trace = shipped("four");
  for (TraceRequest& request : trace.requests) {
    request.max_new_tokens = 0;
    request.forced.clear();
    request.exit_depths.clear();
  }
  const auto reference = reference::make_reference_executor(tiny());
  const auto make_reference = [] { return reference::make_reference_executor(tiny()); };
  const auto to_reference = harness::make_handoff_executor([] { return make_cuda(); }, make_reference, harness::make_host_transport, kSmall);
  const auto to_device = harness::make_handoff_executor(make_reference, [] { return make_cuda(); }, harness::make_host_transport, kSmall);
  for (const Setting& setting : kAllPolicies) {
    const EffectiveConfig config = config_of(setting);
    const RunRecord computed_here = run(*executor_, trace, config), computed_there = run(*reference, trace, config);
    const RunRecord there = run(*to_reference, trace, config, {.record = RecordGroups::all()}, "pd");
    const RunRecord here = run(*to_device, trace, config, {.record = RecordGroups::all()}, "pd");
    for (std::size_t i = 0; i < trace.requests.size(); ++i) {
      const std::string what = text(setting) + ", request " + std::to_string(i);
      expect_same_prompt(computed_here.requests[i], there.requests[i], "device to reference, " + what);
      expect_same_prompt(computed_there.requests[i], here.requests[i], "reference to device, " + what);
      // Of prompts whose selection agrees the bitmaps are the same bytes.
      if (computed_here.requests[i].active == computed_there.requests[i].active) {
        for (std::size_t r = 0; r < there.handoffs[i].regions.size(); ++r) {
          const HandoffRegion &x = there.handoffs[i].regions[r], &y = here.handoffs[i].regions[r];
          EXPECT_EQ(x.bytes, y.bytes) << what << ", region " << r;
          if (x.kind == "validity" || x.kind == "activity") {
            EXPECT_EQ(x.checksum, y.checksum) << what << ", region " << r;
          }
        }
      }
    }
  }
}

TEST_F(CudaHandoffTest, FailuresAndCancelsOnEitherSideChangeNothingElse) {
  Trace undisturbed = shipped("four");
  undisturbed.requests.erase(undisturbed.requests.begin(), undisturbed.requests.begin() + 2);  // prompts of three and of five windows are left
  const EffectiveConfig config = config_of({"t1s1q1", EncodingPolicy::rolling, 64});
  const RunRecord whole = run(*executor_, undisturbed, config);
  for (const char* mode : {"wcpb+pd", "mixed.b64+pd+async"}) {
    const int submissions = static_cast<int>(harness::make_plan(harness::parse_mode(mode), undisturbed, config).submissions.size());
    const int stride = std::max(1, submissions / 16);
    for (int at = 0; at < submissions; at += stride) {
      Trace trace = undisturbed;
      trace.events.push_back({at, TraceEventKind::cancel, 0});
      const std::string what = std::string(mode) + ", cancelled at " + std::to_string(at);
      const RunRecord handed = run(*over_device_, trace, config, {.record = RecordGroups::all()}, mode);
      EXPECT_EQ(describe(handed.held_at_drain), "") << what;
      EXPECT_EQ(handed.requests[1].tokens, whole.requests[1].tokens) << what;
      EXPECT_EQ(handed.requests[1].logits.data, whole.requests[1].logits.data) << what;
    }
    for (int at = 0; at < submissions; at += stride) {
      harness::PlanOptions options;
      options.failure = harness::PlanFailure{at, at / stride % 2 == 0 ? PlannedFailure::launch : PlannedFailure::allocation};
      const std::string what = std::string(mode) + ", failure of " + std::to_string(at);
      Plan plan;
      try {
        plan = harness::make_plan(harness::parse_mode(mode), undisturbed, config, options);
      } catch (const ConfigError&) {
        continue;  // that submission runs nothing
      }
      const RunRecord handed = replay(*over_device_, plan, undisturbed, config, {.record = RecordGroups::all()});
      expect_identical(whole, handed, config.window(), what);
      EXPECT_EQ(describe(handed.held_at_drain), "") << what;
    }
  }
}

// Planted after the checks of the receiver, which let none of this through; whether a sweep finds them: tests/harness_cli/mode_sweep_test.
TEST_F(CudaHandoffTest, PlantedFaultsShowWhereTheyCanAct) {
  Trace trace = shipped("four");
  trace.requests.erase(trace.requests.begin(), trace.requests.end() - 1);  // several windows and blocks, and a tail
  for (const Setting& setting : kAllPolicies) {
    const EffectiveConfig config = config_of(setting);
    const RunRecord sound = run(*over_device_, trace, config, {.record = RecordGroups::all()}, "pd");
    for (const FaultInfo& info : planted_faults()) {
      if (info.mode != "pd") continue;
      EXPECT_TRUE(info.in_optimized) << info.name;
      const auto regions = [&](std::string_view kind) {
        const auto& all = sound.handoffs.at(0).regions;
        return std::count_if(all.begin(), all.end(), [&](const HandoffRegion& region) { return region.kind == kind && region.loop == 1; });
      };
      const bool can_act = info.fault == Fault::handoff_without_rows       ? regions("rows") > 0
                           : info.fault == Fault::handoff_stale_parameters ? regions("parameters") > 1
                           : info.fault == Fault::handoff_wrong_activity   ? config.selects_tokens()
                                                                           : true;
      for (Executor* executor : {over_device_.get(), over_host_.get()}) {
        const RunRecord faulty = run(*executor, trace, config, {.record = RecordGroups::all(), .fault = info.fault}, "pd");
        EXPECT_NE(harness::compare_records(sound, faulty, config.window()).identical(), can_act) << info.name << ", " << text(setting);
        EXPECT_EQ(describe(faulty.held_at_drain), "") << info.name << ", " << text(setting);
      }
    }
  }
}

// The two ends by themselves, with a test in the place of the transport.
class CudaHandoffEndsTest : public CudaHandoffTest {
 protected:
  struct Exported {
    std::vector<std::vector<std::byte>> bytes;
    std::vector<handoff::RegionSummary> summaries;
  };

  void SetUp() override {
    CudaHandoffTest::SetUp();
    if (IsSkipped()) return;
    trace_ = shipped("four");
    trace_.requests.erase(trace_.requests.begin(), trace_.requests.end() - 1);  // 260 positions: E lies inside a window of 128
    config_.emplace(config_of({"t1s1q1", EncodingPolicy::rolling, 128}));
    other_ = optimized::make_cuda_executor(tiny(), {.poison = true});
  }

  static std::vector<std::byte> to_host(const handoff::Memory& memory) {
    std::vector<std::byte> bytes(memory.bytes);
    if (memory.bytes != 0) LOOPGAUGE_CUDA_CHECK(cudaMemcpy(bytes.data(), memory.data, memory.bytes, cudaMemcpyDefault));
    return bytes;
  }

  Exported compute_prompt(handoff::MemoryPlace place) {
    RunOptions options;
    options.stage = Stage::prefill;
    options.region_memory = place;
    executor_->begin(trace_, *config_, options);
    handoff::Source& source = *executor_->handoff_source();
    EXPECT_EQ(executor_->handoff_target(), nullptr);
    const int length = trace_.requests[0].prompt_length();
    executor_->submit({{{0, RowKind::prefill, 0, length, 1, kLoops}}, {}});
    Exported exported;
    exported.bytes.resize(handoff::regions_of(source.describe(0)).size());
    exported.summaries.resize(exported.bytes.size());
    while (!source.exported_all(0)) {
      for (const handoff::ExportedRegion& region : source.export_ready(0, 20000)) {
        EXPECT_EQ(region.memory.on_host(), place == handoff::MemoryPlace::host);
        exported.bytes[region.region] = to_host(region.memory);
        EXPECT_EQ(region.checksum, handoff::region_checksum(exported.bytes[region.region])) << "region " << region.region;
        exported.summaries[region.region] = {region.memory.bytes, region.checksum};
        source.sent(0, region.region);
      }
    }
    source.release(0);
    const RunRecord record = executor_->finish();
    EXPECT_EQ(describe(record.held_at_drain), "");
    return exported;
  }

  handoff::Target& begin_decode(handoff::MemoryPlace place) {
    RunOptions options;
    options.stage = Stage::decode;
    options.region_memory = place;
    options.record = RecordGroups::all();
    other_->begin(trace_, *config_, options);
    EXPECT_EQ(other_->handoff_source(), nullptr);
    return *other_->handoff_target();
  }

  static void write(const Exported& exported, const std::vector<handoff::Memory>& regions) {
    ASSERT_EQ(exported.bytes.size(), regions.size());
    for (std::size_t i = 0; i < regions.size(); ++i) {
      ASSERT_LE(exported.bytes[i].size(), regions[i].bytes);
      if (exported.bytes[i].empty()) continue;
      LOOPGAUGE_CUDA_CHECK(cudaMemcpy(regions[i].data, exported.bytes[i].data(), exported.bytes[i].size(), cudaMemcpyDefault));
    }
    LOOPGAUGE_CUDA_CHECK(cudaDeviceSynchronize());
  }

  Trace trace_;
  std::optional<EffectiveConfig> config_;
  std::unique_ptr<optimized::CudaExecutor> other_;
};

TEST_F(CudaHandoffEndsTest, ABitThatChangesInAnyRegionIsFoundAndTheReservationStands) {
  for (const handoff::MemoryPlace place : {handoff::MemoryPlace::host, handoff::MemoryPlace::device}) {
    const Exported exported = compute_prompt(place);
    handoff::Target& target = begin_decode(place);
    const std::size_t before = other_->memory_usage().total_in_use;
    const std::vector<handoff::Memory> regions = target.reserve(0, target.expected(0));
    EXPECT_GT(target.transfer_bytes(), 0u);
    EXPECT_THROW(static_cast<void>(target.reserve(0, target.expected(0))), handoff::HandoffError) << "it is here already";
    for (std::size_t damaged = 0; damaged < exported.bytes.size(); ++damaged) {
      if (exported.bytes[damaged].empty()) continue;
      Exported changed = exported;
      changed.bytes[damaged][changed.bytes[damaged].size() / 2] ^= std::byte{4};
      write(changed, regions);
      try {
        target.activate(0, exported.summaries);
        ADD_FAILURE() << "region " << damaged << " is damaged";
      } catch (const handoff::HandoffError& error) {
        EXPECT_NE(std::string(error.what()).find("the checksum does not fit"), std::string::npos) << error.what();
      }
    }
    std::vector<handoff::RegionSummary> large = exported.summaries;
    large.back().bytes += 2;
    EXPECT_THROW(target.activate(0, large), handoff::HandoffError) << "more bytes than were reserved";
    write(exported, regions);
    target.activate(0, exported.summaries);
    EXPECT_EQ(target.transfer_bytes(), 0u);
    const int length = trace_.requests[0].prompt_length();
    EXPECT_THROW(other_->submit({{{0, RowKind::prefill, 0, length, 1, kLoops}}, {}}), InternalError);
    other_->submit({{}, {{ActionKind::cancel, 0}}});
    EXPECT_EQ(describe(other_->finish().held_at_drain), "");
    // The K/V cache keeps nothing of it; what a first use of a workspace takes stays until the run ends, which it has.
    begin_decode(place);
    EXPECT_EQ(other_->memory_usage().total_in_use, before);
    other_->finish();
  }
}

TEST_F(CudaHandoffEndsTest, WhatWasExportedDoesNotChangeWithTheRequest) {
  RunOptions options;
  options.stage = Stage::prefill;
  options.region_memory = handoff::MemoryPlace::device;
  executor_->begin(trace_, *config_, options);
  handoff::Source& source = *executor_->handoff_source();
  const int window = config_->window(), length = trace_.requests[0].prompt_length();
  ASSERT_GT(length, window);
  executor_->submit({{{0, RowKind::prefill, 0, window, 1, kLoops}}, {}});
  const auto exported = source.export_ready(0, std::size_t{1} << 30);
  ASSERT_FALSE(exported.empty()) << "synchronous execution has nothing to wait for";
  EXPECT_FALSE(source.exported_all(0));
  std::vector<std::vector<std::byte>> before;
  for (const auto& region : exported) before.push_back(to_host(region.memory));
  executor_->submit({{}, {{ActionKind::rewind, 0}}});
  executor_->submit({{{0, RowKind::prefill, window, length, 1, kLoops}}, {}});
  executor_->submit({{}, {{ActionKind::cancel, 0}}});
  for (std::size_t i = 0; i < exported.size(); ++i) EXPECT_EQ(before[i], to_host(exported[i].memory)) << i;
  EXPECT_GT(executor_->finish().held_at_drain.transfers, 0);
}

// With two submissions in flight the host does not know yet what was selected in the first one when it could be exported: nothing is waited for, and
// in the end every byte is the same.
TEST_F(CudaHandoffEndsTest, AnAsynchronousPrefillExportsTheSameBytesAndWaitsForNoSelection) {
  const Exported expected = compute_prompt(handoff::MemoryPlace::device);
  for (const handoff::MemoryPlace place : {handoff::MemoryPlace::device, handoff::MemoryPlace::host}) {
    RunOptions options;
    options.stage = Stage::prefill;
    options.region_memory = place;
    options.submissions_in_flight = 2;
    executor_->begin(trace_, *config_, options);
    handoff::Source& source = *executor_->handoff_source();
    const auto regions = handoff::regions_of(source.describe(0));
    Exported exported;
    exported.bytes.resize(regions.size());
    exported.summaries.resize(regions.size());
    int latest_loop = 0;
    const auto take = [&] {
      for (const handoff::ExportedRegion& region : source.export_ready(0, std::size_t{1} << 30)) {
        latest_loop = std::max(latest_loop, regions[region.region].loop);
        exported.bytes[region.region] = to_host(region.memory);
        exported.summaries[region.region] = {region.memory.bytes, region.checksum};
        source.sent(0, region.region);
      }
    };
    const int length = trace_.requests[0].prompt_length(), window = config_->window();
    ASSERT_GT(length, 2 * window);
    for (int begin = 0; begin < length; begin += window) {
      executor_->submit({{{0, RowKind::prefill, begin, std::min(begin + window, length), 1, kLoops}}, {}});
      take();
      if (begin == 0) {
        EXPECT_LE(latest_loop, 2) << "the first selection has not been delivered";
      }
    }
    while (!source.exported_all(0)) take();
    EXPECT_EQ(exported.bytes, expected.bytes);
    EXPECT_EQ(exported.summaries, expected.summaries);
    source.release(0);
    EXPECT_EQ(describe(executor_->finish().held_at_drain), "");
  }
}

// A request that is cancelled while its regions are being copied.
TEST_F(CudaHandoffEndsTest, WhatIsReleasedWhileItIsCopiedIsFree) {
  RunOptions options;
  options.stage = Stage::prefill;
  options.region_memory = handoff::MemoryPlace::device;
  options.submissions_in_flight = 2;
  executor_->begin(trace_, *config_, options);
  handoff::Source& source = *executor_->handoff_source();
  executor_->submit({{{0, RowKind::prefill, 0, config_->window(), 1, kLoops}}, {}});
  static_cast<void>(source.export_ready(0, std::size_t{1} << 30));
  executor_->submit({{}, {{ActionKind::cancel, 0}}});
  source.release(0);
  EXPECT_EQ(describe(executor_->finish().held_at_drain), "");
}

TEST_F(CudaHandoffEndsTest, WhatHasNoRoomIsRefusedAndNothingIsHeld) {
  RunOptions options;
  options.stage = Stage::decode;
  options.region_memory = handoff::MemoryPlace::device;
  other_->begin(trace_, *config_, options);
  const std::size_t limit = other_->memory_usage().total_in_use + 4096;
  other_->finish();
  const auto narrow = optimized::make_cuda_executor(tiny(), {.memory_limit_bytes = limit, .poison = true});
  narrow->begin(trace_, *config_, options);
  handoff::Target& target = *narrow->handoff_target();
  const std::size_t before = narrow->memory_usage().total_in_use;
  EXPECT_THROW(static_cast<void>(target.reserve(0, target.expected(0))), optimized::DeviceMemoryError);
  EXPECT_EQ(narrow->memory_usage().total_in_use, before);
  EXPECT_EQ(target.transfer_bytes(), 0u);
  handoff::Descriptor other = target.expected(0);
  other.window = 64;
  EXPECT_THROW(static_cast<void>(target.reserve(0, other)), handoff::HandoffError);
  EXPECT_EQ(describe(narrow->finish().held_at_drain), "");
}

TEST_F(CudaHandoffEndsTest, AnExecutorKeepsToItsStage) {
  RunOptions options;
  options.stage = Stage::decode;
  const int length = trace_.requests[0].prompt_length();
  executor_->begin(trace_, *config_, options);
  EXPECT_THROW(executor_->submit({{{0, RowKind::decode, length, length + 1, 1, kLoops}}, {}}), InternalError) << "nothing was handed in";
  options.stage = Stage::prefill;
  executor_->begin(trace_, *config_, options);
  executor_->submit({{{0, RowKind::prefill, 0, length, 1, kLoops}}, {}});
  EXPECT_THROW(executor_->submit({{{0, RowKind::decode, length, length + 1, 1, kLoops}}, {}}), InternalError);
  EXPECT_THROW(executor_->submit({{}, {{ActionKind::hand_off, 0}}}), InternalError);
}

// A sum of the format, over sizes that end in every place of a word.
TEST_F(CudaHandoffEndsTest, ChecksumsOfTheDeviceAreThoseOfTheFormat) {
  std::mt19937 generator(3);
  std::vector<std::byte> bytes(1 << 18);
  for (auto& byte : bytes) byte = static_cast<std::byte>(generator());
  const auto data = upload(bytes);
  std::vector<optimized::RegionBytes> regions;
  std::vector<std::uint64_t> expected;
  for (std::size_t count = 0; count <= 40; ++count) {
    for (const std::size_t size : {count, bytes.size() - 2048 - count}) {
      regions.push_back({data.as<std::byte>() + 8 * count, size});
      expected.push_back(handoff::region_checksum(std::span(bytes).subspan(8 * count, size)));
    }
  }
  const auto ranges = upload(regions);
  auto sums = poisoned<std::uint64_t>(regions.size());
  optimized::region_checksums(ranges.as<optimized::RegionBytes>(), sums.as<std::uint64_t>(), static_cast<int>(regions.size()), *stream_);
  EXPECT_TRUE(same_bits(expected, download<std::uint64_t>(sums, regions.size())));
}

// At the K/V shape of Ouro-1.4B: bytes, latency and temporary memory of the handoff of 8192 tokens, everything on; within a device, and between two where
// there are two. With the default bounds, and once with wider ones.
TEST_F(CudaHandoffTest, APromptOf8192CostsAtMostOnePart5Point7OfDenseBf16) {
  const Checkpoint narrow = narrow_ouro_1_4b();
  const Trace trace = long_prompt(8192, narrow.config.vocab);
  const auto config_for = [&](EncodingPolicy policy) {
    AlgorithmConfig algorithm;
    apply_switches(algorithm, "t1s1q1");
    algorithm.kv_residual_quantization.policy = policy;
    return EffectiveConfig::resolve(algorithm, narrow.config);
  };
  constexpr EncodingPolicy kPolicies[] = {EncodingPolicy::rolling, EncodingPolicy::fixed_prompt, EncodingPolicy::streaming};
  std::map<EncodingPolicy, RunRecord> whole;
  for (const EncodingPolicy policy : kPolicies) whole[policy] = run(*executor_of(narrow), trace, config_for(policy), {});
  constexpr harness::HandoffLimits kWide{.partition_bytes = 4u << 20, .bytes_in_flight = 64u << 20, .export_bytes = 128u << 20};
  std::printf("transport  bounds  policy                bytes    ratio       ms  MB before the prompt's end  MB exported  MB reserved\n");
  for (int devices = 1; devices <= std::min(2, optimized::device_count()); ++devices) {
    for (const bool wide : {false, true}) {
      std::vector<optimized::CudaExecutor*> sides;  // prefill, decode
      const auto on = [&](int device) {
        return [&sides, &narrow, device]() -> std::unique_ptr<Executor> {
          auto executor = executor_of(narrow, device);
          sides.push_back(executor.get());
          return executor;
        };
      };
      const auto pair = harness::make_handoff_executor(on(0), on(devices - 1), devices == 2 ? harness::make_peer_transport : harness::make_device_transport,
                                                       wide ? kWide : harness::HandoffLimits{});
      for (const EncodingPolicy policy : kPolicies) {
        if (wide && policy != EncodingPolicy::rolling) continue;
        const EffectiveConfig config = config_for(policy);
        const RunRecord handed = run(*pair, trace, config, {}, "pd");
        expect_identical(whole.at(policy), handed, config.window(), std::string(to_string(policy)));
        ASSERT_EQ(handed.handoffs.size(), 1u);
        const HandoffRecord& handoff = handed.handoffs[0];
        EXPECT_EQ(handoff.outcome, "handed over");
        EXPECT_EQ(handoff.dense_bytes, std::int64_t{24} * 2 * 16 * 4 * 8192 * 128 * 2);
        const double ratio = static_cast<double>(handoff.dense_bytes) / static_cast<double>(handoff.bytes);
        EXPECT_GE(ratio, 5.7) << to_string(policy);
        EXPECT_GT(handoff.seconds, 0) << to_string(policy);
        // Peak of temporary memory on either side. The receiver has room for every region at once; both keep what copies and activation are told with.
        const auto temporary = [&](std::size_t side) {
          return static_cast<double>(sides.at(side)->memory_usage().peak[static_cast<std::size_t>(MemoryCategory::transfer_buffers)]);
        };
        EXPECT_LT(temporary(1), 1.05 * static_cast<double>(handoff.bytes)) << to_string(policy);
        EXPECT_GE(temporary(1), static_cast<double>(handoff.most_reserved_bytes)) << to_string(policy);
        EXPECT_LT(temporary(0), 8.0 * static_cast<double>(wide ? kWide.export_bytes : harness::HandoffLimits{}.export_bytes)) << to_string(policy);
        std::printf("%-9s  %-6s  %-12s  %13lld  %7.3f  %7.3f  %26.1f  %11.1f  %11.1f\n", handoff.transport.c_str(), wide ? "wide" : "normal",
                    std::string(to_string(policy)).c_str(), static_cast<long long>(handoff.bytes), ratio, handoff.seconds * 1e3,
                    static_cast<double>(handoff.bytes_before_prompt_end) / 1e6, temporary(0) / 1e6, temporary(1) / 1e6);
      }
    }
  }
}

TEST_F(CudaHandoffTest, TwoDevicesOfOneHost) {
  if (optimized::device_count() < 2) GTEST_SKIP() << "one device is present";
  const auto over_peers = harness::make_handoff_executor([] { return make_cuda(0); }, [] { return make_cuda(1); }, harness::make_peer_transport, kSmall);
  for (const char* name : {"four", "greedy"}) {
    const Trace trace = shipped(name);
    for (const Setting& setting : kAllPolicies) {
      const EffectiveConfig config = config_of(setting);
      const RunRecord whole = run(*executor_, trace, config);
      for (const char* mode : {"pd", "wcpb+pd+async"}) {
        const RunRecord handed = run(*over_peers, trace, config, {.record = RecordGroups::all()}, mode);
        expect_handed(whole, handed, config, std::string(name) + ", " + mode + ", " + text(setting) + " over peers");
        EXPECT_EQ(handed.handoffs.at(0).transport, "peer");
      }
    }
  }
}

}  // namespace
}  // namespace loopgauge::test
