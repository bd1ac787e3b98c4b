// SPDX-License-Identifier: Apache-2.0
#include "harness/io/synthetic_checkpoint.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <map>

#include "models/philox.hpp"
#include "models/error.hpp"

namespace loopgauge::harness {
namespace {

using Key = std::array<std::uint32_t, 2>;

constexpr float kOutlierFactor = 8.0f;                                 // a power of two: exact in BF16
constexpr std::uint32_t kHiddenChannels = 1, kProjectionChannels = 2;  // purposes

// Sum of four independent 16-bit uniforms, less its mean (131070): an integer below 2^18, so exact in FP32.
std::int32_t centred_sum(std::uint32_t a, std::uint32_t b) {
  return static_cast<std::int32_t>((a & 0xffff) + (a >> 16) + (b & 0xffff) + (b >> 16)) - 131070;
}

// Standard deviation of centred_sum: a uniform on 0..n-1 has variance (n^2 - 1) / 12.
double centred_sum_deviation() { return std::sqrt((65536.0 * 65536.0 - 1.0) / 3.0); }

Bfloat16Bits rounded_to_bfloat16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  return static_cast<Bfloat16Bits>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

struct Distribution {
  float mean = 0;
  float scale = 0;  // per unit of centred_sum
};

Distribution distribution(const TensorSpec& tensor, const ModelConfig& config) {
  const auto ends_with = [&](std::string_view suffix) { return tensor.name.ends_with(suffix); };
  const double hidden = std::sqrt(static_cast<double>(config.hidden));
  double mean = 0, deviation = 0;
  if (ends_with("embed_tokens.weight")) {
    deviation = 1;
  } else if (ends_with("q_proj.weight") || ends_with("k_proj.weight")) {
    deviation = 1.5 / hidden;
  } else if (ends_with("layernorm_2.weight")) {
    mean = 1 / std::sqrt(2.0 * config.layers), deviation = 0.1 * mean;
  } else if (ends_with("norm.weight")) {
    mean = 1, deviation = 0.1;
  } else if (ends_with("lm_head.weight")) {
    deviation = 3 / hidden;
  } else if (ends_with("early_exit_gate.weight")) {
    deviation = 0.25 / hidden;
  } else if (ends_with("early_exit_gate.bias")) {
    mean = -1;
  } else {
    deviation = 1 / std::sqrt(static_cast<double>(tensor.shape.at(1)));
  }
  return {static_cast<float>(mean), static_cast<float>(deviation / centred_sum_deviation())};
}

// One flag per channel.
std::vector<std::uint8_t> draw_channels(int count, int channels, std::uint32_t purpose, Key key) {
  std::vector<std::uint8_t> chosen(static_cast<std::size_t>(channels), 0);
  for (std::uint32_t i = 0; count > 0; ++i) {
    std::uint8_t& flag = chosen[philox4x32_10({i, 0, 0xffffffff, purpose}, key)[0] % static_cast<std::uint32_t>(channels)];
    if (flag == 0) --count;
    flag = 1;
  }
  return chosen;
}

struct Synthesis {
  ModelConfig config;
  Key key{};
  std::map<std::string, std::uint32_t> index;  // of each tensor in checkpoint_tensors order
  std::vector<std::uint8_t> hidden_outliers, projection_outliers;
  std::size_t zero_key_rows = 0;

  void fill(const TensorSpec& tensor, std::int64_t first, std::span<Bfloat16Bits> out) const {
    const Distribution values = distribution(tensor, config);
    const std::uint32_t tensor_index = index.at(tensor.name);
    const bool hidden_scaled = tensor.name.ends_with("layernorm_2.weight");
    const bool rows_scaled = tensor.name.ends_with("k_proj.weight") || tensor.name.ends_with("v_proj.weight");
    const std::size_t zero_rows = tensor.name.ends_with("k_proj.weight") ? zero_key_rows : 0;
    const std::int64_t row_length = tensor.shape.size() > 1 ? tensor.shape[1] : 1;
    const auto count = static_cast<std::int64_t>(out.size());
#pragma omp parallel for schedule(static)
    for (std::int64_t i = 0; i < count; ++i) {
      const auto element = static_cast<std::uint64_t>(first + i);
      const std::uint64_t block = element / 2;
      const auto random = philox4x32_10({static_cast<std::uint32_t>(block), static_cast<std::uint32_t>(block >> 32), tensor_index, 0}, key);
      const std::size_t word = element % 2 == 0 ? 0 : 2;
      float value = values.mean + static_cast<float>(centred_sum(random[word], random[word + 1])) * values.scale;
      const std::size_t row = static_cast<std::size_t>(static_cast<std::int64_t>(element) / row_length);
      if ((hidden_scaled && hidden_outliers[row] != 0) || (rows_scaled && projection_outliers[row] != 0)) value *= kOutlierFactor;
      if (row < zero_rows) value = 0.0f;
      out[static_cast<std::size_t>(i)] = rounded_to_bfloat16(value);
    }
  }
};

}  // namespace

ModelConfig preset_config(std::string_view name) {
  ModelConfig config;
  config.loops = 4;
  config.rms_norm_eps = 1e-6f;
  config.head_dim = 128;
  if (name == "tiny") {
    config.layers = 4, config.hidden = 384, config.heads = 3, config.intermediate = 1024, config.vocab = 264;
    config.max_positions = 2048, config.rope_theta = 1e4, config.bos_token_id = 256, config.eos_token_id = 257;
  } else if (name == "ouro-1.4b" || name == "ouro-2.6b") {
    config.layers = name == "ouro-1.4b" ? 24 : 48;
    config.hidden = 2048, config.heads = 16, config.intermediate = 5632, config.vocab = 49152;
    config.max_positions = 65536, config.rope_theta = 1e6, config.bos_token_id = 0, config.eos_token_id = 0;
  } else {
    throw ConfigError("preset '" + std::string(name) + "' is not one of: tiny, ouro-1.4b, ouro-2.6b");
  }
  return config;
}

TensorValues synthetic_values(const ModelConfig& config, const SynthOptions& options) {
  const int most = std::min(config.hidden, config.projection_width());
  if (options.outlier_channels < 0 || options.outlier_channels > most) {
    throw ConfigError("outlier channels " + std::to_string(options.outlier_channels) + " are not between 0 and " + std::to_string(most) +
                      ", the channels that this shape has");
  }
  if (options.zero_key_heads < 0 || options.zero_key_heads > config.heads) {
    throw ConfigError("zero-key heads " + std::to_string(options.zero_key_heads) + " are not between 0 and " + std::to_string(config.heads) +
                      ", the heads that this shape has");
  }
  Synthesis synthesis;
  synthesis.config = config;
  synthesis.zero_key_rows = static_cast<std::size_t>(options.zero_key_heads) * static_cast<std::size_t>(config.head_dim);
  synthesis.key = {static_cast<std::uint32_t>(options.seed), static_cast<std::uint32_t>(options.seed >> 32)};
  synthesis.hidden_outliers = draw_channels(options.outlier_channels, config.hidden, kHiddenChannels, synthesis.key);
  synthesis.projection_outliers = draw_channels(options.outlier_channels, config.projection_width(), kProjectionChannels, synthesis.key);
  std::uint32_t next = 0;
  for (const TensorSpec& tensor : checkpoint_tensors(config)) synthesis.index.emplace(tensor.name, next++);
  return [synthesis](const TensorSpec& tensor, std::int64_t first, std::span<Bfloat16Bits> out) { synthesis.fill(tensor, first, out); };
}

}  // namespace loopgauge::harness
