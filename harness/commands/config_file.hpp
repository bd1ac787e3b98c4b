// SPDX-License-Identifier: Apache-2.0
// Reader of configuration files: the subset of TOML that common_options.hpp describes.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace loopgauge::harness {

struct ConfigEntry {
  std::string key;    // "window", "token_sparse_prefill.enabled"
  std::string value;  // without quotes; an array's elements joined by ','
  int line = 0;       // from 1
};

// Throws FileError when the file cannot be read, ConfigError naming file and line for a line that is no section, assignment, comment
// or blank, and for a key given twice. Does not know which keys exist.
std::vector<ConfigEntry> read_config_file(const std::filesystem::path& path);

}  // namespace loopgauge::harness
