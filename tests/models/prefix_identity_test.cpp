// SPDX-License-Identifier: Apache-2.0
// Every field of a published window's identity changes it (S-PFX-1).
#include "models/prefix_identity.hpp"

#include <gtest/gtest.h>

#include <numeric>
#include <set>

#include "models/error.hpp"

namespace loopgauge {
namespace {

class PrefixIdentity : public testing::Test {
 protected:
  PrefixIdentity() { std::iota(tokens_.begin(), tokens_.end(), 0); }

  static AlgorithmConfig algorithm() {
    AlgorithmConfig config;
    apply_switches(config, "t1s1q1");
    config.window = 64;
    return config;
  }
  static EffectiveConfig resolve(const AlgorithmConfig& config) {
    ModelConfig model;
    model.layers = 1, model.loops = 4, model.hidden = 8, model.heads = 1, model.head_dim = 8, model.intermediate = 8, model.vocab = 300;
    model.max_positions = 4096;
    return EffectiveConfig::resolve(config, model);
  }
  std::string identity(const EffectiveConfig& config) const { return prefix_identity("model", config, PrefixEncoding::planes, tokens_); }

  std::vector<std::int32_t> tokens_ = std::vector<std::int32_t>(128);
  const EffectiveConfig config_ = resolve(algorithm());
};

TEST_F(PrefixIdentity, IsTheSameForTheSame) {
  const std::string text = identity(config_);
  EXPECT_EQ(text, identity(resolve(algorithm())));
  EXPECT_EQ(text.size(), 64u);
  EXPECT_EQ(text.find_first_not_of("0123456789abcdef"), std::string::npos);
}

TEST_F(PrefixIdentity, ChangesWithTheModelAndTheEncoding) {
  const std::set<std::string> all{identity(config_), prefix_identity("model2", config_, PrefixEncoding::planes, tokens_),
                                  prefix_identity("", config_, PrefixEncoding::planes, tokens_),
                                  prefix_identity("model", config_, PrefixEncoding::blocks, tokens_)};
  EXPECT_EQ(all.size(), 4u);
}

TEST_F(PrefixIdentity, ChangesWithEverySettingOfTheConfiguration) {
  std::set<std::string> all{identity(config_)};
  std::size_t changes = 0;
  const auto change = [&](auto alter) {
    AlgorithmConfig config = algorithm();
    alter(config);
    all.insert(identity(resolve(config)));
    ++changes;
    EXPECT_EQ(all.size(), changes + 1) << "change " << changes;
  };
  change([](AlgorithmConfig& c) { c.token_sparse_prefill.enabled = false; });
  change([](AlgorithmConfig& c) { c.token_sparse_prefill.retention_bp[2] = 2400; });
  change([](AlgorithmConfig& c) { c.token_sparse_prefill.retention_bp[3] = 900; });
  change([](AlgorithmConfig& c) { c.sparse_decode_attention.enabled = false; });
  change([](AlgorithmConfig& c) { c.sparse_decode_attention.key_fraction_bp = 900; });
  change([](AlgorithmConfig& c) { c.kv_residual_quantization.enabled = false; });
  change([](AlgorithmConfig& c) { c.kv_residual_quantization.policy = EncodingPolicy::streaming; });
  change([](AlgorithmConfig& c) { c.kv_residual_quantization.policy = EncodingPolicy::fixed_prompt; });
  change([](AlgorithmConfig& c) { c.kv_residual_quantization.timing = EncodingTiming::execution_dependent; });
  change([](AlgorithmConfig& c) { c.kv_residual_quantization.flush = FlushRule::eager; });
  change([](AlgorithmConfig& c) { c.kv_residual_quantization.tail = 65; });
  change([](AlgorithmConfig& c) { c.window = 128; });
  change([](AlgorithmConfig& c) { c.exit.mode = ExitMode::delayed; });
  change([](AlgorithmConfig& c) { c.exit.threshold = 0.5f; });
  change([](AlgorithmConfig& c) { c.exit.min_loops = 2; });
}

TEST_F(PrefixIdentity, ChangesWithEveryTokenAndEveryByteOfIt) {
  std::set<std::string> all{identity(config_)};
  for (std::size_t i = 0; i < tokens_.size(); ++i) {
    for (const int bit : {0, 9, 18, 27}) {
      tokens_[i] ^= 1 << bit;
      all.insert(identity(config_));
      tokens_[i] ^= 1 << bit;
    }
  }
  EXPECT_EQ(all.size(), 1 + 4 * tokens_.size());
  std::swap(tokens_[3], tokens_[4]);
  EXPECT_TRUE(all.insert(identity(config_)).second) << "order";
}

TEST_F(PrefixIdentity, ChangesWithTheNumberOfWindows) {
  const std::string two = identity(config_);
  tokens_.resize(64);
  EXPECT_NE(identity(config_), two);
}

TEST_F(PrefixIdentity, IsOfWholeWindows) {
  for (const std::size_t size : {0u, 1u, 63u, 65u}) {
    tokens_.resize(size);
    EXPECT_THROW(identity(config_), InternalError) << size;
  }
}

TEST_F(PrefixIdentity, BlocksArePublishedUnderStreamingOnly) {
  AlgorithmConfig config = algorithm();
  EXPECT_EQ(published_encoding(resolve(config)), PrefixEncoding::planes);
  config.kv_residual_quantization.policy = EncodingPolicy::streaming;
  EXPECT_EQ(published_encoding(resolve(config)), PrefixEncoding::blocks);
  config.kv_residual_quantization.enabled = false;
  EXPECT_EQ(published_encoding(resolve(config)), PrefixEncoding::planes) << "a setting of a switch that is off";
}

}  // namespace
}  // namespace loopgauge
