// SPDX-License-Identifier: Apache-2.0
// Plans that speculate, by hand, and drafts that are right and wrong where a test wants them to be.
#pragma once

#include <functional>

#include "tests/reference/executor/tiny_model.hpp"

namespace loopgauge::test {

// Every prompt, then rounds or cycles of every request, one request after the other.
inline Plan speculative_plan(const Trace& trace, const EffectiveConfig& config, const Speculation& speculation) {
  Plan plan = serial_plan(trace, config);
  std::erase_if(plan.submissions, [](const Submission& s) { return s.items[0].kind == RowKind::decode; });
  plan.mode = speculation.kind == SpeculationKind::block ? "block_spec" : "pipeline_spec";
  plan.speculation = speculation;
  const int d = speculation.draft_depth, rows = speculation.live_rows();
  for (int i = 0; i < static_cast<int>(trace.requests.size()); ++i) {
    for (int j = 0; j < forwarded(trace.requests[static_cast<std::size_t>(i)]); ++j) {
      if (speculation.kind == SpeculationKind::block) {
        plan.submissions.push_back({{{i, RowKind::draft, 0, rows, 1, d}}});
        plan.submissions.push_back({{{i, RowKind::verify, 0, rows, d + 1, kLoops}}});
        continue;
      }
      for (int cycle = 0; cycle < rows; ++cycle) {
        for (int step = 1; step <= d; ++step) {
          Submission s;
          for (int stage = rows - 1; stage >= 0; --stage) {
            const int loop = stage * d + step;
            if (loop <= kLoops) s.items.push_back({i, RowKind::stage, stage, stage + 1, loop, loop});
          }
          if (!s.items.empty()) plan.submissions.push_back(std::move(s));
        }
      }
    }
  }
  return plan;
}

// `trace` with the tokens of `record` as drafts, wrong where `wrong` (request, token index) says so.
inline Trace with_drafts(Trace trace, const RunRecord& record, const std::function<bool(int, int)>& wrong) {
  for (std::size_t i = 0; i < trace.requests.size(); ++i) {
    TraceRequest& r = trace.requests[i];
    const auto& tokens = record.requests[i].tokens;
    for (std::size_t j = 0; j < static_cast<std::size_t>(r.max_new_tokens); ++j) {
      const std::int32_t right = j < tokens.size() ? tokens[j] : 0;
      r.draft_tokens.push_back(wrong(static_cast<int>(i), static_cast<int>(j)) ? (right + 1) % trace.vocab_size : right);
    }
  }
  return trace;
}

}  // namespace loopgauge::test
