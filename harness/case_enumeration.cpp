// SPDX-License-Identifier: Apache-2.0
// Which cases a sweep runs, and how a list of them is filtered and cut into shards.
#include <algorithm>

#include "harness/case.hpp"

namespace loopgauge::harness {
namespace {

constexpr EncodingPolicy kEnumeratedPolicies[] = {EncodingPolicy::fixed_prompt, EncodingPolicy::rolling, EncodingPolicy::streaming};

std::vector<AlgorithmConfig> enumerated_settings(const CaseTrace& trace) {
  std::vector<ExitRule> exits{ExitRule{}};
  if (trace.name.starts_with("exit-"))
    exits.push_back({.mode = ExitMode::threshold, .threshold = kEnumeratedExitThreshold, .min_loops = 1});
  if (trace.has_exit_depths) exits.push_back({.mode = ExitMode::trace, .threshold = 1.0f, .min_loops = 1});
  std::vector<AlgorithmConfig> settings;
  for (const ExitRule& exit : exits) {
    for (int bits = 0; bits < 8; ++bits) {
      AlgorithmConfig config;
      config.window = trace.window;
      config.token_sparse_prefill.enabled = (bits & 4) != 0;
      config.sparse_decode_attention.enabled = (bits & 2) != 0;
      config.kv_residual_quantization.enabled = (bits & 1) != 0;
      config.exit = exit;
      if (!config.kv_residual_quantization.enabled) {
        settings.push_back(config);
        continue;
      }
      for (EncodingPolicy policy : kEnumeratedPolicies) {
        config.kv_residual_quantization.policy = policy;
        settings.push_back(config);
      }
    }
  }
  return settings;
}

// FNV-1a with 64 bits, then one multiplicative mix: the low bits of plain FNV-1a depend on the last characters only weakly.
std::uint64_t id_hash(std::string_view id) {
  std::uint64_t hash = 0xcbf29ce484222325u;
  for (char c : id) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  hash ^= hash >> 33;
  hash *= 0xff51afd7ed558ccdu;
  return hash ^ (hash >> 33);
}

}  // namespace

std::vector<ModeSpec> default_modes() { return {ModeSpec{}, ModeSpec{.schedule = "split"}}; }

std::vector<Case> enumerate_cases(std::span<const CaseTrace> traces, std::span<const ModeSpec> modes) {
  std::vector<Case> cases;
  std::vector<Case> refused;  // the first of every mode
  std::vector<ModeSpec> with_cases;
  const auto contains = [](const auto& list, const auto& matches) { return std::any_of(list.begin(), list.end(), matches); };
  for (const CaseTrace& trace : traces) {
    const std::vector<ModeSpec> chosen = !modes.empty()         ? std::vector<ModeSpec>(modes.begin(), modes.end())
                                         : !trace.modes.empty() ? trace.modes
                                                                : default_modes();
    for (const AlgorithmConfig& config : enumerated_settings(trace)) {
      for (const ModeSpec& mode : chosen) {
        const Case value{mode, config, trace.name};
        if (!case_refusal(value)) {
          cases.push_back(value);
          if (!contains(with_cases, [&](const ModeSpec& other) { return other == mode; })) with_cases.push_back(mode);
        } else if (!contains(refused, [&](const Case& other) { return other.mode == mode; })) {
          refused.push_back(value);
        }
      }
    }
  }
  for (const Case& value : refused) {
    if (!contains(with_cases, [&](const ModeSpec& mode) { return mode == value.mode; })) require_runnable(value);
  }
  return cases;
}

bool glob_match(std::string_view pattern, std::string_view text) {
  // Greedy matching with one point of return: the latest `*` and how much of the text it has swallowed.
  std::size_t p = 0, t = 0, star = std::string_view::npos, swallowed = 0;
  while (t < text.size()) {
    if (p < pattern.size() && pattern[p] == '*') {
      star = p++;
      swallowed = t;
    } else if (p < pattern.size() && (pattern[p] == '?' || pattern[p] == text[t])) {
      ++p;
      ++t;
    } else if (star != std::string_view::npos) {
      p = star + 1;
      t = ++swallowed;
    } else {
      return false;
    }
  }
  while (p < pattern.size() && pattern[p] == '*') ++p;
  return p == pattern.size();
}

bool in_shard(std::string_view id, const Shard& shard) {
  return id_hash(id) % static_cast<std::uint64_t>(shard.count) == static_cast<std::uint64_t>(shard.index - 1);
}

}  // namespace loopgauge::harness
