// SPDX-License-Identifier: Apache-2.0
// Shape and constants of an Ouro checkpoint (SPEC.md, section "Model arithmetic"; config.json of the Hugging Face layout).
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace loopgauge {

// Bounds far above every released model. They keep later size arithmetic inside 64 bits and refuse absurd files before anything is
// allocated. Positions stay within 2^24, up to where every integer is exact in FP32 (the RoPE angle starts from one).
inline constexpr int kMaximumLayers = 1024;
inline constexpr int kMaximumLoops = 64;
inline constexpr int kMaximumHidden = 1 << 16;
inline constexpr int kMaximumHeads = 1024;
inline constexpr int kMaximumHeadDim = 1024;
inline constexpr int kMaximumIntermediate = 1 << 20;
inline constexpr int kMaximumVocab = 1 << 24;
inline constexpr int kMaximumPositions = 1 << 24;
inline constexpr double kMaximumRopeTheta = 1e12;

struct ModelConfig {
  int layers = 0;  // physical layers, shared by all loops
  int loops = 0;   // total_ut_steps
  int hidden = 0;
  int heads = 0;     // query heads == key/value heads (multi-head attention only)
  int head_dim = 0;  // even; heads * head_dim need not equal hidden
  int intermediate = 0;
  int vocab = 0;
  int max_positions = 0;
  float rms_norm_eps = 0.0f;
  double rope_theta = 0.0;
  int bos_token_id = -1;  // -1: absent
  int eos_token_id = -1;  // -1: absent

  int projection_width() const { return heads * head_dim; }
};

// Reads and validates `<folder>/config.json`. Throws CheckpointError naming the file, the key, what was found and what is
// supported: no value is ever taken from a default that the file did not state, except the documented ones
// (num_key_value_heads null = heads, head_dim absent = hidden / heads).
ModelConfig load_model_config(const std::filesystem::path& folder);
// The same, but every fault is appended to `faults` instead of the first being thrown; the result is usable only when none was. `notes`
// receives a sentence for each key that is ignored although other software may read it.
ModelConfig load_model_config(const std::filesystem::path& folder, std::vector<std::string>& notes, std::vector<std::string>& faults);

}  // namespace loopgauge
