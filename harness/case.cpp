// SPDX-License-Identifier: Apache-2.0
// Spelling and reading of case ids. A parsed id is spelled again and must come back unchanged, so the writer alone defines the canonical
// form and the reader only has to explain what it cannot understand.
#include "harness/case.hpp"

#include <algorithm>
#include <array>
#include <charconv>

#include "models/error.hpp"

namespace loopgauge::harness {
namespace {

constexpr std::array<std::string_view, 11> kModeNames{"serial",     "split",         "mixed", "wcpb",   "async",  "graph",
                                                      "block_spec", "pipeline_spec", "pd",    "prefix", "preempt"};

constexpr std::string_view kSettingsForm =
    "t0s0q0 to t1s1q1, with q1 :policy:timing, then parameters such as w64, retention10000-10000-5000-2500, keys500, tail32, "
    "flush=eager, exit=threshold0.9, minloops2";

std::string in_quotes(std::string_view text) { return "'" + std::string(text) + "'"; }

std::string joined(std::span<const std::string_view> words) {
  std::string text;
  for (std::string_view word : words) text += (text.empty() ? "" : ", ") + std::string(word);
  return text;
}

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  for (std::size_t begin = 0;;) {
    const std::size_t end = text.find(separator, begin);
    parts.push_back(text.substr(begin, end - begin));
    if (end == std::string_view::npos) return parts;
    begin = end + 1;
  }
}

// The digits after a parameter's name. `part` is the whole parameter, for the message.
int parse_number(std::string_view digits, std::string_view part) {
  int value = 0;
  const auto [end, status] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
  if (digits.empty() || digits[0] == '-' || status != std::errc{} || end != digits.data() + digits.size()) {
    throw ConfigError("case parameter " + in_quotes(part) + ": " + in_quotes(digits) + " is not a whole number of at most 2147483647");
  }
  return value;
}

float parse_threshold(std::string_view number, std::string_view part) {
  float value = 0;
  const auto [end, status] = std::from_chars(number.data(), number.data() + number.size(), value);
  if (status != std::errc{} || end != number.data() + number.size() || !(value >= 0.0f && value <= 1.0f)) {
    throw ConfigError("case parameter " + in_quotes(part) + ": " + in_quotes(number) + " is not a threshold between 0 and 1, such as 0.9");
  }
  return value;
}

// A parameter is spelled as its name directly followed by its value.
bool take_prefix(std::string_view& text, std::string_view prefix) {
  if (!text.starts_with(prefix)) return false;
  text.remove_prefix(prefix.size());
  return true;
}

std::string number_text(int value, std::string_view what) {
  if (value < 0) throw ConfigError(std::string(what) + " " + std::to_string(value) + " is negative and has no spelling in a case id");
  return std::to_string(value);
}

std::string threshold_text(float threshold) {
  if (!(threshold >= 0.0f && threshold <= 1.0f)) {
    throw ConfigError("exit threshold " + std::to_string(threshold) + " is not between 0 and 1 and has no spelling in a case id");
  }
  std::array<char, 32> buffer{};
  const auto result = std::to_chars(buffer.data(), buffer.data() + buffer.size(), threshold);
  return {buffer.data(), result.ptr};
}

bool takes_threshold(ExitMode mode) { return mode == ExitMode::threshold || mode == ExitMode::delayed; }

void parse_exit(AlgorithmConfig& config, std::string_view value, std::string_view part) {
  if (value == "trace") {
    config.exit.mode = ExitMode::trace;
  } else if (take_prefix(value, "threshold")) {
    config.exit.mode = ExitMode::threshold;
    config.exit.threshold = parse_threshold(value, part);
  } else if (take_prefix(value, "delayed")) {
    config.exit.mode = ExitMode::delayed;
    config.exit.threshold = parse_threshold(value, part);
  } else {
    throw ConfigError("case parameter " + in_quotes(part) +
                      " is not one of: exit=trace, exit=threshold0.9, exit=delayed0.9 (full is the default and not written)");
  }
}

void parse_retention(AlgorithmConfig& config, std::string_view value, std::string_view part) {
  const std::vector<std::string_view> loops = split(value, '-');
  if (loops.size() != kLoops) {
    throw ConfigError("case parameter " + in_quotes(part) + " does not give four basis points, such as retention10000-10000-5000-2500");
  }
  for (std::size_t i = 0; i < loops.size(); ++i) config.token_sparse_prefill.retention_bp[i] = parse_number(loops[i], part);
}

void need_switch(bool enabled, std::string_view part, std::string_view needed) {
  if (!enabled) throw ConfigError("case parameter " + in_quotes(part) + " has no effect without " + std::string(needed));
}

// Returns the parameter's name, by which a repetition is recognised.
std::string_view parse_parameter(AlgorithmConfig& config, std::string_view part) {
  std::string_view value = part;
  if (take_prefix(value, "retention")) {
    need_switch(config.token_sparse_prefill.enabled, part, "t1");
    parse_retention(config, value, part);
    return "retention";
  }
  if (take_prefix(value, "keys")) {
    need_switch(config.sparse_decode_attention.enabled, part, "s1");
    config.sparse_decode_attention.key_fraction_bp = parse_number(value, part);
    return "keys";
  }
  if (take_prefix(value, "tail")) {
    need_switch(config.kv_residual_quantization.enabled, part, "q1");
    config.kv_residual_quantization.tail = parse_number(value, part);
    return "tail";
  }
  if (take_prefix(value, "flush=")) {
    need_switch(config.kv_residual_quantization.enabled, part, "q1");
    config.kv_residual_quantization.flush = parse_flush_rule(value);
    return "flush";
  }
  if (take_prefix(value, "exit=")) {
    parse_exit(config, value, part);
    return "exit";
  }
  if (take_prefix(value, "minloops")) {
    need_switch(takes_threshold(config.exit.mode), part, "exit=threshold<x> or exit=delayed<x> before it");
    config.exit.min_loops = parse_number(value, part);
    return "minloops";
  }
  if (take_prefix(value, "w")) {
    config.window = parse_number(value, part);
    return "w";
  }
  throw ConfigError(
      "case parameter " + in_quotes(part) +
      " is not one of: w<tokens>, retention<bp>-<bp>-<bp>-<bp>, keys<bp>, tail<tokens>, flush=eager, exit=<rule>, minloops<N>");
}

AlgorithmConfig parse_settings(std::string_view text) {
  const std::vector<std::string_view> parts = split(text, ':');
  AlgorithmConfig config;
  try {
    apply_switches(config, parts[0]);
  } catch (const ConfigError& error) {
    throw ConfigError("case settings " + in_quotes(text) + ": " + error.what());
  }
  std::size_t next = 1;
  if (config.kv_residual_quantization.enabled) {
    if (parts.size() < 3)
      throw ConfigError("case settings " + in_quotes(text) + ": q1 needs :policy:timing, such as " + std::string(parts[0]) +
                        ":rolling:serial_aligned");
    config.kv_residual_quantization.policy = parse_encoding_policy(parts[1]);
    config.kv_residual_quantization.timing = parse_encoding_timing(parts[2]);
    next = 3;
  }
  std::vector<std::string_view> seen;
  for (; next < parts.size(); ++next) {
    const std::string_view name = parse_parameter(config, parts[next]);
    if (std::find(seen.begin(), seen.end(), name) != seen.end()) {
      throw ConfigError("case settings " + in_quotes(text) + ": parameter " + in_quotes(name) + " is given twice");
    }
    seen.push_back(name);
  }
  return config;
}

}  // namespace

