// SPDX-License-Identifier: Apache-2.0
// A checkpoint in the Hugging Face Ouro layout, held as BF16 bit patterns exactly as stored.
// Loading is strict: see load_checkpoint.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "models/model_config.hpp"
#include "models/tensor.hpp"

namespace loopgauge {

using Bfloat16Bits = std::uint16_t;  // upper half of the IEEE binary32 pattern

struct LayerWeights {
  // Linear weights are [out, in] row-major; norm weights are [hidden].
  Tensor<Bfloat16Bits> q_proj, k_proj, v_proj;      // [heads * head_dim, hidden]
  Tensor<Bfloat16Bits> o_proj;                      // [hidden, heads * head_dim]
  Tensor<Bfloat16Bits> gate_proj, up_proj;          // [intermediate, hidden]
  Tensor<Bfloat16Bits> down_proj;                   // [hidden, intermediate]
  Tensor<Bfloat16Bits> input_layernorm;             // before attention
  Tensor<Bfloat16Bits> input_layernorm_2;           // on the o_proj output
  Tensor<Bfloat16Bits> post_attention_layernorm;    // before the MLP
  Tensor<Bfloat16Bits> post_attention_layernorm_2;  // on the down_proj output
};

struct Checkpoint {
  ModelConfig config;
  Tensor<Bfloat16Bits> embed_tokens;  // [vocab, hidden]
  std::vector<LayerWeights> layers;
  Tensor<Bfloat16Bits> norm;             // [hidden], after every loop
  Tensor<Bfloat16Bits> early_exit_gate;  // [1, hidden]
  Tensor<Bfloat16Bits> early_exit_bias;  // [1]
  Tensor<Bfloat16Bits> lm_head;          // [vocab, hidden]

  std::string sha256;              // lower-case hex over the safetensors files' bytes in file name order
  std::vector<std::string> notes;  // e.g. "model.norm.weight: F32 rounded to BF16 (nearest, ties to even)"
};

// Loads `<folder>/config.json` and `<folder>/model.safetensors`, or the shards named by `<folder>/model.safetensors.index.json`.
// Refuses, with a CheckpointError that names the file and the tensor: missing, unknown, duplicate or misshaped tensors; shards
// outside the folder; truncated, overlapping or non-covering data; element types other than BF16, F16 and F32 (the latter two are
// rounded to BF16 and noted; a value that overflows BF16 is refused); non-finite weights.
// `model.rotary_emb.inv_freq` buffers, which old exports carry, are ignored with a note.
Checkpoint load_checkpoint(const std::filesystem::path& folder);
// The same, but every fault is appended to `faults` instead of the first being thrown; the result is usable only when none was.
// UnsupportedError when the weights do not fit into memory, from either.
Checkpoint load_checkpoint(const std::filesystem::path& folder, std::vector<std::string>& faults);

}  // namespace loopgauge
