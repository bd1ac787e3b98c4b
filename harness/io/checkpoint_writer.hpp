// SPDX-License-Identifier: Apache-2.0
// Writes a checkpoint folder in the Hugging Face Ouro layout: config.json and one safetensors file, or shards with their index.
// The same configuration, values and options give the same bytes on every machine.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <span>
#include <string>

#include "harness/io/atomic_output.hpp"
#include "models/checkpoint_layout.hpp"

namespace loopgauge::harness {

// Fills `out` with the BF16 values of elements [first, first + out.size()) of the tensor, row-major. Tensors are asked for piece by piece,
// in ascending order of their names and elements, so that a model never has to be in memory. May throw: nothing is left behind then.
using TensorValues = std::function<void(const TensorSpec& tensor, std::int64_t first, std::span<Bfloat16Bits> out)>;

// The values of a loaded checkpoint, which must outlive the result.
TensorValues values_of(const Checkpoint& checkpoint);

struct CheckpointWriteOptions {
  std::uint64_t shard_bytes = 0;                // most tensor bytes of one file (a larger tensor has a file of its own); 0: a single file
  std::map<std::string, std::string> metadata;  // further strings for the files' __metadata__
  IfExists if_exists = IfExists::refuse;        // what to do with a folder that already holds something
};

// The folder appears under its name when it is complete. Throws FileError when the parent is missing, when the disk is too small or a write
// fails, and when the folder exists with content: `replace` replaces a checkpoint, but never a folder that holds anything else.
// What a killed process left, `.<folder>.partial-<process>-<number>`, is removed by the next that writes the same folder.
void write_checkpoint(const std::filesystem::path& folder, const ModelConfig& config, const TensorValues& values,
                      const CheckpointWriteOptions& options);

}  // namespace loopgauge::harness
