// SPDX-License-Identifier: Apache-2.0
// Judges a candidate run against the reference's run of the same trace and configuration (levels 3 to 5 of the comparison): pure functions
// over records. Limits are those of models/spec/end_to_end.hpp.
//
//   decision_forced   the candidate took the reference's tokens and decisions: arithmetic alone. Every distance is judged.
//   teacher_forced    the reference's tokens, own decisions: logits, KL and top-1 are judged where there are enough rows; decisions that
//                     differ are explained one by one, and their rate per kind is judged against that of the reordered reference,
//                     whether a flip follows from another or not.
//   free_run          own tokens: the first token of a request that differs, with its margin, and the share of requests that have one.
//                     After it the two runs compute different things: nothing later in the request is compared.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "harness/compare/distances.hpp"
#include "harness/compare/flips.hpp"
#include "models/run_record.hpp"
#include "models/trace.hpp"

namespace loopgauge::harness {

// Distances of two other runs from the reference, taken like the candidate's: the yardstick and the floor.
struct Yardstick {
  std::vector<PooledDistance> reordered;  // profile `reordered`
  std::vector<PooledDistance> exact;      // profile `double`
};

// One metric and loop of the candidate. Percentiles are in the order of kPercentiles; a rate has its mean alone, in the last place. The
// limit of a percentile that is not judged is infinite.
struct DistanceVerdict {
  std::string_view metric;
  int loop = -1;
  bool rate = false;
  std::int64_t values = 0;
  std::int64_t expected_values = 0;  // what the reordered run has: with the same decisions, no run has fewer
  std::int64_t non_finite = 0;
  double mean = 0.0;
  std::array<double, kPercentiles.size()> candidate{}, reordered{}, exact{}, limit{};
  std::size_t worst = 0;     // index of the percentile nearest to its limit, or farthest above
  double worst_ratio = 0.0;  // candidate / limit there; 0 when both are 0, infinite when only the limit is
  bool incomplete = false;   // values are missing
  bool judged = true;        // false: stated only
  bool passed = true;        // true when not judged
  DistancePlace largest;
  // "k loop 2: 99th percentile 0.0123 of 840 values, limit 0.0115 (reordered 0.00766, double 0.0101), largest at ...", or what is missing.
  std::string text() const;
};

// Decision-forced: every metric of `candidate` or of the reordered run, judged. One of which the candidate lacks values fails: the
// reordered run took the same decisions, so it has the same rows.
std::vector<DistanceVerdict> judge_distances(const std::vector<PooledDistance>& candidate, const Yardstick& yardstick);
// Teacher-forced: logits, kl and top1 are judged, and from kMinimumRows rows on; everything else is stated. Other decisions
// make other rows, so their number is free, but none at all fails.
std::vector<DistanceVerdict> judge_teacher_forced_distances(const std::vector<PooledDistance>& candidate, const Yardstick& yardstick);

// Noise of the compared values of decisions: limits of the largest decision-forced distances, with "key_logits" among them where keys are
// selected.
FlipLimits flip_limits(const Yardstick& decision_forced);

// Flips of one kind.
struct FlipVerdict {
  DecisionKind kind = DecisionKind::token;
  std::int64_t decided = 0, flipped = 0, roots = 0, unexplained = 0;
  std::int64_t reordered = 0;   // flips of the reordered reference
  std::int64_t exact = 0;       // and of double precision
  double limit = 0.0;           // of `flipped`, those that follow from another flip included
  double largest_margin = 0.0;  // of explained roots
  bool passed = true;           // nothing unexplained, within the limit
  double rate() const { return static_cast<double>(flipped) / static_cast<double>(decided); }
  double rate_limit() const { return limit / static_cast<double>(decided); }
};
// Kinds that were decided at all. `candidate` must have been explained.
std::vector<FlipVerdict> judge_flips(const Decisions& candidate, const Decisions& reordered, const Decisions& exact);

// What a decision-forced run did not take over: the first difference in tokens, active sets, keys, exits, frontiers or encoded rows, as a
// sentence; empty when all are the reference's.
std::string forced_decision_difference(const RunRecord& expected, const RunRecord& actual);

// The trace with the tokens that `reference` emitted forced upon requests that ran freely; its record is then that of a forced run, except
// for the last token, which is emitted but not forwarded.
Trace forced_trace(const Trace& trace, const RunRecord& reference);
// True when every request of the trace is forced.
bool all_forced(const Trace& trace);

// The free-running requests of a trace: where the candidate's tokens leave the reference's. Only the first token that differs is judged:
// what follows it is fed other tokens.
struct FreeRunVerdict {
  std::int64_t requests = 0, tokens = 0;  // free requests, and tokens compared up to their first difference
  std::int64_t diverged = 0, unexplained = 0;
  std::int64_t reordered = 0, exact = 0;  // requests that the reordered reference, and double precision, would leave
  double limit = 0.0;                     // of `diverged`
  std::string text;                       // the first divergence: its margin and what the two logits moved by
  bool passed() const { return unexplained == 0 && static_cast<double>(diverged) <= limit; }
};
// `limit`: largest move of a logit that counts as noise; a larger one is explained by a flip of another decision in the causal past of the
// divergence. `candidate`: flips of the candidate under the reference's tokens, explained; up to the divergence they are those of the free
// run too. Of a request that draws its tokens every logit of the row counts: that its token follows from them is the audit's rule.
// `reordered`, `exact`: of the yardsticks under the same tokens; with greedy tokens a run leaves where it first flips an argmax.
FreeRunVerdict judge_free_run(const Trace& trace, const RunRecord& expected, const RunRecord& actual, double limit,
                              const Decisions& candidate, const Decisions& reordered, const Decisions& exact);

}  // namespace loopgauge::harness
