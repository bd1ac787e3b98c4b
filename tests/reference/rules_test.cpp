// SPDX-License-Identifier: Apache-2.0
// The integer rules that both executors share: budgets, windows, frontiers, block cuts, and what a configuration may say (S-CFG-1..9,
// S-TSEL-1, S-POL-1..4, S-EX-6).
#include <gtest/gtest.h>

#include <limits>

#include "models/algorithm_config.hpp"
#include "models/error.hpp"

namespace loopgauge {
namespace {

ModelConfig four_loops() {
  ModelConfig model;
  model.layers = 1, model.loops = 4, model.hidden = 8, model.heads = 1, model.head_dim = 8, model.intermediate = 8, model.vocab = 8;
  model.max_positions = 4096;
  return model;
}

EffectiveConfig quantized(EncodingPolicy policy, int window = 256, int tail = 64) {
  AlgorithmConfig config;
  config.kv_residual_quantization.enabled = true;
  config.kv_residual_quantization.policy = policy;
  config.kv_residual_quantization.tail = tail;
  config.window = window;
  return EffectiveConfig::resolve(config, four_loops());
}

std::vector<PositionRange> all_cuts(const EffectiveConfig& config, int prompt, int committed) {
  return block_cuts(config, prompt, 0, encoded_frontier(config, prompt, committed));
}

using Ranges = std::vector<PositionRange>;

TEST(Budget, RoundsUpInIntegersAndIsNeverZero) {
  EXPECT_EQ(budget(2500, 40), 10) << "exact";
  EXPECT_EQ(budget(2500, 41), 11) << "just above";
  for (int n = 1; n <= 10; ++n) EXPECT_EQ(budget(1000, n), 1) << n;
  EXPECT_EQ(budget(1000, 11), 2);
  EXPECT_EQ(budget(700, 100), 7) << "ceil(0.07 * 100) in binary64 is 8";
  EXPECT_EQ(budget(2800, 25), 7) << "ceil(0.28 * 25) in binary64 is 8";
  EXPECT_EQ(budget(1, 1), 1);
  EXPECT_EQ(budget(10000, 123), 123);
  EXPECT_EQ(budget(10000, std::numeric_limits<int>::max()), std::numeric_limits<int>::max()) << "the product needs 64 bits";
}

TEST(Windows, AreAnchoredAtPositionZeroAndTheLastMayBeShort) {
  EXPECT_EQ(window_count(1, 256), 1);
  EXPECT_EQ(window_count(256, 256), 1);
  EXPECT_EQ(window_count(257, 256), 2);
  EXPECT_EQ(window_count(257, 2147483584), 1) << "the largest multiple of 64";
  EXPECT_EQ(window_range(0, 257, 256), (PositionRange{0, 256}));
  EXPECT_EQ(window_range(1, 257, 256), (PositionRange{256, 257}));
}

TEST(Frontier, OfAPromptUnderRollingKeepsATailOf64To127) {
  const EffectiveConfig config = quantized(EncodingPolicy::rolling);
  for (const int prompt : {1, 2, 63, 64, 127, 128, 129, 191, 192, 8191, 8192}) {
    const int expected = prompt < 128 ? 0 : 64 * ((prompt - 64) / 64);
    EXPECT_EQ(encoded_frontier(config, prompt, prompt), expected) << prompt;
    if (prompt >= 128) {
      EXPECT_GE(prompt - expected, 64);
      EXPECT_LE(prompt - expected, 127);
    }
  }
}

TEST(Frontier, RollsWhenTheTailReaches128) {
  const EffectiveConfig config = quantized(EncodingPolicy::rolling);
  EXPECT_EQ(encoded_frontier(config, 127, 127), 0) << "no roll at 127";
  EXPECT_EQ(encoded_frontier(config, 127, 128), 64) << "one token later, in the same step";
  EXPECT_EQ(encoded_frontier(config, 128, 191), 64);
  EXPECT_EQ(encoded_frontier(config, 128, 192), 128) << "first roll 64 tokens after a prompt of 128";
  EXPECT_EQ(encoded_frontier(config, 128, 320), 256) << "third roll";
}

// Worked example S-EX-6.
TEST(Frontier, TableOfTheSpecification) {
  const auto fixed = quantized(EncodingPolicy::fixed_prompt), rolling = quantized(EncodingPolicy::rolling),
             streaming = quantized(EncodingPolicy::streaming);
  EXPECT_EQ(encoded_frontier(fixed, 300, 300), 300);
  EXPECT_EQ(encoded_frontier(fixed, 300, 500), 300);
  EXPECT_EQ(all_cuts(fixed, 300, 500), (Ranges{{0, 256}, {256, 300}}));
  EXPECT_EQ(all_cuts(rolling, 127, 128), (Ranges{{0, 64}}));
  EXPECT_EQ(encoded_frontier(rolling, 512, 512), 448);
  EXPECT_EQ(all_cuts(rolling, 512, 640), (Ranges{{0, 256}, {256, 448}, {448, 512}, {512, 576}}));
  EXPECT_EQ(encoded_frontier(streaming, 255, 255), 0);
  EXPECT_EQ(all_cuts(streaming, 255, 256), (Ranges{{0, 64}, {64, 128}, {128, 192}})) << "one commit may flush several blocks";
  EXPECT_EQ(encoded_frontier(streaming, 512, 512), 512);
  EXPECT_EQ(encoded_frontier(streaming, 512, 575), 512) << "the prompt's frontier stands until a flush passes it";
  EXPECT_EQ(all_cuts(streaming, 512, 640), (Ranges{{0, 256}, {256, 512}, {512, 576}}));
}

TEST(Frontier, OffMeansZero) {
  const EffectiveConfig off = EffectiveConfig::resolve({}, four_loops());
  EXPECT_EQ(encoded_frontier(off, 1000, 2000), 0);
}

TEST(Frontier, TailOfAnySizeIncludingZero) {
  EXPECT_EQ(encoded_frontier(quantized(EncodingPolicy::rolling, 256, 0), 64, 64), 64);
  EXPECT_EQ(encoded_frontier(quantized(EncodingPolicy::rolling, 256, 0), 63, 63), 0);
  EXPECT_EQ(encoded_frontier(quantized(EncodingPolicy::rolling, 256, 1), 65, 65), 64);
  EXPECT_EQ(encoded_frontier(quantized(EncodingPolicy::rolling, 256, 1000), 999, 1063), 0);
  EXPECT_EQ(encoded_frontier(quantized(EncodingPolicy::rolling, 256, 1000), 999, 1064), 64);
}

TEST(BlockCuts, TileWhatIsEncodedWhateverTheSteps) {
  for (const EncodingPolicy policy : {EncodingPolicy::fixed_prompt, EncodingPolicy::rolling, EncodingPolicy::streaming}) {
    for (const int window : {64, 128, 256}) {
      for (const int tail : {0, 1, 63, 64, 65, 100}) {
        const EffectiveConfig config = quantized(policy, window, tail);
        for (int prompt = 1; prompt <= 530; prompt += prompt < 260 ? 1 : 27) {
          const int at_prompt = encoded_frontier(config, prompt, prompt);
          Ranges blocks = block_cuts(config, prompt, 0, at_prompt);
          int frontier = at_prompt;
          for (int n = prompt + 1; n <= prompt + 200; ++n) {
            const int next = encoded_frontier(config, prompt, n);
            ASSERT_GE(next, frontier) << "the frontier never moves back";
            ASSERT_LE(next, n);
            const Ranges more = block_cuts(config, prompt, frontier, next);
            blocks.insert(blocks.end(), more.begin(), more.end());
            frontier = next;
          }
          ASSERT_EQ(blocks, block_cuts(config, prompt, 0, frontier)) << "cut step by step and at once";
          int begin = 0;
          for (const PositionRange& block : blocks) {
            ASSERT_EQ(block.begin, begin);
            ASSERT_GT(block.size(), 0);
            if (block.end <= at_prompt)
              ASSERT_EQ(block.begin / window, (block.end - 1) / window) << "a prompt block crosses a window boundary";
            else
              ASSERT_EQ(block.size(), kGroupSize) << "a flush is 64 positions";
            begin = block.end;
          }
          ASSERT_EQ(begin, frontier);
        }
      }
    }
  }
}

std::string refusal(const AlgorithmConfig& config, const ModelConfig& model = four_loops()) {
  try {
    EffectiveConfig::resolve(config, model);
    return "";
  } catch (const ConfigError& error) {
    return error.what();
  }
}

TEST(Configuration, DefaultsAreOffAndDense) {
  const EffectiveConfig config = EffectiveConfig::resolve({}, four_loops());
  EXPECT_EQ(config.switches(), "t0s0q0");
  EXPECT_FALSE(config.selects_tokens());
  EXPECT_EQ(config.t().retention_bp, (std::array<int, 4>{10000, 10000, 2500, 1000}));
  EXPECT_EQ(config.s().key_fraction_bp, 1000);
  EXPECT_EQ(config.window(), 256);
  EXPECT_EQ(config.q().tail, 64);
}

TEST(Configuration, SelectsTokensOnlyWhereALoopIsBelowTenThousand) {
  AlgorithmConfig config;
  config.token_sparse_prefill.enabled = true;
  EXPECT_TRUE(EffectiveConfig::resolve(config, four_loops()).selects_tokens());
  config.token_sparse_prefill.retention_bp = {10000, 10000, 10000, 10000};
  EXPECT_FALSE(EffectiveConfig::resolve(config, four_loops()).selects_tokens());
  config.token_sparse_prefill.retention_bp = {10000, 10000, 10000, 9999};
  EXPECT_TRUE(EffectiveConfig::resolve(config, four_loops()).selects_tokens());
}

TEST(Configuration, RefusalsNameTheFieldAndTheValue) {
  const auto expect = [](const std::string& message, std::initializer_list<const char*> parts) {
    for (const char* part : parts) EXPECT_NE(message.find(part), std::string::npos) << '"' << message << "\" lacks \"" << part << '"';
  };
  for (const int window : {0, -64, 63, 100}) {
    AlgorithmConfig config;
    config.window = window;
    expect(refusal(config), {"window", std::to_string(window).c_str(), "64"});
  }
  AlgorithmConfig config;
  config.token_sparse_prefill.retention_bp = {10000, 10000, 2500, 3000};
  expect(refusal(config), {"retention of loop 4", "3000", "2500"});
  config.token_sparse_prefill.retention_bp = {10000, 9000, 2500, 1000};
  expect(refusal(config), {"retention of loop 2", "9000"});
  config.token_sparse_prefill.retention_bp = {10000, 10000, 2500, 0};
  expect(refusal(config), {"retention of loop 4", "0"});
  config = {};
  config.sparse_decode_attention.key_fraction_bp = 10001;
  expect(refusal(config), {"key fraction", "10001"});
  config = {};
  config.kv_residual_quantization.tail = -1;
  expect(refusal(config), {"tail", "-1"});
  config = {};
  config.exit.min_loops = 5;
  expect(refusal(config), {"min_loops", "5"});
}

TEST(Configuration, FeaturesNeedExactlyFourLoops) {
  ModelConfig three = four_loops();
  three.loops = 3;
  EXPECT_EQ(refusal({}, three), "");
  for (const char* switches : {"t1s0q0", "t0s1q0", "t0s0q1"}) {
    AlgorithmConfig config;
    apply_switches(config, switches);
    EXPECT_NE(refusal(config, three).find("four loops"), std::string::npos) << switches;
  }
}

TEST(Configuration, EqualityIsEqualityOfTheCanonicalForm) {
  const EffectiveConfig a = quantized(EncodingPolicy::rolling), b = quantized(EncodingPolicy::rolling),
                        c = quantized(EncodingPolicy::streaming);
  EXPECT_EQ(a, b);
  EXPECT_FALSE(a == c);
  EXPECT_NE(a.canonical_json().find("\"policy\":\"rolling\""), std::string::npos);
}

TEST(Configuration, AReservationIsVisibleAndPartOfTheIdentity) {
  AlgorithmConfig config;
  apply_switches(config, "t1s0q0");
  const EffectiveConfig plain = EffectiveConfig::resolve(config, four_loops());
  EXPECT_NE(plain.canonical_json().find("\"reserve\":\"none\""), std::string::npos);
  EXPECT_EQ(plain.reserved_position(150), -1);
  config.token_sparse_prefill.reserve = parse_slot_reservation("final_prompt_token");
  const EffectiveConfig reserved = EffectiveConfig::resolve(config, four_loops());
  EXPECT_NE(reserved.canonical_json().find("\"reserve\":\"final_prompt_token\""), std::string::npos);
  EXPECT_EQ(reserved.reserved_position(150), 149);
  EXPECT_FALSE(plain == reserved);
  EXPECT_THROW(parse_slot_reservation("last"), ConfigError);
}

}  // namespace
}  // namespace loopgauge
