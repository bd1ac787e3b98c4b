// SPDX-License-Identifier: Apache-2.0
#include "optimized/bench/random_weights.hpp"

#include "optimized/bench/device_fill.cuh"

namespace loopgauge::optimized {

DeviceWeights random_weights(const ModelConfig& shape, DeviceAllocator& allocator, std::uint32_t seed, cudaStream_t stream) {
  require_supported(shape);
  const auto hidden = static_cast<std::size_t>(shape.hidden), width = static_cast<std::size_t>(shape.projection_width());
  const auto intermediate = static_cast<std::size_t>(shape.intermediate), vocab = static_cast<std::size_t>(shape.vocab);
  const auto random = [&](std::size_t count, float scale) {
    DeviceBuffer buffer = allocator.allocate_array<Bfloat16>(MemoryCategory::weights, count);
    fill_random(buffer.as<Bfloat16>(), count, ++seed, scale, stream);
    return buffer;
  };
  constexpr float kMatrix = 0.03f;
  DeviceWeights weights;
  weights.config = shape;
  weights.embed_tokens = random(vocab * hidden, 1.0f);
  weights.lm_head = random(vocab * hidden, kMatrix);
  weights.norm = random(hidden, 1.0f);
  weights.early_exit_gate = random(hidden, kMatrix);
  weights.early_exit_bias = random(1, 1.0f);
  for (int layer = 0; layer < shape.layers; ++layer) {
    DeviceLayerWeights w;
    w.qkv = random(3 * width * hidden, kMatrix);
    w.o_proj = random(hidden * width, kMatrix);
    w.gate_up = random(2 * intermediate * hidden, kMatrix);
    w.down_proj = random(hidden * intermediate, kMatrix);
    w.input_layernorm = random(hidden, 1.0f);
    w.input_layernorm_2 = random(hidden, 1.0f);
    w.post_attention_layernorm = random(hidden, 1.0f);
    w.post_attention_layernorm_2 = random(hidden, 1.0f);
    weights.layers.push_back(std::move(w));
  }
  return weights;
}

}  // namespace loopgauge::optimized
