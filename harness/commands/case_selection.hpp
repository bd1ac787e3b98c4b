// SPDX-License-Identifier: Apache-2.0
// Which cases a verb works on: `list` prints exactly what `sweep` with the same flags replays.
//   --set NAME|FILE            traces and cases of a set of data/sets, such as smoke; a word with a '/' or ending in .txt is a file
//   --traces FILE...           trace files instead of a set
//   --mode MODE...             execution modes, in place of those of the set
//   --grid GRID...             every trace under a grid of settings (harness/grid.hpp), in place of the enumerated ones
//   --filter GLOB...           keep the ids that match one of the globs
//   --shard i/n                keep the ids of one shard
#pragma once

#include <CLI/CLI.hpp>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "harness/case.hpp"

namespace loopgauge::harness {

// The shipped trace of that name, <data directory>/traces/<name>.h5. Throws FileError when there is no data directory or no such trace.
std::filesystem::path trace_path(const std::string& name);

struct CaseSelection {
  std::vector<Case> cases;                                   // of the shard, in the order of enumerate_cases
  std::vector<Case> request;                                 // of all shards, in the same order
  std::string shard;                                         // as given, empty without --shard
  std::map<std::string, std::filesystem::path> trace_files;  // by trace name, for every trace of the set
  std::string set;                                           // the set's name, empty with --traces
};

// The options above on one subcommand. Must outlive parsing.
class CaseSelectionOptions {
 public:
  explicit CaseSelectionOptions(CLI::App& command);

  // Reads the set and the head of every trace. Throws FileError and TraceError for them, ConfigError for flags and when the filters
  // leave no case (an empty shard of matching cases is legal and gives no case), UnsupportedError for a mode without a planner.
  CaseSelection resolve() const;

 private:
  std::string set_ = "smoke";
  std::vector<std::string> traces_;
  std::vector<std::string> modes_;
  std::vector<std::string> grids_;
  std::vector<std::string> filters_;
  std::string shard_;
};

}  // namespace loopgauge::harness
