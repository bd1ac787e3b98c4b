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

constexpr std::array<std::string_view, 6> kSchedules{"serial", "split", "mixed", "wcpb", "block_spec", "pipeline_spec"};
constexpr std::array<std::string_view, 5> kModifiers{"prefix", "pd", "preempt", "async", "graph"};

constexpr std::string_view kSettingsForm =
    "t0s0q0 to t1s1q1, with q1 :policy:timing, then parameters such as w64, retention10000-10000-5000-2500, "
    "reserve=final_prompt_token, keys500, tail32, "
    "flush=eager, exit=threshold0.9, minloops2";

std::string in_quotes(std::string_view text) { return "'" + std::string(text) + "'"; }

std::string joined(std::span<const std::string_view> words) {
  std::string text;
  for (std::string_view word : words) text += (text.empty() ? "" : ", ") + std::string(word);
  return text;
}

bool contains(std::span<const std::string_view> words, std::string_view word) {
  return std::find(words.begin(), words.end(), word) != words.end();
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
  return value == 0.0f ? 0.0f : value;  // one zero
}

bool drafts(std::string_view schedule) { return schedule == "block_spec" || schedule == "pipeline_spec"; }

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
  if (take_prefix(value, "reserve=")) {
    need_switch(config.token_sparse_prefill.enabled, part, "t1");
    config.token_sparse_prefill.reserve = parse_slot_reservation(value);
    return "reserve";
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
  throw ConfigError("case parameter " + in_quotes(part) +
                    " is not one of: w<tokens>, retention<bp>-<bp>-<bp>-<bp>, reserve=final_prompt_token, keys<bp>, tail<tokens>, "
                    "flush=eager, exit=<rule>, minloops<N>");
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

// How the parameters of a schedule or modifier are written.
std::string parameter_forms(std::string_view name) {
  if (name == "split") return "split.p<tokens>";
  if (name == "mixed") return "mixed.b<tokens>";
  if (name == "wcpb") return "wcpb.c<windows>";
  if (name == "block_spec") return "block_spec.d<loops>.k<tokens>";
  if (name == "pipeline_spec") return "pipeline_spec.d<loops>";
  if (name == "prefix") return "prefix.encoded, prefix.k<windows>, prefix.encoded.k<windows>";
  if (name == "preempt") return "preempt.p<loops>";
  return std::string(name) + " takes no parameter";
}

// False when `name` has no such parameter.
bool parse_mode_parameter(ModeSpec& mode, std::string_view name, std::string_view word) {
  if (name == "prefix" && word == "encoded") {
    mode.encoded_prefix = true;
    return true;
  }
  std::string_view value = word;
  const auto number = [&](std::string_view of, std::string_view letter, int& field) {
    if (name != of || !take_prefix(value, letter)) return false;
    field = parse_number(value, word);
    return true;
  };
  return number("split", "p", mode.piece_tokens) || number("mixed", "b", mode.token_budget) || number("wcpb", "c", mode.chunk_windows) ||
         number("block_spec", "d", mode.draft_depth) || number("pipeline_spec", "d", mode.draft_depth) ||
         number("block_spec", "k", mode.draft_length) || number("prefix", "k", mode.published_windows) ||
         number("preempt", "p", mode.preempt_loops);
}

}  // namespace

std::span<const std::string_view> schedule_names() { return kSchedules; }

bool has_part(const ModeSpec& mode, std::string_view name) {
  if (name.empty() || mode.schedule == name || (name == "speculation" && mode.speculates())) return true;
  return (name == "prefix" && mode.prefix) || (name == "pd" && mode.pd) || (name == "preempt" && mode.preempt) || (name == "async" && mode.async) ||
         (name == "graph" && mode.graph);
}

std::string inert_fault_reason(Fault fault, const Case& value) {
  const auto faults = planted_faults();
  const auto info = std::find_if(faults.begin(), faults.end(), [&](const FaultInfo& candidate) { return candidate.fault == fault; });
  if (info == faults.end()) return {};
  if (!has_part(value.mode, info->mode)) return "it needs " + std::string(info->mode);
  for (std::string_view parts = info->not_beside; !parts.empty();) {
    const std::size_t end = std::min(parts.find(' '), parts.size());
    if (has_part(value.mode, parts.substr(0, end))) return "it is not planted beside " + std::string(parts.substr(0, end));
    parts.remove_prefix(std::min(end + 1, parts.size()));
  }
  const std::string switches = switches_text(value.config);
  for (std::size_t i = 0; i + 1 < info->needs.size(); i += 2) {
    if (switches.find(info->needs.substr(i, 2)) == std::string::npos) return "it needs " + std::string(info->needs);
  }
  return {};
}

