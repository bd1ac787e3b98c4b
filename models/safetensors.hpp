// SPDX-License-Identifier: Apache-2.0
// The safetensors container: 8 bytes little-endian header length, a JSON header, the tensors' data. This reads and checks the header; it
// knows nothing of Ouro. Internal to models/ (and to the fuzz target).
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace loopgauge {

// Largest header read. A checkpoint of 1024 layers needs about 1.5 MB; the format's own limit is 100 MB.
inline constexpr std::uint64_t kMaximumSafetensorsHeaderBytes = 16u << 20;

struct SafetensorsEntry {
  std::string name;
  std::string dtype;                // as stored: "BF16", "F16", "F32", ...
  std::vector<std::int64_t> shape;  // extents, slowest first; empty for a scalar
  std::uint64_t begin = 0;          // first byte, from the start of the file
  std::uint64_t end = 0;            // one past the last byte, from the start of the file
};

struct SafetensorsHeader {
  std::uint64_t data_begin = 0;           // where the data section starts, from the start of the file
  std::vector<SafetensorsEntry> entries;  // in order of their data; together they cover the data section exactly
};

// Length of the JSON header from the file's first bytes (all of a file shorter than 8). Throws CheckpointError beginning with `label`
// when the file is shorter than it claims or the header is larger than kMaximumSafetensorsHeaderBytes.
std::uint64_t safetensors_header_bytes(std::span<const std::uint8_t> first_bytes, std::uint64_t file_bytes, const std::string& label);

// Parses the JSON header (the bytes after the length) of a file of `file_bytes`. Throws CheckpointError beginning with `label` and naming
// the tensor on: malformed or duplicate entries, unknown element types, a size that is not what shape and type need, data that overlaps,
// leaves a hole, reaches outside the file or does not cover it. Allocates in proportion to the header only.
SafetensorsHeader parse_safetensors_header(std::span<const std::uint8_t> header, std::uint64_t file_bytes, const std::string& label);

}  // namespace loopgauge
