// SPDX-License-Identifier: Apache-2.0
#include "harness/commands/case_selection.hpp"

#include <algorithm>
#include <string>
#include <unordered_set>

#include "harness/grid.hpp"
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

std::string shipped_sets() {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(data_directory() / "sets")) {
    if (entry.path().extension() == ".txt") names.push_back(entry.path().stem().string());
  }
  std::sort(names.begin(), names.end());
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

TraceSet read_named_set(const std::string& set) {
  if (set.find('/') != std::string::npos || set.ends_with(".txt")) return read_set(set);
  const std::filesystem::path path = data_directory() / "sets" / (set + ".txt");
  if (!std::filesystem::exists(path)) {
    throw FileError("set '" + set + "' is not one of " + shipped_sets() + "; a set file of your own is a path with '/' or ending in .txt");
  }
  return read_set(path);
}

// What a line of the set file says, read by `read`; a refusal names file and line.
template <typename Read>
auto read_line(const TraceSet& set, int line, Read&& read) {
  const std::string place = set.path.string() + ":" + std::to_string(line) + ": ";
  try {
    return read();
  } catch (const ConfigError& error) {
    throw FileError(place + error.what());
  } catch (const FileError& error) {
    throw FileError(place + error.what());
  }
}

bool contains(const std::vector<ModeSpec>& modes, const ModeSpec& mode) {
  return std::find(modes.begin(), modes.end(), mode) != modes.end();
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
  CLI::Option* set = command.add_option(
      "--set", set_, "Traces: smoke, ci, full, modes, speculation, speculation-long, pd, pd-ci, quality, or a set file (a path with '/' or ending in .txt)");
  set->type_name("SET")->capture_default_str();
  command.add_option("--traces", traces_, "Trace files instead of a set")->type_name("FILE")->excludes(set);
  command
      .add_option("--mode", modes_,
                  "Execution modes, such as serial, split.p100, wcpb+prefix+async (default: those of the set, else serial split)")
      ->type_name("MODE");
  command
      .add_option("--grid", grids_,
                  "Settings in place of those of the set, as the cross product of axes: 'switches=t1s0q0,t1s1q1 window=64,256 "
                  "policy=rolling'; axes "
                  "are switches, policy, timing, flush, tail, window, retention, reserve, keys. Several grids are joined; t0s0q0 is always there")
      ->type_name("GRID");
  command.add_option("--filter", filters_, "Keep the case ids that match one of these globs (* any characters, ? one)")->type_name("GLOB");
  command.add_option("--shard", shard_, "Keep shard i of n, 1 <= i <= n; the n shards partition the cases")->type_name("i/n");
}

CaseSelection CaseSelectionOptions::resolve() const {
  std::vector<ModeSpec> modes;
  for (const std::string& mode : modes_) {
    modes.push_back(parse_mode(mode));
    if (std::find(modes.begin(), modes.end() - 1, modes.back()) != modes.end() - 1) throw ConfigError("--mode " + mode + " is given twice");
  }
  const Shard shard = shard_.empty() ? Shard{} : parse_shard(shard_);

  CaseSelection selection;
  selection.set = traces_.empty() ? set_ : "";
  selection.shard = shard_;
  const auto add_trace = [&](const std::filesystem::path& path) {
    Trace trace = read_trace(path);
    const auto [earlier, is_new] = selection.trace_files.emplace(trace.name, path);
    if (!is_new) {
      throw ConfigError("traces " + earlier->second.string() + " and " + path.string() + " have the same name '" + trace.name +
                        "', so their case ids would be the same");
    }
    return CaseTrace{trace.name, has_exit_depths(trace)};
  };
  std::vector<CaseTrace> traces;
  std::vector<Case> listed;
  if (traces_.empty()) {
    const TraceSet set = read_named_set(set_);
    for (const SetTrace& entry : set.traces) {
      read_line(set, entry.line, [&] {
        traces.push_back(add_trace(trace_path(entry.name)));
        for (const std::string& mode : entry.modes) traces.back().modes.push_back(parse_mode(mode));
        if (entry.window != 0) traces.back().window = entry.window;
      });
    }
    for (const SetCase& entry : set.cases) {
      listed.push_back(read_line(set, entry.line, [&] {
        const Case value = parse_case_id(entry.id);
        require_runnable(value);
        if (!selection.trace_files.contains(value.trace)) add_trace(trace_path(value.trace));
        return value;
      }));
    }
  } else {
    for (const std::string& path : traces_) traces.push_back(add_trace(path));
  }

  std::vector<Case> all = grids_.empty() ? enumerate_cases(traces, modes) : grid_cases(traces, grid_settings(grids_), modes);
  if (!grids_.empty()) listed.clear();
  std::unordered_set<std::string> ids;
  if (!listed.empty()) {
    for (const Case& value : all) ids.insert(case_id(value));
  }
  for (const Case& value : listed) {
    if (!ids.insert(case_id(value)).second) throw ConfigError("set " + set_ + " holds case " + case_id(value) + " twice");
    if (modes.empty() || contains(modes, value.mode)) all.push_back(value);
  }
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
