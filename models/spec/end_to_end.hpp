// SPDX-License-Identifier: Apache-2.0
// Distances of whole runs. Two legitimate orders of additions already differ, so a distance is judged against theirs.
#pragma once

#include "models/spec/tolerance.hpp"

namespace loopgauge::spec {

// Teacher-forced runs of the same trace, configuration and checkpoint: per metric (KL, same top-1, |difference of logits|) and percentile.
inline constexpr Tolerance kEndToEndDistance{
    .kind = ToleranceKind::statistical,
    .ratio = 1.5,
    .domain = "teacher-forced, at least 100 rows; the reordered run is of the same trace and configuration",
    .justification =
        "The reordered profile (S-PROF-2) keeps every rounding point and changes only orders, so its distance is what a correct executor "
        "cannot avoid. The factor covers the spread between two such distances; faults smaller than this are for the checks "
        "operation by operation."};

}  // namespace loopgauge::spec
