// SPDX-License-Identifier: Apache-2.0
#include "harness/bench/peers_bench.hpp"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "harness/bench/child_lines.hpp"
#include "harness/bench/reference_bench.hpp"
#include "harness/io/data_paths.hpp"
#include "models/error.hpp"

namespace loopgauge::harness {

namespace {

constexpr double kCheckSeconds = 120;  // PyTorch alone takes long to load from a cold disk

template <class Item, class Text>
std::string joined(const std::vector<Item>& items, Text&& text) {
  std::string out;
  for (const Item& item : items) out += (out.empty() ? "" : ",") + text(item);
  return out;
}

}  // namespace

std::string find_peer(const PeersOptions& options) {
  const std::string script = peers_script().string();
  std::string description, missing;
  const auto lacks = [&](const std::string& what) { missing += (missing.empty() ? "" : "; ") + what; };
  const optimized::DeviceStatus device = optimized::device_status();
  if (!device.available) lacks("a CUDA device (" + device.description + ")");
  const auto take = [&](const std::string& line) {
    const auto json = nlohmann::json::parse(line, nullptr, false);
    if (json.is_object()) description = json.value("description", "");
  };
  const ChildResult result = run_child({options.python, script, "--check"}, kCheckSeconds, take, ChildErrors::kept_back);
  if (result.exit_code == 127 && description.empty()) lacks("a Python to start ('" + options.python + "': " + result.last_error + "); --python names another");
  else if (result.timed_out) lacks("a PyTorch that starts (" + options.python + " took more than " + std::to_string(static_cast<int>(kCheckSeconds)) + " s)");
  else if (result.exit_code != 0) lacks("PyTorch on a CUDA device (" + result.last_error + ")");
  else if (description.empty()) lacks("a Python that runs the script ('" + options.python + "' says nothing of a PyTorch)");
  if (!missing.empty()) throw UnsupportedError("bench peers needs " + missing);
  return description;
}

void take_peer_line(const std::string& line, BenchOutput& output) {
  try {
    const auto json = nlohmann::json::parse(line);
    const std::string kind = json.at("kind");
    if (kind == "announce") {
      output.announce("pytorch: " + json.at("what").get<std::string>());
    } else if (kind == "peer") {
      output.peer(json.at("description"));
    } else if (kind == "left_out") {
      output.left_out("pytorch: " + json.at("what").get<std::string>(), json.at("reason"));
    } else if (kind == "row") {
      const std::vector<double> samples = json.at("samples_us");
      if (samples.empty()) throw FileError("a row without times");
      const Spread times = spread(samples);
      BenchRow row;
      row.engine = kTorchEngine;
      row.what = json.at("what");
      row.setting = json.at("setting");
      row.implementation = json.at("implementation");
      row.context = json.at("context");
      row.batch = json.at("batch");
      row.repeats = static_cast<std::int64_t>(samples.size());
      row.median_us = times.median;
      row.minimum_us = times.minimum;
      row.maximum_us = times.maximum;
      row.bytes = json.at("bytes");
      row.flops = json.at("flops");
      output.row(std::move(row), samples, {{0, "everything of PyTorch", "peak", json.at("peak_bytes").get<std::int64_t>()}});
    } else {
      throw FileError("an unknown kind '" + kind + "'");
    }
  } catch (const nlohmann::json::exception& error) {
    throw FileError(std::string("peers.py printed a line that is no row (") + error.what() + "): " + line.substr(0, 200));
  }
}

std::string run_peers(const PeersOptions& options, BenchOutput& output) {
  const std::vector<std::string> command{options.python,
                                         peers_script().string(),
                                         "--shapes",
                                         joined(options.steps, [](const optimized::StepShape& step) { return std::to_string(step.context) + "x" + std::to_string(step.batch); }),
                                         "--prompts",
                                         joined(options.prompts, [](int length) { return std::to_string(length); }),
                                         "--repeats",
                                         std::to_string(options.repeats),
                                         "--compile-seconds",
                                         std::to_string(options.compile_seconds),
                                         "--tune-seconds",
                                         std::to_string(options.tune_seconds)};
  const ChildResult result = run_child(command, options.seconds, [&](const std::string& line) { take_peer_line(line, output); });
  if (result.timed_out) return "peers.py ran longer than " + std::to_string(static_cast<int>(options.seconds)) + " s (--script-seconds)";
  if (result.exit_code != 0) return "peers.py ended with exit code " + std::to_string(result.exit_code) + ": " + result.last_error;
  return "";
}

}  // namespace loopgauge::harness
