// SPDX-License-Identifier: Apache-2.0
// Settings, traces and accounts for tests of execution modes.
#pragma once

#include "tests/reference/executor/random_plan.hpp"
#include "tests/reference/executor/tiny_model.hpp"

namespace loopgauge::test {

// The eight switches, Q in three policies.
inline std::vector<AlgorithmConfig> sixteen_settings() {
  std::vector<AlgorithmConfig> settings;
  for (const char* text : {"t0s0q0", "t1s0q0", "t0s1q0", "t1s1q0"}) settings.push_back(switches(text));
  for (const char* text : {"t0s0q1", "t1s0q1", "t0s1q1", "t1s1q1"}) {
    for (const EncodingPolicy policy : {EncodingPolicy::fixed_prompt, EncodingPolicy::rolling, EncodingPolicy::streaming}) {
      settings.push_back(switches(text));
      settings.back().kv_residual_quantization.policy = policy;
    }
  }
  return settings;
}

inline std::string setting_name(const AlgorithmConfig& config) {
  return switches_text(config) +
         (config.kv_residual_quantization.enabled ? "_" + std::string(to_string(config.kv_residual_quantization.policy)) : "");
}

inline std::vector<ExitRule> four_exits() {
  return {{ExitMode::full, 1.0f, 1}, {ExitMode::trace, 1.0f, 1}, {ExitMode::threshold, 0.6f, 1}, {ExitMode::delayed, 0.5f, 1}};
}

inline TraceRequest free_request(int id, int prompt_length, int tokens, int eos = -1) {
  TraceRequest r = request(id, prompt_length, 0);
  r.max_new_tokens = tokens;
  r.eos_token_id = eos;
  return r;
}

// Depths 1..4 in turn, for exit mode `trace`.
inline void give_depths(Trace& trace) {
  for (TraceRequest& r : trace.requests) {
    for (int j = 0; j < r.max_new_tokens; ++j) r.exit_depths.push_back(static_cast<std::uint8_t>(1 + (j + r.id) % 4));
  }
}

inline void expect_same_requests(const RunRecord& a, const RunRecord& b, const std::string& what, std::set<std::size_t> except = {}) {
  ASSERT_EQ(a.requests.size(), b.requests.size());
  for (std::size_t i = 0; i < a.requests.size(); ++i) {
    if (except.contains(i)) continue;
    EXPECT_EQ(differing_groups(a.requests[i], b.requests[i]), kNone) << what << ", request " << i;
  }
}

// S-INV-12, and the account of work: every execution is in one request's record or was discarded, and what exceeds one was recomputed.
inline void expect_accounts(const RunRecord& record, const std::string& what) {
  EXPECT_EQ(describe(record.held_at_drain), "") << what;
  std::int64_t executed = 0, repeated = 0;
  bool cancelled = false;
  for (const RequestRecord& r : record.requests) {
    cancelled |= r.outcome == RequestOutcome::cancelled;
    ASSERT_EQ(r.executions.size(), static_cast<std::size_t>(r.prompt_length + r.fed) * kLoops) << what;
    for (const std::uint8_t count : r.executions) executed += count, repeated += std::max(0, count - 1);
  }
  if (cancelled) return;  // what a cancelled request executed beyond its last result is in no record
  EXPECT_EQ(record.counters.executed_rows, executed + record.counters.discarded_rows) << what;
  EXPECT_EQ(record.counters.recomputed_rows, repeated) << what;
}

}  // namespace loopgauge::test
