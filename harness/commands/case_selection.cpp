// SPDX-License-Identifier: Apache-2.0
#include "harness/commands/case_selection.hpp"

#include <algorithm>

#include "harness/io/data_paths.hpp"
#include "harness/io/set_file.hpp"
#include "harness/io/trace_file.hpp"
#include "models/error.hpp"

namespace loopgauge::harness {
namespace {

bool has_exit_depths(const Trace& trace) {
  return std::all_of(trace.requests.begin(), trace.requests.end(),
                     [](const TraceRequest& request) { return request.max_new_tokens == 0 || !request.exit_depths.empty(); }) &&
         std::any_of(trace.requests.begin(), trace.requests.end(),
                     [](const TraceRequest& request) { return !request.exit_depths.empty(); });
}

// Cases that differ in the mode only stay in one shard: their bits are compared with each other, so they share runs.
std::string shard_key(const Case& value) { return settings_text(value.config) + "/" + value.trace; }

std::vector<std::filesystem::path> trace_paths_of_set(const std::string& set) {
  const bool is_file = set.find('/') != std::string::npos || set.ends_with(".txt");
  const std::filesystem::path set_file = is_file ? std::filesystem::path(set) : data_directory() / "sets" / (set + ".txt");
  std::vector<std::filesystem::path> paths;
  for (const std::string& name : read_set(set_file)) paths.push_back(trace_path(name));
  return paths;
}

}  // namespace

std::filesystem::path trace_path(const std::string& name) {
  const std::filesystem::path path = data_directory() / "traces" / (name + ".h5");
  if (!std::filesystem::exists(path)) {
    throw FileError("trace '" + name + "' is not a shipped one: " + path.string() +
                    " does not exist (loopgauge list --set full shows the names; --trace FILE, or --traces for a sweep, takes any file)");
  }
  return path;
}

CaseSelectionOptions::CaseSelectionOptions(CLI::App& command) {
  CLI::Option* set = command.add_option("--set", set_, "Traces: smoke, ci, full, or a set file (a path with '/' or ending in .txt)");
  set->type_name("SET")->capture_default_str();
  command.add_option("--traces", traces_, "Trace files instead of a set")->type_name("FILE")->excludes(set);
  command.add_option("--mode", modes_, "Execution modes: serial, split, split.p<tokens> (default serial split)")->type_name("MODE");
  command.add_option("--filter", filters_, "Keep the case ids that match one of these globs (* any characters, ? one)")->type_name("GLOB");
  command.add_option("--shard", shard_, "Keep shard i of n, 1 <= i <= n; the n shards partition the cases")->type_name("i/n");
}

CaseSelection CaseSelectionOptions::resolve() const {
  std::vector<ModeSpec> modes;
  for (const std::string& mode : modes_) {
    modes.push_back(parse_mode(mode));
    if (std::find(modes.begin(), modes.end() - 1, modes.back()) != modes.end() - 1) throw ConfigError("--mode " + mode + " is given twice");
  }
  if (modes.empty()) modes = default_modes();
  const Shard shard = shard_.empty() ? Shard{} : parse_shard(shard_);

  CaseSelection selection;
  selection.set = traces_.empty() ? set_ : "";
  selection.shard = shard_;
  const std::vector<std::filesystem::path> paths =
      traces_.empty() ? trace_paths_of_set(set_) : std::vector<std::filesystem::path>(traces_.begin(), traces_.end());
  std::vector<CaseTrace> traces;
  for (const std::filesystem::path& path : paths) {
    const Trace trace = read_trace(path);
    const auto [earlier, is_new] = selection.trace_files.emplace(trace.name, path);
    if (!is_new) {
      throw ConfigError("traces " + earlier->second.string() + " and " + path.string() + " have the same name '" + trace.name +
                        "', so their case ids would be the same");
    }
    traces.push_back({trace.name, has_exit_depths(trace)});
  }

  const std::vector<Case> all = enumerate_cases(traces, modes);
  for (const Case& value : all) {
    const std::string id = case_id(value);
    const bool matches = filters_.empty() ||
                         std::any_of(filters_.begin(), filters_.end(), [&](const std::string& filter) { return glob_match(filter, id); });
    if (!matches) continue;
    selection.request.push_back(value);
    if (in_shard(shard_key(value), shard)) selection.cases.push_back(value);
  }
  if (selection.request.empty()) {
    std::string globs;
    for (const std::string& filter : filters_) globs += " '" + filter + "'";
    throw ConfigError("none of the " + std::to_string(all.size()) + " cases matches --filter" + globs + " (loopgauge list prints them)");
  }
  return selection;
}

}  // namespace loopgauge::harness
