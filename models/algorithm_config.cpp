// SPDX-License-Identifier: Apache-2.0
#include "models/algorithm_config.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <nlohmann/json.hpp>
#include <span>

#include "models/error.hpp"

namespace loopgauge {
namespace {

template <class Enum>
struct Word {
  Enum value;
  std::string_view text;
};

constexpr Word<EncodingPolicy> kPolicies[] = {
    {EncodingPolicy::fixed_prompt, "fixed_prompt"}, {EncodingPolicy::rolling, "rolling"}, {EncodingPolicy::streaming, "streaming"}};
constexpr Word<EncodingTiming> kTimings[] = {{EncodingTiming::serial_aligned, "serial_aligned"},
                                             {EncodingTiming::execution_dependent, "execution_dependent"}};
constexpr Word<FlushRule> kFlushRules[] = {{FlushRule::committed, "committed"}, {FlushRule::eager, "eager"}};
constexpr Word<ExitMode> kExitModes[] = {
    {ExitMode::full, "full"}, {ExitMode::threshold, "threshold"}, {ExitMode::delayed, "delayed"}, {ExitMode::trace, "trace"}};
constexpr Word<SlotReservation> kReservations[] = {{SlotReservation::none, "none"},
                                                   {SlotReservation::final_prompt_token, "final_prompt_token"}};

template <class Enum>
std::string_view text_of(std::span<const Word<Enum>> words, Enum value) {
  for (const auto& word : words) {
    if (word.value == value) return word.text;
  }
  throw InternalError("enumerator without a word");
}

template <class Enum>
Enum value_of(std::span<const Word<Enum>> words, std::string_view what, std::string_view text) {
  std::string accepted;
  for (const auto& word : words) {
    if (word.text == text) return word.value;
    accepted += (accepted.empty() ? "" : ", ") + std::string(word.text);
  }
  throw ConfigError(std::string(what) + " '" + std::string(text) + "' is not one of: " + accepted);
}

void require(bool holds, const std::string& message) {
  if (!holds) throw ConfigError(message);
}

}  // namespace

std::string_view to_string(EncodingPolicy policy) { return text_of<EncodingPolicy>(kPolicies, policy); }
std::string_view to_string(EncodingTiming timing) { return text_of<EncodingTiming>(kTimings, timing); }
std::string_view to_string(FlushRule flush) { return text_of<FlushRule>(kFlushRules, flush); }
std::string_view to_string(ExitMode mode) { return text_of<ExitMode>(kExitModes, mode); }
std::string_view to_string(SlotReservation reservation) { return text_of<SlotReservation>(kReservations, reservation); }
EncodingPolicy parse_encoding_policy(std::string_view text) { return value_of<EncodingPolicy>(kPolicies, "encoding policy", text); }
EncodingTiming parse_encoding_timing(std::string_view text) { return value_of<EncodingTiming>(kTimings, "encoding timing", text); }
FlushRule parse_flush_rule(std::string_view text) { return value_of<FlushRule>(kFlushRules, "flush rule", text); }
SlotReservation parse_slot_reservation(std::string_view text) { return value_of<SlotReservation>(kReservations, "slot reservation", text); }

std::string switches_text(const AlgorithmConfig& config) {
  std::string text = "t0s0q0";
  if (config.token_sparse_prefill.enabled) text[1] = '1';
  if (config.sparse_decode_attention.enabled) text[3] = '1';
  if (config.kv_residual_quantization.enabled) text[5] = '1';
  return text;
}

void apply_switches(AlgorithmConfig& config, std::string_view text) {
  const auto flag = [&](std::size_t i) { return text[i] == '0' || text[i] == '1'; };
  require(text.size() == 6 && text[0] == 't' && text[2] == 's' && text[4] == 'q' && flag(1) && flag(3) && flag(5),
          "switches '" + std::string(text) + "' are not of the form t0s0q0 (t, s, q each followed by 0 or 1)");
  config.token_sparse_prefill.enabled = text[1] == '1';
  config.sparse_decode_attention.enabled = text[3] == '1';
  config.kv_residual_quantization.enabled = text[5] == '1';
}

ExitRule parse_exit_rule(std::string_view text) {
  const std::size_t colon = text.find(':');
  ExitRule rule;
  rule.mode = value_of<ExitMode>(kExitModes, "exit mode", text.substr(0, colon));
  const bool takes_threshold = rule.mode == ExitMode::threshold || rule.mode == ExitMode::delayed;
  require(takes_threshold == (colon != std::string_view::npos),
          "exit rule '" + std::string(text) + "': " + std::string(to_string(rule.mode)) +
              (takes_threshold ? " needs a threshold, such as threshold:0.9" : " takes no threshold"));
  if (takes_threshold) {
    const std::string_view number = text.substr(colon + 1);
    const auto [end, status] = std::from_chars(number.data(), number.data() + number.size(), rule.threshold);
    require(status == std::errc{} && end == number.data() + number.size(),
            "exit rule '" + std::string(text) + "': '" + std::string(number) + "' is not a number");
    if (rule.threshold == 0.0f) rule.threshold = 0.0f;  // one zero
  }
  return rule;
}

EffectiveConfig EffectiveConfig::resolve(const AlgorithmConfig& requested, const ModelConfig& model) {
  const auto& t = requested.token_sparse_prefill;
  const auto& s = requested.sparse_decode_attention;
  const auto& q = requested.kv_residual_quantization;

  const bool any_feature = t.enabled || s.enabled || q.enabled;
  require(model.loops >= 1 && model.loops <= kLoops,
          "the model has " + std::to_string(model.loops) + " loops (total_ut_steps); between 1 and 4 are supported");
  require(!any_feature || model.loops == kLoops, "switches " + switches_text(requested) +
                                                     " need a model with exactly four loops, this one has " + std::to_string(model.loops) +
                                                     " (total_ut_steps); use t0s0q0");

  require(requested.window > 0 && requested.window % kGroupSize == 0,
          "window " + std::to_string(requested.window) + " is not a positive multiple of 64");
  for (int loop = 1; loop <= kLoops; ++loop) {
    const int bp = t.retention_bp[static_cast<std::size_t>(loop - 1)];
    const std::string name = "retention of loop " + std::to_string(loop);
    require(bp >= 1 && bp <= kBasisPoints, name + " is " + std::to_string(bp) + "; it must be between 1 and 10000 basis points");
    if (loop <= 2) require(bp == kBasisPoints, name + " is " + std::to_string(bp) + "; loops 1 and 2 are dense and must be 10000");
    if (loop > 1) {
      const int before = t.retention_bp[static_cast<std::size_t>(loop - 2)];
      require(bp <= before, name + " (" + std::to_string(bp) + ") is above that of loop " + std::to_string(loop - 1) + " (" +
                                std::to_string(before) + "); retention must not rise with the loops");
    }
  }
  require(s.key_fraction_bp >= 1 && s.key_fraction_bp <= kBasisPoints,
          "key fraction " + std::to_string(s.key_fraction_bp) + " is not between 1 and 10000 basis points");
  require(q.tail >= 0, "tail " + std::to_string(q.tail) + " is negative");

  const auto& exit = requested.exit;
  require(exit.min_loops >= 1 && exit.min_loops <= model.loops,
          "min_loops " + std::to_string(exit.min_loops) + " is not between 1 and the model's " + std::to_string(model.loops) + " loops");
  require(std::isfinite(exit.threshold) && exit.threshold >= 0.0f && exit.threshold <= 1.0f,
          "exit threshold " + std::to_string(exit.threshold) + " is not between 0 and 1");

  EffectiveConfig effective;
  effective.values_ = requested;
  effective.loops_ = model.loops;
  effective.selects_tokens_ = t.enabled && (t.retention_bp[2] < kBasisPoints || t.retention_bp[3] < kBasisPoints);
  return effective;
}

std::string EffectiveConfig::canonical_json() const {
  const nlohmann::json json = {
      {"token_sparse_prefill", {{"enabled", t().enabled}, {"retention_bp", t().retention_bp}, {"reserve", to_string(t().reserve)}}},
      {"sparse_decode_attention", {{"enabled", s().enabled}, {"key_fraction_bp", s().key_fraction_bp}}},
      {"kv_residual_quantization",
       {{"enabled", q().enabled},
        {"policy", to_string(q().policy)},
        {"timing", to_string(q().timing)},
        {"flush", to_string(q().flush)},
        {"tail", q().tail},
        {"bits", 4},
        {"group", kGroupSize}}},
      {"window", window()},
      {"loops", loops()},
      {"exit", {{"mode", to_string(exit().mode)}, {"threshold", exit().threshold}, {"min_loops", exit().min_loops}}}};
  return json.dump();  // object keys are sorted
}

int budget(int basis_points, int count) {
  const std::int64_t product = std::int64_t{basis_points} * count;
  return static_cast<int>(std::max<std::int64_t>(1, (product + kBasisPoints - 1) / kBasisPoints));
}

// Not (prompt_length + window - 1) / window: a window may be as large as an int.
int window_count(int prompt_length, int window) { return prompt_length / window + (prompt_length % window != 0); }

PositionRange window_range(int index, int prompt_length, int window) {
  return {index * window, std::min((index + 1) * window, prompt_length)};
}

int encoded_frontier(const EffectiveConfig& config, int prompt_length, int committed) {
  const auto& q = config.q();
  if (!q.enabled) return 0;
  const int flushed = kGroupSize * (std::max(0, committed - q.tail) / kGroupSize);
  switch (q.policy) {
    case EncodingPolicy::fixed_prompt:
      return prompt_length;
    case EncodingPolicy::rolling:
      return flushed;
    case EncodingPolicy::streaming: {
      const int full_windows = config.window() * (prompt_length / config.window());
      return committed > prompt_length ? std::max(full_windows, flushed) : full_windows;
    }
  }
  throw InternalError("unknown encoding policy");
}

std::vector<PositionRange> block_cuts(const EffectiveConfig& config, int prompt_length, int previous_frontier, int frontier) {
  // What is encoded when the prompt completes is cut at window boundaries; everything later is cut every 64 tokens.
  const int at_prompt_end = encoded_frontier(config, prompt_length, prompt_length);
  std::vector<PositionRange> cuts;
  for (int begin = previous_frontier; begin < frontier;) {
    const int step = begin < at_prompt_end ? config.window() - begin % config.window() : kGroupSize;
    const int limit = begin < at_prompt_end ? std::min(frontier, at_prompt_end) : frontier;
    cuts.push_back({begin, std::min(begin + step, limit)});
    begin = cuts.back().end;
  }
  return cuts;
}

}  // namespace loopgauge
