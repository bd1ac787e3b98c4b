// SPDX-License-Identifier: Apache-2.0
// Distances between two runs of one trace and configuration, pooled over the whole trace: one list of values per metric and loop. A single
// small tensor says little (a legitimate change of order may leave it untouched); percentiles of a pool say how far a run is from another.
//
//   metric     loop   one value per                               value
//   hidden     1..4   row that executed the loop in both runs     Euclidean norm of the difference over that of the expected row
//   inherited  2..4   row that executed the loop in neither run   the same
//   k, v       1..4   such a row, and layer                       the same, all heads of a row together, as read at the end of the run
//   gate       1..4   such a row                                  |difference| of the gate logit
//   score      3, 4   prompt row that is eligible in both runs    |difference| of the selection score
//   mass       2      decode row, layer and head with selection   |difference| of m
//   codes      1..4   block, layer, K or V of a stream            share of the 4-bit codes that differ
//   logits     -      logits row after the same loop in both      largest |difference| over the vocabulary
//   kl         -      such a row                                  KL(softmax(expected) || softmax(actual)), nats
//   top1       -      such a row                                  1 where the argmax differs, else 0: its mean is a rate
//
// Which rows executed a loop is read from the recorded decisions; rows that inherit repeat their predecessor's distance and are kept apart.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "harness/compare/error_stats.hpp"
#include "models/run_record.hpp"

namespace loopgauge::harness {

struct DistancePlace {
  int request = -1, position = -1, layer = -1, head = -1;
  std::string text() const;  // "request 0 position 17 layer 2", unused coordinates left out
};

struct PooledDistance {
  std::string_view metric;
  int loop = -1;                  // -1: of no loop
  std::vector<double> ascending;  // finite values
  int requests = 0;               // that the finite values are of
  std::int64_t non_finite = 0;    // values that are not finite: NaN or infinity on one side only
  DistancePlace largest;          // where ascending.back() is, or the first non-finite value
  bool is_rate() const { return metric == "top1"; }
  double mean() const;
  double percentile(double q) const { return percentile_of_sorted(ascending, q); }
};

// Why the two records cannot be compared value by value, as a sentence; empty when they can: same requests, lengths and extents.
std::string shape_difference(const RunRecord& expected, const RunRecord& actual);

// Every metric that both records hold values of, in the order above. Requires shape_difference() to be empty.
std::vector<PooledDistance> pooled_distances(const RunRecord& expected, const RunRecord& actual);

// executed[loop - 1][position]: whether the row at `position` executed the loop, from the recorded active sets and exit depths. Positions
// of an active set that are no prompt row are left out. `selects_tokens`: loops 3 and 4 execute the recorded sets; without it, where they
// are not empty.
std::array<std::vector<std::uint8_t>, kLoops> executed_loops(const RequestRecord& record, bool selects_tokens);
std::array<std::vector<std::uint8_t>, kLoops> executed_loops(const RequestRecord& record);

}  // namespace loopgauge::harness
