// SPDX-License-Identifier: Apache-2.0
// compact_rows: gathers active rows for execution and scatters them back (S-TSEL-6..7, S-PLAN-9).
#pragma once

#include "models/spec/op_spec.hpp"

namespace loopgauge::spec {

inline constexpr OpSpec kCompactRows{
    .name = "compact_rows",
    .equation = "x[b, :] = h[active[b], :]; after the loop h[active[b], :] = x[b, :], other rows untouched",
    .clauses = {"S-TSEL-6", "S-TSEL-7", "S-PLAN-9", "S-EX-0", "S-EX-3"},
    .axes = {"N", "B", "C"},
    .inputs = {{"h", "N, C", Format::bf16, "row-major"}, {"active", "B", Format::int32, "ascending"}},
    .outputs = {{"x",
                 "B, C",
                 Format::bf16,
                 "row-major; row b stands at position active[b]",
                 {},
                 {.kind = ToleranceKind::bit_exact, .domain = "all bit patterns", .justification = "a copy"}}},
    .accumulator = "none",
    .rounding_points = {},
    .reduction_order = "none",
    .special_values = "copied",
    .ties = "none",
    .determinism = Determinism::exact,
    .reference_source = "reference/run/recurrent_model.cpp",
    .optimized_sources = {"optimized/ops/compact_rows.cu", "optimized/ops/prepare_rows.cu"},
    .equivalence_tests = {"tests/equivalence/rows_test.cpp", "tests/equivalence/execution_modes_test.cpp"},
};

}  // namespace loopgauge::spec
