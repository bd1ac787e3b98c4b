// SPDX-License-Identifier: Apache-2.0
// The checkpoint on the device, projections that read the same input stacked into one matrix.
#pragma once

#include <cuda_runtime_api.h>

#include <vector>

#include "models/checkpoint.hpp"
#include "optimized/ops/numeric.cuh"
#include "optimized/runtime/device_allocator.hpp"

namespace loopgauge::optimized {

struct DeviceLayerWeights {
  DeviceBuffer qkv;                          // [3 * heads * head_dim, hidden]: q_proj, k_proj, v_proj
  DeviceBuffer o_proj;                       // [hidden, heads * head_dim]
  DeviceBuffer gate_up;                      // [2 * intermediate, hidden]: gate_proj, up_proj
  DeviceBuffer down_proj;                    // [hidden, intermediate]
  DeviceBuffer input_layernorm;              // [hidden], as the other three
  DeviceBuffer input_layernorm_2;
  DeviceBuffer post_attention_layernorm;
  DeviceBuffer post_attention_layernorm_2;
};

// BF16 throughout, row-major as in the checkpoint.
struct DeviceWeights {
  ModelConfig config;
  DeviceBuffer embed_tokens;                 // [vocab, hidden]
  DeviceBuffer lm_head;                      // [vocab, hidden]
  DeviceBuffer norm;                         // [hidden]
  DeviceBuffer early_exit_gate;              // [hidden]
  DeviceBuffer early_exit_bias;              // [1]
  std::vector<DeviceLayerWeights> layers;
};

// Throws UnsupportedError naming the extent that the kernels do not cover: head_dim 64 or 128; hidden, intermediate multiples of 8; vocab a multiple of 4.
void require_supported(const ModelConfig& config);

// Copies the checkpoint to the device and waits for the copies. Throws what require_supported throws, DeviceMemoryError when
// it does not fit.
DeviceWeights upload_weights(const Checkpoint& checkpoint, DeviceAllocator& allocator);

}  // namespace loopgauge::optimized
