// SPDX-License-Identifier: Apache-2.0
#include "harness/commands/common_options.hpp"

#include <algorithm>
#include <array>
#include <charconv>

#include "harness/commands/config_file.hpp"
#include "harness/io/data_paths.hpp"
#include "models/error.hpp"

namespace loopgauge::harness {
namespace {

int read_int(std::string_view text) {
  int value = 0;
  const auto [end, status] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (text.empty() || status == std::errc::invalid_argument || end != text.data() + text.size()) {
    throw ConfigError("'" + std::string(text) + "' is not a whole number");
  }
  if (status != std::errc{}) throw ConfigError("'" + std::string(text) + "' does not fit 32 bits");
  return value;
}

bool read_bool(std::string_view text) {
  if (text == "true") return true;
  if (text == "false") return false;
  throw ConfigError("'" + std::string(text) + "' is neither true nor false");
}

void read_retention(Settings& settings, std::string_view text) {
  auto& retention = settings.config.token_sparse_prefill.retention_bp;
  for (std::size_t i = 0; i < retention.size(); ++i) {
    const std::size_t comma = text.find(',');
    if ((comma == std::string_view::npos) != (i + 1 == retention.size())) {
      throw ConfigError("four basis points are needed, one per loop, such as 10000,10000,2500,1000");
    }
    retention[i] = read_int(text.substr(0, comma));
    if (comma != std::string_view::npos) text.remove_prefix(comma + 1);
  }
}

// Draft parameters may come from settings of their own, so the bare name of a speculating schedule is accepted, with modifiers or without.
void read_mode(Settings& settings, std::string_view text) {
  const std::string_view schedule = text.substr(0, text.find('+'));
  if (schedule != "block_spec" && schedule != "pipeline_spec") {
    settings.mode = parse_mode(text);
    return;
  }
  ModeSpec bare;
  bare.schedule = schedule;
  settings.mode = parse_mode(mode_text(bare) + std::string(text.substr(schedule.size())));
}

// Whether the schedule of a mode is written with this parameter: "block_spec.d2.k4+pd" has d and k.
bool writes_parameter(std::string_view mode, char letter) {
  const std::string_view schedule = mode.substr(0, mode.find('+'));
  return schedule.find(std::string{'.', letter}) != std::string_view::npos;
}

void read_exit(Settings& settings, std::string_view text) {
  const int min_loops = settings.config.exit.min_loops;
  settings.config.exit = parse_exit_rule(text);
  settings.config.exit.min_loops = min_loops;
}

bool drafts(const Settings& settings) { return settings.mode.schedule == "block_spec" || settings.mode.schedule == "pipeline_spec"; }
bool t_enabled(const Settings& settings) { return settings.config.token_sparse_prefill.enabled; }
bool s_enabled(const Settings& settings) { return settings.config.sparse_decode_attention.enabled; }
bool q_enabled(const Settings& settings) { return settings.config.kv_residual_quantization.enabled; }

struct SettingRow {
  SettingGroup group;
  std::string_view key;   // in a configuration file; empty: flag only
  std::string_view flag;  // empty: configuration file only
  std::string_view value_name;
  std::string_view help;
  void (*read)(Settings&, std::string_view);
  bool (*used)(const Settings&) = nullptr;  // null: always
  std::string_view needs = {};              // what makes it used, for the message
  char mode_parameter = 0;                  // how a mode writes it, "p" of split.p100; 0: no mode does
};

using S = Settings;
using V = std::string_view;

// In the order in which they are read: switches before what depends on them, the mode before its parameters.
constexpr std::array kRows{
    SettingRow{SettingGroup::mode, "mode", "--mode", "MODE",
               "Execution mode: serial, split, mixed, wcpb, block_spec or pipeline_spec, with any of prefix, pd, preempt, async, graph added, as in "
               "wcpb+prefix+async or block_spec.d2.k4; block_spec and pipeline_spec also without parameters, block_spec+pd (default serial)",
               read_mode},
    SettingRow{SettingGroup::mode, "piece_tokens", "--piece-tokens", "N",
               "split: at most N tokens of a window in one submission (default: whole windows)",
               [](S& s, V v) { s.mode.piece_tokens = read_int(v); }, [](const S& s) { return s.mode.schedule == "split"; }, "mode split", 'p'},
    SettingRow{SettingGroup::mode, "draft_depth", "--draft-depth", "N", "Speculation: loops of the draft, 1 or 2; of pipeline_spec 1 to 3 (default 2)",
               [](S& s, V v) { s.mode.draft_depth = read_int(v); }, drafts, "mode block_spec or pipeline_spec", 'd'},
    SettingRow{SettingGroup::mode, "draft_length", "--draft-length", "N", "Block speculation: drafted tokens a round, 1 to 64 (default 4)",
               [](S& s, V v) { s.mode.draft_length = read_int(v); }, [](const S& s) { return s.mode.schedule == "block_spec"; },
               "mode block_spec", 'k'},

    SettingRow{SettingGroup::algorithm, "", "--switches", "tXsXqX",
               "FlashLoop features on (1) or off (0): t token-sparse prefill, s sparse decode attention, q KV residual quantization "
               "(default t0s0q0)",
               [](S& s, V v) { apply_switches(s.config, v); }},
    SettingRow{SettingGroup::algorithm, "token_sparse_prefill.enabled", "", "", "",
               [](S& s, V v) { s.config.token_sparse_prefill.enabled = read_bool(v); }},
    SettingRow{SettingGroup::algorithm, "sparse_decode_attention.enabled", "", "", "",
               [](S& s, V v) { s.config.sparse_decode_attention.enabled = read_bool(v); }},
    SettingRow{SettingGroup::algorithm, "kv_residual_quantization.enabled", "", "", "",
               [](S& s, V v) { s.config.kv_residual_quantization.enabled = read_bool(v); }},
    SettingRow{SettingGroup::algorithm, "window", "--window", "N", "Selection and block window in tokens, a multiple of 64 (default 256)",
               [](S& s, V v) { s.config.window = read_int(v); }},
    SettingRow{SettingGroup::algorithm, "token_sparse_prefill.retention_bp", "--retention", "BP,BP,BP,BP",
               "t1: share of prompt tokens that run loops 1 to 4, in basis points (default 10000,10000,2500,1000)", read_retention,
               t_enabled, "t1 (token_sparse_prefill)"},
    SettingRow{SettingGroup::algorithm, "token_sparse_prefill.reserve", "--reserve", "WORD",
               "t1: none, or final_prompt_token to select the prompt's last position whatever its score, an ablation (default none)",
               [](S& s, V v) { s.config.token_sparse_prefill.reserve = parse_slot_reservation(v); }, t_enabled,
               "t1 (token_sparse_prefill)"},
    SettingRow{SettingGroup::algorithm, "sparse_decode_attention.key_fraction_bp", "--key-fraction", "BP",
               "s1: share of keys read at loops 3 and 4, in basis points (default 1000)",
               [](S& s, V v) { s.config.sparse_decode_attention.key_fraction_bp = read_int(v); }, s_enabled,
               "s1 (sparse_decode_attention)"},
    SettingRow{SettingGroup::algorithm, "kv_residual_quantization.policy", "--policy", "POLICY",
               "q1: fixed_prompt, rolling, streaming (default rolling)",
               [](S& s, V v) { s.config.kv_residual_quantization.policy = parse_encoding_policy(v); }, q_enabled,
               "q1 (kv_residual_quantization)"},
    SettingRow{SettingGroup::algorithm, "kv_residual_quantization.timing", "--timing", "TIMING",
               "q1: serial_aligned, execution_dependent (default serial_aligned)",
               [](S& s, V v) { s.config.kv_residual_quantization.timing = parse_encoding_timing(v); }, q_enabled,
               "q1 (kv_residual_quantization)"},
    SettingRow{SettingGroup::algorithm, "kv_residual_quantization.flush", "--flush", "RULE", "q1: committed, eager (default committed)",
               [](S& s, V v) { s.config.kv_residual_quantization.flush = parse_flush_rule(v); }, q_enabled,
               "q1 (kv_residual_quantization)"},
    SettingRow{SettingGroup::algorithm, "kv_residual_quantization.tail", "--tail", "N", "q1: most recent tokens kept in BF16 (default 64)",
               [](S& s, V v) { s.config.kv_residual_quantization.tail = read_int(v); }, q_enabled, "q1 (kv_residual_quantization)"},
    SettingRow{SettingGroup::algorithm, "exit", "--exit", "RULE", "full, threshold:0.9, delayed:0.9, trace (default full)", read_exit},
    SettingRow{SettingGroup::algorithm, "min_loops", "--min-loops", "N", "Exit threshold and delayed: no exit before loop N (default 1)",
               [](S& s, V v) { s.config.exit.min_loops = read_int(v); },
               [](const S& s) { return s.config.exit.mode == ExitMode::threshold || s.config.exit.mode == ExitMode::delayed; },
               "exit threshold or delayed"},

    SettingRow{SettingGroup::execution, "checkpoint", "--checkpoint", "DIR",
               "Model folder in the Hugging Face layout (default: the shipped ouro-tiny)",
               [](S& s, V v) { s.checkpoint = std::filesystem::path(v); }},
    SettingRow{SettingGroup::execution, "executor", "--executor", "NAME", "reference, optimized (default reference)",
               [](S& s, V v) { s.executor = std::string(v); }},
    SettingRow{SettingGroup::execution, "profile", "--profile", "PROFILE",
               "declared, reordered (a second order of additions), double (no BF16 rounding) (default declared)",
               [](S& s, V v) { s.profile = parse_profile(v); }},
};

bool contains(const std::vector<SettingGroup>& groups, SettingGroup group) {
  return std::find(groups.begin(), groups.end(), group) != groups.end();
}

// One setting as it was given, `origin` for messages. `mode`: that of the same source, which must not give it too.
void read_setting(const SettingRow& row, Settings& settings, std::string_view text, const std::string& origin, std::string_view mode) {
  if (row.mode_parameter != 0 && writes_parameter(mode, row.mode_parameter))
    throw ConfigError(origin + ": mode '" + std::string(mode) + "' gives it already; give it once");
  try {
    row.read(settings, text);
  } catch (const ConfigError& error) {
    throw ConfigError(origin + ": " + error.what());
  }
}

}  // namespace

SettingOptions::SettingOptions(CLI::App& command, std::vector<SettingGroup> groups) : groups_(std::move(groups)) {
  command.add_option("--config", config_file_, "Configuration file (a subset of TOML); flags win over it")->type_name("FILE");
  for (const SettingRow& row : kRows) {
    if (row.flag.empty() || !contains(groups_, row.group)) continue;
    const std::string flag(row.flag);
    flag_options_[flag] = command.add_option(flag, flag_texts_[flag], std::string(row.help))->type_name(std::string(row.value_name));
  }
}

Settings SettingOptions::resolve() const {
  Settings settings;
  const std::vector<ConfigEntry> entries = config_file_.empty() ? std::vector<ConfigEntry>{} : read_config_file(config_file_);
  std::string known;
  for (const SettingRow& row : kRows) {
    if (row.key.empty() || !contains(groups_, row.group)) continue;
    known += (known.empty() ? "" : ", ") + std::string(row.key);
  }
  for (const ConfigEntry& entry : entries) {
    const bool is_known = std::any_of(kRows.begin(), kRows.end(),
                                      [&](const SettingRow& row) { return row.key == entry.key && contains(groups_, row.group); });
    if (!is_known) {
      throw ConfigError(config_file_ + ":" + std::to_string(entry.line) + ": unknown key '" + entry.key + "' (known: " + known + ")");
    }
  }

  const auto entry_of = [&](std::string_view key) {
    return std::find_if(entries.begin(), entries.end(), [&](const ConfigEntry& candidate) { return candidate.key == key; });
  };
  const auto given = [&](const SettingRow& row) {
    const auto option = flag_options_.find(std::string(row.flag));
    return option != flag_options_.end() && option->second->count() > 0;
  };
  const SettingRow& mode = kRows.front();
  const std::string file_mode = entry_of(mode.key) == entries.end() ? "" : entry_of(mode.key)->value;
  const std::string flag_mode = given(mode) ? flag_texts_.at(std::string(mode.flag)) : "";

  // The file first, but for a mode that a flag replaces: what the new one leaves open the file may say.
  for (const SettingRow& row : kRows) {
    if (!contains(groups_, row.group)) continue;
    if (&row == &mode && given(mode)) {
      read_setting(row, settings, flag_mode, std::string(row.flag), "");
      continue;
    }
    const auto entry = entry_of(row.key);
    if (entry == entries.end()) continue;
    Settings without_effect = settings;  // it still has to read
    const bool overridden = row.mode_parameter != 0 && (!row.used(settings) || writes_parameter(flag_mode, row.mode_parameter));
    read_setting(row, overridden ? without_effect : settings, entry->value,
                 config_file_ + ":" + std::to_string(entry->line) + ": " + entry->key, file_mode);
  }
  for (const SettingRow& row : kRows) {
    if (&row != &mode && given(row)) read_setting(row, settings, flag_texts_.at(std::string(row.flag)), std::string(row.flag), flag_mode);
  }
  for (const SettingRow& row : kRows) {
    if (given(row) && row.used != nullptr && !row.used(settings))
      throw ConfigError(std::string(row.flag) + " has no effect without " + std::string(row.needs));
  }
  if (settings.checkpoint.empty() && contains(groups_, SettingGroup::execution)) settings.checkpoint = default_checkpoint();
  return settings;
}

std::vector<std::string> SettingOptions::given_flags(SettingGroup group) const {
  std::vector<std::string> flags;
  for (const SettingRow& row : kRows) {
    const auto option = flag_options_.find(std::string(row.flag));
    if (row.group == group && option != flag_options_.end() && option->second->count() > 0) flags.push_back(option->first);
  }
  return flags;
}

void require_output(std::string_view output, std::span<const std::string_view> accepted) {
  if (std::find(accepted.begin(), accepted.end(), output) != accepted.end()) return;
  std::string words;
  for (std::string_view word : accepted) words += (words.empty() ? "" : ", ") + std::string(word);
  throw ConfigError("--output '" + std::string(output) + "' is not one of: " + words);
}

}  // namespace loopgauge::harness
