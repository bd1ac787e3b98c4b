// SPDX-License-Identifier: Apache-2.0
#include "optimized/device_weights.hpp"

#include <initializer_list>
#include <string>

#include "optimized/ops/row_norm.cuh"
#include "optimized/runtime/cuda_check.hpp"
#include "optimized/runtime/stream.hpp"

namespace loopgauge::optimized {
namespace {

void require(bool holds, const std::string& what) {
  if (!holds) throw UnsupportedError("the CUDA runtime does not support this model: " + what);
}

// Stacks the tensors' rows.
DeviceBuffer upload(std::initializer_list<const Tensor<Bfloat16Bits>*> parts, DeviceAllocator& allocator) {
  std::size_t count = 0;
  for (const auto* part : parts) count += part->data.size();
  DeviceBuffer buffer = allocator.allocate_array<Bfloat16Bits>(MemoryCategory::weights, count);
  auto* target = buffer.as<Bfloat16Bits>();
  for (const auto* part : parts) {
    const std::size_t bytes = part->data.size() * sizeof(Bfloat16Bits);
    LOOPGAUGE_CUDA_CHECK(cudaMemcpyAsync(target, part->data.data(), bytes, cudaMemcpyHostToDevice, allocator.stream()));
    target += part->data.size();
  }
  return buffer;
}

}  // namespace

void require_supported(const ModelConfig& config) {
  require(config.head_dim == 64 || config.head_dim == 128, "head_dim is " + std::to_string(config.head_dim) + ", not 64 or 128");
  require(config.hidden % 8 == 0 && config.hidden <= kMaxNormWidth / 2,
          "hidden is " + std::to_string(config.hidden) + ", not a multiple of 8 of at most " + std::to_string(kMaxNormWidth / 2));
  require(config.intermediate % 8 == 0, "intermediate is " + std::to_string(config.intermediate) + ", not a multiple of 8");
  require(config.vocab % 4 == 0, "vocab is " + std::to_string(config.vocab) + ", not a multiple of 4");
}

DeviceWeights upload_weights(const Checkpoint& checkpoint, DeviceAllocator& allocator) {
  require_supported(checkpoint.config);
  DeviceWeights weights;
  weights.config = checkpoint.config;
  weights.embed_tokens = upload({&checkpoint.embed_tokens}, allocator);
  weights.lm_head = upload({&checkpoint.lm_head}, allocator);
  weights.norm = upload({&checkpoint.norm}, allocator);
  weights.early_exit_gate = upload({&checkpoint.early_exit_gate}, allocator);
  weights.early_exit_bias = upload({&checkpoint.early_exit_bias}, allocator);
  for (const LayerWeights& layer : checkpoint.layers) {
    DeviceLayerWeights device;
    device.qkv = upload({&layer.q_proj, &layer.k_proj, &layer.v_proj}, allocator);
    device.o_proj = upload({&layer.o_proj}, allocator);
    device.gate_up = upload({&layer.gate_proj, &layer.up_proj}, allocator);
    device.down_proj = upload({&layer.down_proj}, allocator);
    device.input_layernorm = upload({&layer.input_layernorm}, allocator);
    device.input_layernorm_2 = upload({&layer.input_layernorm_2}, allocator);
    device.post_attention_layernorm = upload({&layer.post_attention_layernorm}, allocator);
    device.post_attention_layernorm_2 = upload({&layer.post_attention_layernorm_2}, allocator);
    weights.layers.push_back(std::move(device));
  }
  allocator.stream().synchronize();  // the checkpoint need not outlive this call
  return weights;
}

}  // namespace loopgauge::optimized
