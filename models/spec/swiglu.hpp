// SPDX-License-Identifier: Apache-2.0
// swiglu: gated activation of the MLP (S-MLP-1).
#pragma once

#include "models/spec/op_spec.hpp"

namespace loopgauge::spec {

inline constexpr OpSpec kSwiglu{
    .name = "swiglu",
    .equation = "y[m, f] = bf16(bf16(silu(gate[m, f])) * up[m, f])",
    .clauses = {"S-MLP-1", "S-ELEM-1", "S-ELEM-3", "S-ELEM-4"},
    .axes = {"M", "F"},
    .inputs = {{"gate", "M, F", Format::bf16, "row-major"}, {"up", "M, F", Format::bf16, "row-major"}},
    .outputs = {{"y",
                 "M, F",
                 Format::bf16,
                 "row-major",
                 {"swiglu"},
                 {.kind = ToleranceKind::bit_exact,
                  .domain = "all bit patterns but NaN payloads",
                  .justification = "Both executors evaluate S-ELEM-3 as written, in binary64."},
                 {.kind = ToleranceKind::ulp,
                  .ulps = 2.0,
                  .format = Format::bf16,
                  .differing_share = 0.002,
                  .domain = "finite gate; executor's silu within 2^-20 relative, |gate| <= 80",
                  .justification =
                      "silu differs by at most 2^-19 relative between the sides, so its BF16 rounding by one spacing at most and only in a "
                      "share of about 2^-19 * 2^8 = 5e-4 of the elements; times up and rounded that is less than 3 spacings, so 2 "
                      "(as in rms_norm)."}}},
    .accumulator = "none",
    .rounding_points = {"fp32(silu), once, from fp64", "bf16(silu)", "bf16(that * up)"},
    .reduction_order = "none",
    .special_values = "silu(NaN) = NaN, silu(+inf) = +inf, silu(-inf) = -inf (S-ELEM-3), silu(-0) = -0",
    .ties = "none",
    .determinism = Determinism::exact,
    .reference_source = "reference/ops/swiglu.cpp",
    .optimized_sources = {"optimized/ops/swiglu.cu", "optimized/ops/decode_projections.cu"},
    .equivalence_tests = {"tests/equivalence/rows_test.cpp"},
};

}  // namespace loopgauge::spec
