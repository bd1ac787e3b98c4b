// SPDX-License-Identifier: Apache-2.0
#include "models/run_record.hpp"

#include <array>

#include "models/error.hpp"

namespace loopgauge {

std::string_view to_string(RequestOutcome outcome) {
  switch (outcome) {
    case RequestOutcome::completed: return "completed";
    case RequestOutcome::cancelled: return "cancelled";
  }
  throw InternalError("unknown request outcome");
}

std::span<const RunCounterField> run_counter_fields() {
  using C = RunCounters;
  static constexpr std::array kFields{
      RunCounterField{"submissions", "submissions of the plan", &C::submissions},
      RunCounterField{"executed_rows", "executions of a (position, loop), recomputed and discarded ones included", &C::executed_rows},
      RunCounterField{"recomputed_rows", "executions of a (position, loop) that had been executed before", &C::recomputed_rows},
      RunCounterField{"discarded_rows", "executions past the end of a sequence that was read late", &C::discarded_rows},
      RunCounterField{"unused_statistics_rows", "decode rows whose loop-2 attention reference was made and never read", &C::unused_statistics_rows},
      RunCounterField{"most_in_flight", "submissions issued whose results had not been read, at most", &C::most_in_flight},
      RunCounterField{"host_reads", "device values that the host waited for to prepare a submission", &C::host_reads},
      RunCounterField{"graph_captures", "decode steps captured", &C::graph_captures},
      RunCounterField{"graph_replays", "decode steps replayed", &C::graph_replays},
      RunCounterField{"graph_fallbacks", "decode steps of a graph plan that ran eagerly", &C::graph_fallbacks},
      RunCounterField{"preemptions", "requests moved to host memory", &C::preemptions},
      RunCounterField{"snapshot_bytes", "bytes of all snapshots", &C::snapshot_bytes},
      RunCounterField{"published_windows", "prompt windows made reusable", &C::published_windows},
      RunCounterField{"reused_windows", "prompt windows taken from published ones", &C::reused_windows},
      RunCounterField{"evicted_windows", "published windows dropped", &C::evicted_windows},
      RunCounterField{"failures", "planned failures that happened", &C::failures},
      RunCounterField{"speculation_rounds", "rounds of block speculation decided, or commits of a token pipeline", &C::speculation_rounds},
      RunCounterField{"draft_rows", "executions of a (position, loop) by drafts", &C::draft_rows},
      RunCounterField{"verify_rows", "executions of a (position, loop) by verification", &C::verify_rows},
      RunCounterField{"rejected_rows", "executions for speculative rows that were not committed", &C::rejected_rows},
      RunCounterField{"most_doubled_bytes", "BF16 bytes of encoded positions that a round still reads as BF16, at most", &C::most_doubled_bytes},
      RunCounterField{"rewritten_rows", "positions of sealed blocks encoded again after a rejection", &C::rewritten_rows},
  };
  static_assert(kFields.size() * sizeof(std::int64_t) == sizeof(RunCounters), "a counter without a name");
  return kFields;
}

std::string describe(const HeldResources& held) {
  std::string text;
  const auto add = [&](std::int64_t count, std::string_view one, std::string_view many) {
    if (count == 0) return;
    text += (text.empty() ? "" : ", ") + std::to_string(count) + " " + std::string(count == 1 ? one : many);
  };
  add(held.requests, "request slot", "request slots");
  add(held.pages, "page", "pages");
  add(held.blocks, "sealed block", "sealed blocks");
  add(held.references, "attention reference", "attention references");
  add(held.hidden_windows, "window of hidden rows", "windows of hidden rows");
  add(held.snapshots, "snapshot", "snapshots");
  add(held.published_windows, "published window", "published windows");
  add(held.tickets, "unread submission", "unread submissions");
  add(held.transfers, "handoff region", "handoff regions");
  return text;
}

}  // namespace loopgauge