std::span<const std::string_view> mode_names() { return kModeNames; }

std::string mode_text(const ModeSpec& mode) {
  if (std::find(kModeNames.begin(), kModeNames.end(), mode.name) == kModeNames.end()) {
    throw ConfigError("mode " + in_quotes(mode.name) + " is not one of: " + joined(kModeNames));
  }
  std::string text = mode.name;
  if (mode.name == "split" && mode.piece_tokens != 0) text += ".p" + number_text(mode.piece_tokens, "piece size");
  if (mode.name == "block_spec" || mode.name == "pipeline_spec") text += ".d" + number_text(mode.draft_depth, "draft depth");
  if (mode.name == "block_spec") text += ".k" + number_text(mode.draft_length, "draft length");
  if (mode.name == "prefix" && mode.encoded_prefix) text += ".encoded";
  return text;
}

ModeSpec parse_mode(std::string_view text) {
  const std::vector<std::string_view> parts = split(text, '.');
  ModeSpec mode;
  mode.name = parts[0];
  if (std::find(kModeNames.begin(), kModeNames.end(), mode.name) == kModeNames.end()) {
    throw ConfigError("mode " + in_quotes(mode.name) + " is not one of: " + joined(kModeNames));
  }
  const bool block = mode.name == "block_spec";
  const bool pipeline = mode.name == "pipeline_spec";
  for (std::size_t i = 1; i < parts.size(); ++i) {
    std::string_view value = parts[i];
    if (mode.name == "prefix" && value == "encoded") {
      mode.encoded_prefix = true;
    } else if (mode.name == "split" && take_prefix(value, "p")) {
      mode.piece_tokens = parse_number(value, parts[i]);
    } else if ((block || pipeline) && take_prefix(value, "d")) {
      mode.draft_depth = parse_number(value, parts[i]);
    } else if (block && take_prefix(value, "k")) {
      mode.draft_length = parse_number(value, parts[i]);
    } else {
      const std::string accepted = mode.name == "split"    ? "split.p<tokens>"
                                   : block                 ? "block_spec.d<loops>.k<tokens>"
                                   : pipeline              ? "pipeline_spec.d<loops>"
                                   : mode.name == "prefix" ? "prefix.encoded"
                                                           : mode.name + " takes no parameter";
      throw ConfigError("mode parameter " + in_quotes(parts[i]) + " of " + in_quotes(text) + " is not known (" + accepted + ")");
    }
  }
  if (const std::string canonical = mode_text(mode); canonical != text) {
    throw ConfigError("mode " + in_quotes(text) + " is not in its one spelling: write " + in_quotes(canonical));
  }
  return mode;
}

