// SPDX-License-Identifier: Apache-2.0
#include "harness/grid.hpp"

#include <algorithm>
#include <array>
#include <string_view>

#include "models/error.hpp"

namespace loopgauge::harness {
namespace {

bool t1(const AlgorithmConfig& config) { return config.token_sparse_prefill.enabled; }
bool s1(const AlgorithmConfig& config) { return config.sparse_decode_attention.enabled; }
bool q1(const AlgorithmConfig& config) { return config.kv_residual_quantization.enabled; }
bool execution_dependent(const AlgorithmConfig& config) {
  return q1(config) && config.kv_residual_quantization.timing == EncodingTiming::execution_dependent;
}

// A value is read as the parameter of a case id, so that a grid and an id spell alike and refuse alike.
AlgorithmConfig read_parameter(const AlgorithmConfig& config, const std::string& parameter) {
  AlgorithmConfig all = config;
  all.token_sparse_prefill.enabled = all.sparse_decode_attention.enabled = all.kv_residual_quantization.enabled = true;
  AlgorithmConfig read = parse_case_parameter(all, parameter);
  read.token_sparse_prefill.enabled = t1(config);
  read.sparse_decode_attention.enabled = s1(config);
  read.kv_residual_quantization.enabled = q1(config);
  return read;
}

struct Knob {
  std::string_view key;
  bool (*used)(const AlgorithmConfig&);
  std::string_view needs;
  AlgorithmConfig (*apply)(const AlgorithmConfig&, const std::string&);
};

constexpr std::array kKnobs{
    Knob{"switches", [](const AlgorithmConfig&) { return true; }, "",
         [](const AlgorithmConfig& config, const std::string& value) {
           AlgorithmConfig result = config;
           apply_switches(result, value);
           return result;
         }},
    Knob{"policy", q1, "q1",
         [](const AlgorithmConfig& config, const std::string& value) {
           AlgorithmConfig result = config;
           result.kv_residual_quantization.policy = parse_encoding_policy(value);
           return result;
         }},
    Knob{"timing", q1, "q1",
         [](const AlgorithmConfig& config, const std::string& value) {
           AlgorithmConfig result = config;
           result.kv_residual_quantization.timing = parse_encoding_timing(value);
           return result;
         }},
    Knob{"flush", execution_dependent, "q1 and timing=execution_dependent",
         [](const AlgorithmConfig& config, const std::string& value) { return read_parameter(config, "flush=" + value); }},
    Knob{"tail", q1, "q1", [](const AlgorithmConfig& config, const std::string& value) { return read_parameter(config, "tail" + value); }},
    Knob{"window", [](const AlgorithmConfig& config) { return t1(config) || q1(config); }, "t1 or q1",
         [](const AlgorithmConfig& config, const std::string& value) { return read_parameter(config, "w" + value); }},
    Knob{"retention", t1, "t1",
         [](const AlgorithmConfig& config, const std::string& value) { return read_parameter(config, "retention" + value); }},
    Knob{"reserve", t1, "t1",
         [](const AlgorithmConfig& config, const std::string& value) { return read_parameter(config, "reserve=" + value); }},
    Knob{"keys", s1, "s1", [](const AlgorithmConfig& config, const std::string& value) { return read_parameter(config, "keys" + value); }},
};

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  for (std::size_t begin = 0;;) {
    const std::size_t end = text.find(separator, begin);
    parts.push_back(text.substr(begin, end - begin));
    if (end == std::string::npos) return parts;
    begin = end + 1;
  }
}

struct Axis {
  const Knob* knob = nullptr;
  std::vector<std::string> values;
};

[[noreturn]] void fail(const std::string& grid, const std::string& problem) { throw ConfigError("grid '" + grid + "': " + problem); }

// Axes in the order of kKnobs: switches and timing decide which knobs have an effect.
std::vector<Axis> parse_grid(const std::string& grid) {
  std::vector<Axis> axes;
  for (const std::string& word : split(grid, ' ')) {
    if (word.empty()) continue;
    const std::size_t equals = word.find('=');
    const std::string key = word.substr(0, equals);
    const auto knob = std::find_if(kKnobs.begin(), kKnobs.end(), [&](const Knob& candidate) { return candidate.key == key; });
    if (equals == std::string::npos || knob == kKnobs.end()) {
      std::string known;
      for (const Knob& each : kKnobs) known += (known.empty() ? "" : ", ") + std::string(each.key);
      fail(grid, "'" + word + "' is not <key>=<value>,... with a key of: " + known);
    }
    if (std::any_of(axes.begin(), axes.end(), [&](const Axis& axis) { return axis.knob == &*knob; }))
      fail(grid, "'" + key + "' is given twice");
    axes.push_back({&*knob, split(word.substr(equals + 1), ',')});
    auto& values = axes.back().values;
    for (std::size_t i = 0; i < values.size(); ++i) {
      if (values[i].empty()) fail(grid, "'" + word + "' has an empty value");
      if (std::find(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(i), values[i]) !=
          values.begin() + static_cast<std::ptrdiff_t>(i))
        fail(grid, "'" + word + "' names '" + values[i] + "' twice");
    }
  }
  if (axes.empty()) fail(grid, "it names no axis, such as window=64,256");
  std::sort(axes.begin(), axes.end(), [](const Axis& a, const Axis& b) { return a.knob < b.knob; });
  return axes;
}

std::vector<AlgorithmConfig> settings_of(const std::string& grid) {
  AlgorithmConfig all_on;
  apply_switches(all_on, "t1s1q1");
  std::vector<AlgorithmConfig> settings{all_on};
  for (const Axis& axis : parse_grid(grid)) {
    std::vector<AlgorithmConfig> next;
    bool used = false;
    for (const AlgorithmConfig& config : settings) {
      if (!axis.knob->used(config)) {
        next.push_back(config);
        continue;
      }
      used = true;
      for (const std::string& value : axis.values) {
        try {
          next.push_back(axis.knob->apply(config, value));
        } catch (const ConfigError& error) {
          fail(grid, std::string(axis.knob->key) + ": " + error.what());
        }
      }
    }
    if (!used) fail(grid, std::string(axis.knob->key) + " has no effect without " + std::string(axis.knob->needs) + " among the settings");
    settings = std::move(next);
  }
  return settings;
}

}  // namespace

std::vector<AlgorithmConfig> grid_settings(std::span<const std::string> grids) {
  std::vector<AlgorithmConfig> settings{AlgorithmConfig{}};
  for (const std::string& grid : grids) {
    for (const AlgorithmConfig& config : settings_of(grid)) {
      const std::string text = settings_text(config);
      const auto same = [&](const AlgorithmConfig& other) { return settings_text(other) == text; };
      if (std::none_of(settings.begin(), settings.end(), same)) settings.push_back(config);
    }
  }
  return settings;
}

std::vector<Case> grid_cases(std::span<const CaseTrace> traces, std::span<const AlgorithmConfig> settings,
                             std::span<const ModeSpec> modes) {
  const ModeSpec serial;
  std::vector<Case> cases;
  for (const CaseTrace& trace : traces) {
    const std::span<const ModeSpec> chosen = !modes.empty()        ? modes
                                             : trace.modes.empty() ? std::span(&serial, 1)
                                                                   : std::span<const ModeSpec>(trace.modes);
    for (const AlgorithmConfig& config : settings) {
      for (const ModeSpec& mode : chosen) {
        cases.push_back({mode, normalized(config), trace.name});
        require_runnable(cases.back());
      }
    }
  }
  return cases;
}

}  // namespace loopgauge::harness
