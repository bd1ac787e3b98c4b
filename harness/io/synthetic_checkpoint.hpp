// SPDX-License-Identifier: Apache-2.0
// Random weights of any Ouro shape, the same bits on every machine: what can be tested on them needs no download.
//
// Generator "synth-v1". Element e of tensor t (index in checkpoint_tensors order) uses half a Philox4x32-10 block: counter
// (low and high 32 bits of e / 2, t, 0), key (low and high 32 bits of the seed), words 0 and 1 for even e, 2 and 3 for odd e. Its four
// 16-bit halves, summed and centred, are a near-normal integer of known variance; times an FP32 scale, plus a mean, one rounding each;
// then BF16 (nearest, ties to even).
//
//   tensor                                             mean             standard deviation
//   embed_tokens                                       0                1
//   q_proj, k_proj                                     0                1.5 / sqrt(hidden): attention logits spread by 2.25, not flat
//   v_proj, o_proj, gate_proj, up_proj, down_proj      0                1 / sqrt(inputs)
//   input_layernorm, post_attention_layernorm, norm    1                0.1
//   input_layernorm_2, post_attention_layernorm_2      s                0.1 s, s = 1 / sqrt(2 layers): one loop adds about as much
//                                                                       power as it was given, so states stay bounded and keep moving
//   lm_head                                            0                3 / sqrt(hidden)
//   early_exit_gate.weight                             0                0.25 / sqrt(hidden)
//   early_exit_gate.bias                               -1               0: gate logits stay near -1, far below the 1.65 from which
//                                                                       BF16 arithmetic exits at threshold 1
//
// Outlier channels, as trained models have them and as INT4 codecs fear them: with N > 0, N hidden channels (the first N distinct values of
// word 0 of counters (i, 0, 0xffffffff, 1) modulo hidden) have the weights of input_layernorm_2 and post_attention_layernorm_2
// multiplied by 8, and N output channels of k_proj and v_proj (the same with purpose 2, modulo heads * head_dim) their rows by 8.
//
// Zero-key heads: the first N heads have a k_proj of zeros, so all their attention logits are equal and every selection among them is
// decided by the order of ties.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "harness/io/checkpoint_writer.hpp"
#include "models/model_config.hpp"

namespace loopgauge::harness {

inline constexpr std::string_view kSynthVersion = "synth-v1";

struct SynthOptions {
  std::uint64_t seed = 1;
  int outlier_channels = 0;
  int zero_key_heads = 0;
};

// "tiny" (the shape of the shipped model), "ouro-1.4b", "ouro-2.6b". Throws ConfigError listing them.
ModelConfig preset_config(std::string_view name);

// Throws ConfigError when more outlier channels or zero-key heads are asked for than there are channels or heads.
TensorValues synthetic_values(const ModelConfig& config, const SynthOptions& options);

}  // namespace loopgauge::harness