bool is_case_trace_name(std::string_view text) {
  const auto allowed = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' || c == '_' || c == '-';
  };
  return !text.empty() && std::all_of(text.begin(), text.end(), allowed);
}

AlgorithmConfig normalized(const AlgorithmConfig& config) {
  AlgorithmConfig result;
  result.window = config.window;
  if (config.token_sparse_prefill.enabled) result.token_sparse_prefill = config.token_sparse_prefill;
  if (config.sparse_decode_attention.enabled) result.sparse_decode_attention = config.sparse_decode_attention;
  if (config.kv_residual_quantization.enabled) result.kv_residual_quantization = config.kv_residual_quantization;
  result.exit.mode = config.exit.mode;
  if (takes_threshold(config.exit.mode)) result.exit = config.exit;
  return result;
}

std::string settings_text(const AlgorithmConfig& config) {
  const AlgorithmConfig defaults;
  const auto& t = config.token_sparse_prefill;
  const auto& s = config.sparse_decode_attention;
  const auto& q = config.kv_residual_quantization;
  std::string text = switches_text(config);
  if (q.enabled) text += ":" + std::string(to_string(q.policy)) + ":" + std::string(to_string(q.timing));
  if (config.window != defaults.window) text += ":w" + number_text(config.window, "window");
  if (t.enabled && t.retention_bp != defaults.token_sparse_prefill.retention_bp) {
    text += ":retention";
    for (std::size_t i = 0; i < t.retention_bp.size(); ++i) text += (i == 0 ? "" : "-") + number_text(t.retention_bp[i], "retention");
  }
  if (s.enabled && s.key_fraction_bp != defaults.sparse_decode_attention.key_fraction_bp) {
    text += ":keys" + number_text(s.key_fraction_bp, "key fraction");
  }
  if (q.enabled && q.tail != defaults.kv_residual_quantization.tail) text += ":tail" + number_text(q.tail, "tail");
  if (q.enabled && q.flush != defaults.kv_residual_quantization.flush) text += ":flush=" + std::string(to_string(q.flush));
  if (config.exit.mode != ExitMode::full) text += ":exit=" + std::string(to_string(config.exit.mode));
  if (takes_threshold(config.exit.mode)) {
    text += threshold_text(config.exit.threshold);
    if (config.exit.min_loops != defaults.exit.min_loops) text += ":minloops" + number_text(config.exit.min_loops, "min_loops");
  }
  return text;
}

std::string case_id(const Case& value) {
  if (!is_case_trace_name(value.trace)) {
    throw ConfigError("trace name " + in_quotes(value.trace) +
                      " cannot be part of a case id: it may hold A-Z a-z 0-9 . _ - only, and one at least");
  }
  return mode_text(value.mode) + "/" + settings_text(value.config) + "/" + value.trace;
}

Case parse_case_id(std::string_view id) {
  const std::vector<std::string_view> parts = split(id, '/');
  if (parts.size() != 3) {
    throw ConfigError(
        "case " + in_quotes(id) +
        " is not of the form <mode>/<settings>/<trace>, such as serial/t1s0q0/text-512 (settings: " + std::string(kSettingsForm) + ")");
  }
  Case value{parse_mode(parts[0]), parse_settings(parts[1]), std::string(parts[2])};
  if (const std::string canonical = case_id(value); canonical != id) {
    throw ConfigError("case " + in_quotes(id) + " is not in its one spelling: write " + in_quotes(canonical));
  }
  return value;
}

}  // namespace loopgauge::harness
