// SPDX-License-Identifier: Apache-2.0
// Closed forms of the storage layout. Per head and layer at D = 128: one encoded K+V row of one stream is 128 bytes of codes and 16 of
// parameters, a BF16 token of four loops 2048 bytes.
#include "harness/compare/memory_model.hpp"

#include <gtest/gtest.h>

#include <cmath>

#include "models/error.hpp"

namespace loopgauge::harness {
namespace {

ModelConfig ouro_1_4b() {
  ModelConfig model;
  model.layers = 24;
  model.loops = 4;
  model.hidden = 2048;
  model.heads = 16;
  model.head_dim = 128;
  model.intermediate = 5632;
  model.vocab = 49152;
  model.max_positions = 65536;
  model.rms_norm_eps = 1e-6f;
  model.rope_theta = 1e6;
  return model;
}
constexpr std::int64_t kHeads = 24 * 16;  // over all layers

EffectiveConfig configured(std::string_view switches, EncodingPolicy policy = EncodingPolicy::rolling, int tail = 64) {
  AlgorithmConfig config;
  apply_switches(config, switches);
  config.kv_residual_quantization.policy = policy;
  config.kv_residual_quantization.tail = tail;
  return EffectiveConfig::resolve(config, ouro_1_4b());
}

MemoryPrediction predict(const EffectiveConfig& config, int prompt, int committed) {
  MemoryInput input;
  input.requests.push_back({.prompt_length = prompt, .committed = committed, .capacity = 0, .active = {}, .exit_depths = {}});
  return predict_memory(ouro_1_4b(), config, input);
}

TEST(MemoryModel, PayloadRatioOfTheDefaultSchedule) {
  // S-EX-5: 4 N 16 bits against 2.35 N 4 bits. A window of 256 has 26 rows at loop 4 (ceil of 25.6), so the exact ratio is
  // 4 * 16 / (4 * (2 + 64/256 + 26/256)).
  const MemoryPrediction p = predict(configured("t1s0q1", EncodingPolicy::fixed_prompt), 8192, 8192);
  EXPECT_DOUBLE_EQ(p.payload_ratio(), 64.0 / (4.0 * (2.0 + 64.0 / 256 + 26.0 / 256)));
  EXPECT_NEAR(p.payload_ratio(), 6.81, 0.01);
  // 2560 tokens a window make loop 4 exactly a tenth.
  AlgorithmConfig config;
  apply_switches(config, "t1s0q1");
  config.kv_residual_quantization.policy = EncodingPolicy::fixed_prompt;
  config.window = 2560;
  EXPECT_DOUBLE_EQ(predict(EffectiveConfig::resolve(config, ouro_1_4b()), 2560, 2560).payload_ratio(), 64.0 / (4.0 * 2.35));
}

TEST(MemoryModel, WithoutTokenSelectionItIsFourStreams) {
  const MemoryPrediction p = predict(configured("t0s0q1", EncodingPolicy::fixed_prompt), 8192, 8192);
  EXPECT_DOUBLE_EQ(p.payload_ratio(), 4.0);
  EXPECT_EQ(p.steady.logical_of(MemoryCategory::base_payload), kHeads * 8192 * 128);
  EXPECT_EQ(p.steady.logical_of(MemoryCategory::residual_payload), kHeads * 3 * 8192 * 128);
  EXPECT_EQ(p.steady.logical_of(MemoryCategory::parameters), kHeads * 4 * 8192 * 16);
  EXPECT_EQ(p.steady.logical_of(MemoryCategory::bf16_tail), 0);
}

TEST(MemoryModel, ClosedFormOfTheRollingPolicy) {
  // 144 (2 E + n3 + n4) + 2048 tail, plus what short K groups add: a group of fewer than 64 rows still has 128 channels of 4 bytes.
  const int prompt = 8192, encoded = 8128;
  const MemoryPrediction p = predict(configured("t1s0q1"), prompt, prompt);
  // 31 whole windows and a block of 192 tokens. Rows at loop 3 are spread evenly: every fourth, so 48 of 192; at loop 4 every 9.8th.
  const std::int64_t n3 = 31 * 64 + 48;
  std::int64_t last4 = 0;
  for (int i = 0; i < 26; ++i) last4 += i * 256 / 26 < 192;
  const std::int64_t n4 = 31 * 26 + last4;
  const std::int64_t groups = 2 * (encoded / 64) + 32 + 32;  // loop 3: one group a block; loop 4: one
  const std::int64_t encoded_bytes = (2 * encoded + n3 + n4) * (128 + 8) + groups * 512;
  const auto& steady = p.steady;
  EXPECT_EQ(steady.logical_of(MemoryCategory::base_payload) + steady.logical_of(MemoryCategory::residual_payload) +
                steady.logical_of(MemoryCategory::parameters),
            kHeads * encoded_bytes);
  const std::int64_t closed_form = 144 * (2 * encoded + n3 + n4);
  EXPECT_GE(encoded_bytes, closed_form);
  EXPECT_LT(static_cast<double>(encoded_bytes - closed_form), 0.005 * static_cast<double>(closed_form));
  // 64 tokens of tail take one page in four planes: 2048 bytes a token and head, inherited rows included.
  const std::int64_t tail3 = 16, tail4 = 26 - last4;
  EXPECT_EQ(steady.logical_of(MemoryCategory::bf16_tail), kHeads * 512 * (2 * 64 + tail3 + tail4));
  const std::int64_t tables = 128 * (kActivityMapEntryBytes + kPageTableEntryBytes);
  EXPECT_EQ(steady.physical_kv(), kHeads * (encoded_bytes + 2048 * 64) + tables);
}

TEST(MemoryModel, TargetsOfAnEightThousandTokenPrompt) {
  // Every byte counted: parameters, maps, page tables, tails in whole pages.
  const MemoryPrediction rolling = predict(configured("t1s1q1"), 8192, 8192);
  EXPECT_GE(rolling.kv_ratio_physical(), 5.75);
  EXPECT_LE(rolling.kv_ratio_physical(), 6.05);
  const MemoryPrediction streaming = predict(configured("t1s1q1", EncodingPolicy::streaming), 8192, 8192);
  EXPECT_GE(streaming.kv_ratio_physical(), 5.95);
  EXPECT_LE(streaming.kv_ratio_physical(), 6.05);
  // Logical counts leave out unused slots of the tail's pages, so it is at least as good.
  EXPECT_GE(rolling.kv_ratio_logical(), rolling.kv_ratio_physical());
}

TEST(MemoryModel, DenseIsFourPlanesInWholePages) {
  const MemoryPrediction p = predict(configured("t0s0q0"), 100, 130);
  EXPECT_EQ(p.steady.logical_of(MemoryCategory::bf16_planes), kHeads * 2048 * 130);
  EXPECT_EQ(p.steady.physical_of(MemoryCategory::padding), kHeads * 2048 * (192 - 130) + 3 * kActivityMapEntryBytes);
  EXPECT_EQ(p.steady.logical, p.dense.logical);
  EXPECT_EQ(p.kv_ratio_physical(), 1.0);
  EXPECT_TRUE(std::isnan(p.payload_ratio()));
  EXPECT_EQ(p.steady.logical_of(MemoryCategory::attention_reference_state), 0);
}

TEST(MemoryModel, ADenseModelOfTwoLoopsHasTwoPlanes) {
  ModelConfig model = ouro_1_4b();
  model.loops = 2;
  MemoryInput input;
  input.requests.push_back({.prompt_length = 100, .committed = 130, .capacity = 0, .active = {}, .exit_depths = {}});
  const MemoryPrediction p = predict_memory(model, EffectiveConfig::resolve(AlgorithmConfig{}, model), input);
  EXPECT_EQ(p.steady.logical_of(MemoryCategory::bf16_planes), kHeads * 1024 * 130);
  EXPECT_EQ(p.steady.physical_of(MemoryCategory::padding), kHeads * 1024 * (192 - 130) + 3 * kActivityMapEntryBytes);
}

TEST(MemoryModel, TailHoldsSixtyFourToOneHundredTwentySevenTokens) {
  for (int committed = 640; committed < 768; ++committed) {
    const MemoryPrediction p = predict(configured("t0s0q1"), 512, committed);
    const std::int64_t tail = p.steady.logical_of(MemoryCategory::bf16_tail) / (kHeads * 2048);
    EXPECT_GE(tail, 64);
    EXPECT_LE(tail, 127);
    EXPECT_EQ(tail, committed - 64 * ((committed - 64) / 64));
  }
}

TEST(MemoryModel, RecordedActivityAndExitsAreCounted) {
  MemoryInput input;
  RequestMemory request{.prompt_length = 64, .committed = 128, .capacity = 256, .active = {}, .exit_depths = {}};
  request.active[0] = {1, 5, 60};
  request.active[1] = {5};
  request.exit_depths.assign(64, 2);  // generated tokens ran two loops
  input.requests.push_back(request);
  AlgorithmConfig config;
  apply_switches(config, "t1s1q1");
  config.kv_residual_quantization.tail = 0;
  config.exit.mode = ExitMode::trace;
  const MemoryPrediction p = predict_memory(ouro_1_4b(), EffectiveConfig::resolve(config, ouro_1_4b()), input);
  EXPECT_EQ(p.steady.logical_of(MemoryCategory::base_payload), kHeads * 128 * 128);
  EXPECT_EQ(p.steady.logical_of(MemoryCategory::residual_payload), kHeads * (128 + 3 + 1) * 128);
  // K groups: two blocks of 64 in streams 1 and 2, one short group each in streams 3 and 4 of the first block.
  EXPECT_EQ(p.steady.logical_of(MemoryCategory::parameters), kHeads * ((2 * 128 + 3 + 1) * 8 + (2 + 2 + 1 + 1) * 512));
  // Streams 2, 3, 4 have maps: exits may come after loop 1.
  EXPECT_EQ(p.steady.logical_of(MemoryCategory::activity_maps), 2 * 3 * 12);
  EXPECT_EQ(p.steady.physical_of(MemoryCategory::inherited_references), 2 * kPageTableEntryBytes);
  // Masks of 2 pages, m, O_ref and C_ref.
  EXPECT_EQ(p.steady.logical_of(MemoryCategory::attention_reference_state), kHeads * (2 * 8 + 4 + 1024));
}

TEST(MemoryModel, PeakHoldsThePromptInBfloat16WhereItIsReadSo) {
  const MemoryPrediction rolling = predict(configured("t0s0q1"), 8192, 8192);
  EXPECT_EQ(rolling.peak.physical_of(MemoryCategory::bf16_tail), kHeads * 2048 * 8192);
  EXPECT_EQ(rolling.peak.logical_of(MemoryCategory::base_payload), rolling.steady.logical_of(MemoryCategory::base_payload));
  const MemoryPrediction streaming = predict(configured("t0s0q1", EncodingPolicy::streaming), 8192, 8192);
  EXPECT_EQ(streaming.peak.physical_of(MemoryCategory::bf16_tail), kHeads * 2048 * 256);  // one window in flight
  EXPECT_LT(streaming.peak.physical_total(), rolling.peak.physical_total());
  EXPECT_GE(streaming.peak.physical_total(), streaming.steady.physical_total());
}

// The ratio is of K/V and what finds it: the reference state of sparse decode is neither, nor is its padding.
TEST(MemoryModel, SparseDecodeLeavesTheRatioOfKvAsItIs) {
  for (const char* switches : {"t0s%q0", "t1s%q0", "t1s%q1"}) {
    const auto with = [&](char digit) {
      std::string text = switches;
      text[text.find('%')] = digit;
      return predict(configured(text), 1000, 1100);
    };
    EXPECT_GT(with('1').steady.physical_of(MemoryCategory::padding), with('0').steady.physical_of(MemoryCategory::padding)) << switches;
    EXPECT_EQ(with('1').steady.physical_kv(), with('0').steady.physical_kv()) << switches;
    EXPECT_EQ(with('1').kv_ratio_physical(), with('0').kv_ratio_physical()) << switches;
  }
}

TEST(MemoryModel, PhysicalTotalIsTheSumOfItsCategories) {
  const MemoryPrediction p = predict(configured("t1s1q1"), 1000, 1100);
  EXPECT_EQ(p.steady.logical_of(MemoryCategory::padding), 0);
  EXPECT_GT(p.steady.physical_of(MemoryCategory::padding), 0);
  EXPECT_EQ(p.steady.physical_total() - p.steady.physical_of(MemoryCategory::padding), p.steady.logical_total());
}

TEST(MemoryModel, WeightsOfTheModelWithItsRopeTable) {
  // 2 V C + L (4 C A + 3 C F + 4 C) + C + C + 1 parameters of 2 bytes, and max_positions * D table entries.
  const std::int64_t parameters = 2ll * 49152 * 2048 + 24ll * (4 * 2048 * 2048 + 3 * 2048 * 5632 + 4 * 2048) + 2 * 2048 + 1;
  EXPECT_EQ(weight_bytes(ouro_1_4b()), 2 * (parameters + 65536ll * 128));
}

TEST(MemoryModel, ImpossibleLengthsAreRefused) {
  EXPECT_THROW(predict(configured("t0s0q0"), 10, 9), InternalError);
  EXPECT_THROW(predict(configured("t0s0q0"), 0, 0), InternalError);
}

}  // namespace
}  // namespace loopgauge::harness
