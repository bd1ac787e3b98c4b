// SPDX-License-Identifier: Apache-2.0
// Names and shapes of the tensors of an Ouro checkpoint, 11 * layers + 5 of them (Hugging Face layout).
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "models/checkpoint.hpp"
#include "models/model_config.hpp"

namespace loopgauge {

struct TensorSpec {
  std::string name;                 // "model.layers.0.self_attn.q_proj.weight"
  std::vector<std::int64_t> shape;  // extents, slowest first
  bool operator==(const TensorSpec&) const = default;
};

// In model order: embedding, layers, final norm, exit gate, head.
std::vector<TensorSpec> checkpoint_tensors(const ModelConfig& config);

// Visits every tensor of `checkpoint` with its name and shape, in the same order. `checkpoint.layers` must have config.layers elements;
// the tensors themselves may still be empty.
void for_each_tensor(Checkpoint& checkpoint, const std::function<void(const TensorSpec&, Tensor<Bfloat16Bits>&)>& visit);
void for_each_tensor(const Checkpoint& checkpoint, const std::function<void(const TensorSpec&, const Tensor<Bfloat16Bits>&)>& visit);

// Number of elements of a shape. The limits of load_model_config keep it far inside 64 bits.
std::int64_t element_count(const std::vector<std::int64_t>& shape);

// Elements of all tensors.
std::int64_t parameter_count(const ModelConfig& config);

// Bytes of BF16 K and V of one token in all layers and loops.
std::int64_t kv_bytes_per_token(const ModelConfig& config);

}  // namespace loopgauge
