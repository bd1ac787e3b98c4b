// SPDX-License-Identifier: Apache-2.0
// Settings that several verbs share: execution mode, algorithm and execution. One table (common_options.cpp) gives every setting its
// flag, its key in a configuration file, its reader and the condition under which it has an effect.
//
// Configuration file (--config FILE): lines `key = value` under `[section]` headers, a subset of TOML. Values are words, numbers,
// true or false, "quoted text", or arrays of numbers `[10000, 10000, 2500, 1000]`; `#` starts a comment. Example:
//
//     mode = "split"
//     piece_tokens = 100
//     window = 256
//     exit = "threshold:0.9"
//     min_loops = 2
//     checkpoint = "models/ouro-tiny"
//     executor = "reference"
//     profile = "declared"
//
//     [token_sparse_prefill]
//     enabled = true
//     retention_bp = [10000, 10000, 2500, 1000]
//     reserve = "none"
//
//     [sparse_decode_attention]
//     enabled = true
//     key_fraction_bp = 1000
//
//     [kv_residual_quantization]
//     enabled = true
//     policy = "rolling"
//     timing = "serial_aligned"
//     flush = "committed"
//     tail = 64
//
// Unknown keys, keys given twice and values that do not read are usage errors that name file and line. Flags win over the file. A flag
// without effect (--policy without q1) is a usage error; a key of a switched-off section or of another mode is not, so that one file serves
// all. Mode block_spec or pipeline_spec may be named without its parameters (block_spec+pd), which draft_depth and draft_length then give; a
// parameter that is given by the mode and by itself, both by flags or both in the file, is a usage error.
#pragma once

#include <CLI/CLI.hpp>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "harness/case.hpp"
#include "models/checkpoint.hpp"
#include "models/executor.hpp"

namespace loopgauge::harness {

enum class SettingGroup {
  mode,       // --mode, --piece-tokens, --draft-depth, --draft-length
  algorithm,  // --switches, --window, --retention, --reserve, --key-fraction, --policy, --timing, --flush, --tail, --exit, --min-loops
  execution,  // --checkpoint, --executor, --profile
};

struct Settings {
  ModeSpec mode;
  AlgorithmConfig config;
  std::filesystem::path checkpoint;    // default: the shipped model
  std::string executor = "reference";  // a word that the verb interprets
  Profile profile = Profile::declared;
};

// The options of the chosen groups on one subcommand. Must outlive parsing.
class SettingOptions {
 public:
  // Adds --config and the flags of `groups` to `command`.
  SettingOptions(CLI::App& command, std::vector<SettingGroup> groups);

  // Defaults, then the configuration file, then flags. Throws FileError for an unreadable file, ConfigError for everything else.
  Settings resolve() const;

  // Flags given on the command line, of one group, in table order: for verbs that refuse a combination.
  std::vector<std::string> given_flags(SettingGroup group) const;

 private:
  std::vector<SettingGroup> groups_;
  std::string config_file_;
  std::map<std::string, std::string> flag_texts_;  // by flag
  std::map<std::string, CLI::Option*> flag_options_;
};

// "console", "json", "csv": the words of `accepted` that --output may take. Throws ConfigError listing them.
void require_output(std::string_view output, std::span<const std::string_view> accepted);

}  // namespace loopgauge::harness
