// SPDX-License-Identifier: Apache-2.0
// Small models, configurations and descriptors for tests of the handoff.
#pragma once

#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "models/handoff/regions.hpp"

namespace loopgauge::test {

inline ModelConfig small_model() {
  ModelConfig model;
  model.layers = 2, model.loops = 4, model.hidden = 6, model.heads = 2, model.head_dim = 4, model.intermediate = 8, model.vocab = 300;
  model.max_positions = 1 << 20;
  model.rms_norm_eps = 1e-6f, model.rope_theta = 10000.0;
  return model;
}

inline AlgorithmConfig settings(const char* text, EncodingPolicy policy = EncodingPolicy::rolling, int window = 64) {
  AlgorithmConfig config;
  apply_switches(config, text);
  config.window = window;
  config.kv_residual_quantization.policy = policy;
  return config;
}

inline TraceRequest prompt_of(int length) {
  TraceRequest request;
  request.prompt.resize(static_cast<std::size_t>(length));
  std::iota(request.prompt.begin(), request.prompt.end(), 1);
  for (auto& token : request.prompt) token %= 300;
  return request;
}

inline handoff::Descriptor descriptor_of(const ModelConfig& model, const AlgorithmConfig& config, int prompt_length, int index = 0) {
  return handoff::make_descriptor(model, std::string(64, 'a'), EffectiveConfig::resolve(config, model), index, prompt_of(prompt_length),
                                  Profile::declared);
}

// One random change of a byte string: bytes set, inserted, removed, swapped, the end cut off, a word made extreme.
inline void mutate(std::vector<std::byte>& bytes, std::mt19937& generator) {
  const auto below = [&](std::size_t n) { return static_cast<std::size_t>(generator() % n); };
  if (bytes.empty()) {
    bytes.push_back(static_cast<std::byte>(below(256)));
    return;
  }
  const std::size_t at = below(bytes.size());
  switch (below(6)) {
    case 0:
      bytes[at] = static_cast<std::byte>(below(256));
      return;
    case 1:
      bytes[at] ^= static_cast<std::byte>(1u << below(8));
      return;
    case 2:
      bytes.insert(bytes.begin() + static_cast<std::ptrdiff_t>(at), static_cast<std::byte>(below(256)));
      return;
    case 3:
      bytes.erase(bytes.begin() + static_cast<std::ptrdiff_t>(at));
      return;
    case 4:
      bytes.resize(at);
      return;
    default: {
      const std::byte value = below(2) == 0 ? std::byte{0xFF} : std::byte{0};
      for (std::size_t i = at; i < std::min(bytes.size(), at + 4); ++i) bytes[i] = value;
    }
  }
}

}  // namespace loopgauge::test
