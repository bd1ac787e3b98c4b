// SPDX-License-Identifier: Apache-2.0
// residual_add: the two residual additions of a layer (S-RES-1).
#pragma once

#include "models/spec/op_spec.hpp"

namespace loopgauge::spec {

inline constexpr OpSpec kResidualAdd{
    .name = "residual_add",
    .equation = "y[m, c] = bf16(a[m, c] + b[m, c])",
    .clauses = {"S-RES-1"},
    .axes = {"M", "C"},
    .inputs = {{"a", "M, C", Format::bf16, "row-major"}, {"b", "M, C", Format::bf16, "row-major"}},
    .outputs = {{"y",
                 "M, C",
                 Format::bf16,
                 "row-major",
                 {"residual_add.attention", "residual_add.mlp"},
                 {.kind = ToleranceKind::bit_exact,
                  .domain = "all bit patterns",
                  .justification = "One addition; rounding to FP32 and then to BF16 equals one rounding to BF16, since 24 >= 2 * 8 + 2."}}},
    .accumulator = "none",
    .rounding_points = {"bf16(a + b)"},
    .reduction_order = "none",
    .special_values = "IEEE 754",
    .ties = "none",
    .determinism = Determinism::exact,
    .reference_source = "reference/ops/residual_add.hpp",
    .optimized_sources = {"optimized/ops/residual_add.cu", "optimized/ops/decode_projections.cu"},
    .equivalence_tests = {"tests/equivalence/rows_test.cpp"},
};

}  // namespace loopgauge::spec
