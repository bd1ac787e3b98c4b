// SPDX-License-Identifier: Apache-2.0
// Distances of whole runs. Two legitimate orders of additions already differ, so a distance is judged against theirs.
#pragma once

#include <algorithm>
#include <cmath>

#include "models/spec/tolerance.hpp"

namespace loopgauge::spec {

// Teacher-forced runs of the same trace, configuration and checkpoint: per metric (KL, same top-1, |difference of logits|) and percentile.
// Decision-forced runs: also hidden rows, K/V, gates, scores, per loop.
inline constexpr Tolerance kEndToEndDistance{
    .kind = ToleranceKind::statistical,
    .ratio = 1.5,
    .domain = "teacher-forced, at least 100 rows; decision-forced, any number (KL and gates at least 100); the reordered run is of the "
              "same trace and configuration",
    .justification =
        "The reordered profile (S-PROF-2) keeps every rounding point and changes only orders, so its distance is what a correct executor "
        "cannot avoid. The factor covers the spread between two such distances; faults smaller than this are for the checks "
        "operation by operation."};

// Rows from which a teacher-forced run's distances are judged: below, single flips decide them. Also the values from which a scattered
// metric is judged in any run (is_judged).
inline constexpr int kMinimumRows = 100;

// A percentile with m values beyond it is known to about 1 / sqrt(m) of itself, on both sides of the comparison: the factor by which the
// ratio is widened is 1 + 2 / sqrt(m), m >= 1. Next to nothing for the median of a long trace, three times where one value decides.
inline double sampling_allowance(double draws, double percentile) {
  return 1.0 + 2.0 / std::sqrt(std::fmax(1.0, draws * (1.0 - percentile)));
}

// Two metrics are scattered: they say how a difference lies, not how long it is. KL spans orders of magnitude from row to row (nothing
// where one token is certain); a gate logit is one direction of a hidden row. The rows of a request share its K/V, and so the direction of
// what differs in it: they are one draw, and the sampling allowance of these metrics counts requests. Measured, CUDA against `reordered` at
// less than 30 values of smoke: medians of KL 0.4 to 8.5 times (standard deviation a factor 2.1), of gates 0.6 to 2.0 (1.4), of the hidden
// rows they come from 0.9 to 1.1 (1.04); at 160 values of the five requests of `spec-reject`, loop 3, gates 2.3 and hidden rows 1.2. They are judged from
// kMinimumRows values on and where more than one value decides; below that the lengths of the same rows are (hidden, and logits by their
// largest difference), the gate's own arithmetic is compared bit for bit, and exits by their margins.
inline bool is_judged(double values, double percentile, bool scattered) {
  return !scattered || (values >= kMinimumRows && values * (1.0 - percentile) >= 1.0);
}

// Limit of one percentile of a distance over `draws` independent values: all of them, or the requests of a scattered metric. `reordered`,
// `exact`: the same percentile of distance(reordered, reference) and of distance(double profile, reference). The latter is the floor: where a change of order happens to leave nearly everything as it
// is (few rows, few channels, first loops), a run that is as near to the reference as the reference is to exact arithmetic is not wrong.
// `quadratic`: the distance grows with the square of the difference of logits (KL), and so does its limit.
inline double distance_limit(double draws, double percentile, double reordered, double exact, bool quadratic) {
  const double allowance = sampling_allowance(draws, percentile), ratio = kEndToEndDistance.ratio;
  if (quadratic) return allowance * allowance * std::fmax(ratio * ratio * reordered, exact);
  return allowance * std::fmax(ratio * reordered, exact);
}

// Largest move of one compared value that still counts as noise: three times what the yardsticks' largest move allows.
inline double flip_move_limit(double reordered, double exact) { return 3.0 * std::fmax(kEndToEndDistance.ratio * reordered, exact); }

// Limit of a count of flips where the reordered run has `reordered` of them and the run in double precision `exact`: the ratio of the
// former or the latter, and three standard deviations of a count (at least three flips: a yardstick of none is no proof that none are due).
inline double flip_count_limit(double reordered, double exact) {
  const double expected = std::fmax(kEndToEndDistance.ratio * reordered, exact);
  return expected + 3.0 * std::sqrt(expected) + 3.0;
}

}  // namespace loopgauge::spec
