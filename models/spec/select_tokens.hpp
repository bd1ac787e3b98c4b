// SPDX-License-Identifier: Apache-2.0
// select_tokens: the active rows of a window at loop 3 or 4 (S-TSEL-4..5).
#pragma once

#include "models/spec/op_spec.hpp"

namespace loopgauge::spec {

inline constexpr OpSpec kSelectTokens{
    .name = "select_tokens",
    .equation = "active = first min(budget(bp, N), |eligible|) eligible rows by (score descending, position ascending), listed ascending",
    .clauses = {"S-TSEL-1", "S-TSEL-4", "S-TSEL-5", "S-TSEL-10", "S-CFG-2", "S-NUM-4", "S-INV-9"},
    .axes = {"N", "B"},
    .inputs = {{"score", "N", Format::fp32, "one per eligible row"}, {"eligible", "N", Format::uint8, "member of active[r-1]"}},
    .outputs =
        {{"active",
          "B",
          Format::int32,
          "absolute positions, ascending",
          {},
          {.kind = ToleranceKind::decision_margin,
           .margin_factor = 2.0,
           .compared_value = "update_score.score",
           .domain = "finite scores",
           .justification =
               "Equal scores give equal sets. Otherwise a row may be exchanged only if its score lies within both scores' bounds of the "
               "boundary."}}},
    .accumulator = "none",
    .rounding_points = {},
    .reduction_order = "none",
    .special_values = "scores are finite here; -0 equals +0",
    .ties = "lower position first",
    .determinism = Determinism::exact,
    .reference_source = "reference/ops/token_selection.hpp",
    .optimized_sources = {"optimized/ops/select_tokens.cu"},
    .equivalence_tests = {"tests/equivalence/decisions_test.cpp"},
};

}  // namespace loopgauge::spec
