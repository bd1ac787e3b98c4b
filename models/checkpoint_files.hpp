// SPDX-License-Identifier: Apache-2.0
// The files of a checkpoint and what their headers say, checked before any weight is read. Internal to models/.
#pragma once

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "models/model_config.hpp"
#include "models/safetensors.hpp"

namespace loopgauge {

struct Shard {
  std::filesystem::path path;
  std::ifstream stream;              // positioned at the first data byte
  std::vector<std::uint8_t> prefix;  // length and header, as read
  SafetensorsHeader header;
};

struct CheckpointFiles {
  std::vector<Shard> shards;                   // in file name order
  std::map<std::string, std::string> indexed;  // tensor name -> shard file name; empty without an index
};

// Finds `model.safetensors` or the shards of its index and reads every header. Appends a sentence to `faults` for: no or two checkpoints in
// the folder, an index that is malformed or names anything but plain file names, files that are missing, not regular or links out of
// the folder, and everything that parse_safetensors_header refuses. The result is complete only when none was.
CheckpointFiles open_checkpoint_files(const std::filesystem::path& folder, std::vector<std::string>& notes,
                                      std::vector<std::string>& faults);

// Compares the headers with each other, the index and the shapes that `config` needs: duplicate, misplaced, unknown, misshaped and missing
// tensors, element types other than BF16, F16 and F32.
void check_tensors(const CheckpointFiles& files, const ModelConfig& config, const std::filesystem::path& folder,
                   std::vector<std::string>& notes, std::vector<std::string>& faults);

// `inv_freq` buffers of old exports: not weights, recomputed from rope_theta when the model runs.
bool is_rotary_buffer(const std::string& name);

}  // namespace loopgauge