std::string available_modes() {
  return joined(kSchedules) + ", each with any of " + joined(kModifiers);
}

std::string mode_text(const ModeSpec& mode) {
  if (!contains(kSchedules, mode.schedule)) throw ConfigError("mode " + in_quotes(mode.schedule) + " is not one of: " + joined(kSchedules));
  const ModeSpec defaults;
  const auto parameter = [](std::string_view letter, int value, int default_value, std::string_view what) {
    return value == default_value ? std::string{} : "." + std::string(letter) + number_text(value, what);
  };
  std::string text = mode.schedule;
  if (mode.schedule == "split") text += parameter("p", mode.piece_tokens, defaults.piece_tokens, "piece size");
  if (mode.schedule == "mixed") text += parameter("b", mode.token_budget, defaults.token_budget, "token budget");
  if (mode.schedule == "wcpb") text += parameter("c", mode.chunk_windows, defaults.chunk_windows, "chunk size");
  if (drafts(mode.schedule)) text += ".d" + number_text(mode.draft_depth, "draft depth");
  if (mode.schedule == "block_spec") text += ".k" + number_text(mode.draft_length, "draft length");

  std::string modifiers;
  if (mode.prefix) {
    modifiers += "+prefix" + std::string(mode.encoded_prefix ? ".encoded" : "") +
                 parameter("k", mode.published_windows, defaults.published_windows, "number of published windows");
  }
  if (mode.pd) modifiers += "+pd";
  if (mode.preempt) modifiers += "+preempt" + parameter("p", mode.preempt_loops, defaults.preempt_loops, "preemption period");
  if (mode.async) modifiers += "+async";
  if (mode.graph) modifiers += "+graph";
  return mode.schedule == "serial" && !modifiers.empty() ? modifiers.substr(1) : text + modifiers;
}

ModeSpec parse_mode(std::string_view text) {
  ModeSpec mode;
  std::vector<std::string_view> seen;
  for (std::string_view part : split(text, '+')) {
    const std::vector<std::string_view> words = split(part, '.');
    const std::string_view name = words[0];
    const bool schedule = contains(kSchedules, name);
    if (!schedule && !contains(kModifiers, name)) {
      throw ConfigError((part == text ? "mode " : "part ") + in_quotes(name) + (part == text ? "" : " of mode " + in_quotes(text)) +
                        " is not one of: " + joined(kSchedules) + ", " + joined(kModifiers));
    }
    if (contains(seen, name)) throw ConfigError("mode " + in_quotes(text) + " names " + in_quotes(name) + " twice");
    if (schedule) {
      const auto other = std::find_if(seen.begin(), seen.end(), [](std::string_view earlier) { return contains(kSchedules, earlier); });
      if (other != seen.end()) {
        throw ConfigError("mode " + in_quotes(text) + " names two schedules, " + in_quotes(*other) + " and " + in_quotes(name) +
                          ": one orders the work, " + joined(kModifiers) + " may be added to it");
      }
      mode.schedule = name;
    }
    seen.push_back(name);
    mode.prefix |= name == "prefix";
    mode.pd |= name == "pd";
    mode.preempt |= name == "preempt";
    mode.async |= name == "async";
    mode.graph |= name == "graph";
    for (const std::string_view word : std::span(words).subspan(1)) {
      if (!parse_mode_parameter(mode, name, word)) {
        throw ConfigError("mode parameter " + in_quotes(word) + " of " + in_quotes(text) + " is not known (" + parameter_forms(name) + ")");
      }
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

AlgorithmConfig parse_case_parameter(const AlgorithmConfig& config, std::string_view parameter) {
  AlgorithmConfig result = config;
  parse_parameter(result, parameter);
  return result;
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
  if (t.enabled && t.reserve != defaults.token_sparse_prefill.reserve) text += ":reserve=" + std::string(to_string(t.reserve));
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
