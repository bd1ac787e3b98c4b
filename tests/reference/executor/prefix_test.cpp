// SPDX-License-Identifier: Apache-2.0
// Published windows: a request that begins with them has the record of a cold run (S-PFX-1..5, S-INV-11).
#include <gtest/gtest.h>

#include "models/error.hpp"
#include "tests/reference/executor/modes.hpp"

namespace loopgauge::test {
namespace {

class PrefixReuse : public testing::TestWithParam<AlgorithmConfig> {
 protected:
  // The first two windows are those of all requests, the third is of requests 0 and 2.
  PrefixReuse() {
    for (const int i : {1, 2})
      std::copy_n(trace_.requests[0].prompt.begin(), 64 * (i + 1), trace_.requests[static_cast<std::size_t>(i)].prompt.begin());
  }
  static Submission window(int request, int begin, int end) { return {{{request, RowKind::prefill, begin, end, 1, 4}}}; }
  void decode(Plan& plan, int i) const {
    const TraceRequest& r = trace_.requests[static_cast<std::size_t>(i)];
    for (int j = 0; j < fed_tokens(r); ++j)
      plan.submissions.push_back({{{i, RowKind::decode, r.prompt_length() + j, r.prompt_length() + j + 1, 1, 4}}});
  }
  // Request 0 publishes `windows` windows and goes on; requests 1 and 2 begin with them, after `between`.
  Plan plan(int windows, std::vector<Action> between = {}) const {
    Plan plan{"serial+prefix", {}};
    for (int w = 0; w < 3; ++w) plan.submissions.push_back(window(0, 64 * w, 64 * (w + 1)));
    plan.submissions.push_back({{{0, RowKind::prefill, 192, 200, 1, 4}}, {{ActionKind::publish, 0, windows}}});
    decode(plan, 0);
    for (const int i : {1, 2}) {
      const int end = trace_.requests[static_cast<std::size_t>(i)].prompt_length(), first = std::min(windows, (end - 1) / 64);
      plan.submissions.push_back(window(i, first * 64, end));
      plan.submissions.back().actions.push_back({ActionKind::reuse, i, first});
      if (i == 1) plan.submissions.back().actions.insert(plan.submissions.back().actions.end(), between.begin(), between.end());
      if (!between.empty()) break;
      decode(plan, i);
    }
    if (between.empty()) return plan;
    plan.submissions.push_back(window(2, 0, 193));
    for (const int i : {1, 2}) decode(plan, i);
    return plan;
  }

  const Checkpoint checkpoint_ = tiny_checkpoint();
  Trace trace_ = trace_of({request(0, 200, 3), free_request(1, 129, 4), request(2, 193, 3)});
};

TEST_P(PrefixReuse, GivesTheRecordOfAColdRun) {
  const RunRecord cold = run(checkpoint_, trace_, GetParam());
  for (int windows = 1; windows <= 3; ++windows) {
    const Plan warm_plan = plan(windows);
    const RunRecord warm = run(checkpoint_, trace_, GetParam(), {}, &warm_plan);
    expect_same_requests(cold, warm, std::to_string(windows) + " windows");
    expect_accounts(warm, "prefix");
    const int reused = std::min(windows, 2) + windows;
    EXPECT_EQ(warm.counters.published_windows, windows);
    EXPECT_EQ(warm.counters.reused_windows, reused);
    EXPECT_LT(warm.counters.executed_rows, cold.counters.executed_rows);
    for (int position = 0; position < 193; ++position) {
      const bool shared = position < 64 * windows;
      EXPECT_EQ(warm.requests[2].executions[static_cast<std::size_t>(position) * kLoops], shared ? 0 : 1) << position;
    }
  }
}

// Evicted while in use: the reader keeps what it holds, a later request finds nothing and computes.
TEST_P(PrefixReuse, AnEvictedWindowServesItsReaders) {
  const RunRecord cold = run(checkpoint_, trace_, GetParam());
  const Plan evicting = plan(2, {{ActionKind::evict, 0, 0}, {ActionKind::preempt, 1}, {ActionKind::resume, 1}});
  const RunRecord warm = run(checkpoint_, trace_, GetParam(), {}, &evicting);
  expect_same_requests(cold, warm, "evicted");
  expect_accounts(warm, "evicted");
  EXPECT_EQ(warm.counters.evicted_windows, 2);
  EXPECT_EQ(warm.counters.reused_windows, 2);
}

TEST_P(PrefixReuse, LeasesAreCountedUntilTheirReaderEnds) {
  const auto executor = reference::make_reference_executor(checkpoint_);
  executor->begin(trace_, EffectiveConfig::resolve(GetParam(), checkpoint_.config), {});
  Plan half = plan(2);
  for (const Submission& s : half.submissions) {
    const bool reader_begins = !s.actions.empty() && s.actions[0].kind == ActionKind::reuse;
    executor->submit(s);
    if (reader_begins) break;
  }
  Submission all_of_it = window(2, 0, 193);
  executor->submit(all_of_it);
  const RunRecord record = executor->finish();
  EXPECT_EQ(record.held_at_drain.published_windows, 2);
  EXPECT_EQ(record.held_at_drain.requests, 2);
}

TEST_P(PrefixReuse, WhatIsNotPublishedIsNotReused) {
  const auto executor = reference::make_reference_executor(checkpoint_);
  const EffectiveConfig config = EffectiveConfig::resolve(GetParam(), checkpoint_.config);
  executor->begin(trace_, config, {});
  EXPECT_THROW(executor->submit({{}, {{ActionKind::reuse, 1, 1}}}), InternalError);
  executor->begin(trace_, config, {});
  executor->submit({{{0, RowKind::prefill, 0, 64, 1, 3}}});
  EXPECT_THROW(executor->submit({{}, {{ActionKind::publish, 0, 1}}}), InternalError) << "before the last loop";
}

std::vector<AlgorithmConfig> prefix_settings() {
  std::vector<AlgorithmConfig> settings = sixteen_settings();
  std::erase_if(settings, [](const AlgorithmConfig& c) { return c.token_sparse_prefill.enabled != c.sparse_decode_attention.enabled; });
  return settings;
}
INSTANTIATE_TEST_SUITE_P(All, PrefixReuse, testing::ValuesIn(prefix_settings()),
                         [](const auto& setting) { return setting_name(setting.param); });

}  // namespace
}  // namespace loopgauge::test
