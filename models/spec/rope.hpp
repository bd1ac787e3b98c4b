// SPDX-License-Identifier: Apache-2.0
// rope: rotary position embedding of q and k (S-ROPE-1..4).
#pragma once

#include "models/spec/op_spec.hpp"

namespace loopgauge::spec {

inline constexpr OpSpec kRope{
    .name = "rope",
    .equation = "y[m, h, d] = bf16(bf16(x[m, h, d] * cos[p, d mod D/2]) + bf16(rot(x)[m, h, d] * sin[p, d mod D/2])), p = position[m]",
    .clauses = {"S-ROPE-1", "S-ROPE-2", "S-ROPE-3", "S-ROPE-4"},
    .axes = {"M", "H", "D", "X"},
    .inputs = {{"x", "M, H, D", Format::bf16, "row-major, heads side by side"},
               {"position", "M", Format::int32, "absolute position of the row"},
               {"cos", "X, D", Format::bf16, "row-major, D/2 columns"},
               {"sin", "X, D", Format::bf16, "row-major, D/2 columns"}},
    .outputs = {{"y",
                 "M, H, D",
                 Format::bf16,
                 "row-major, heads side by side",
                 {"rope.q", "rope.k"},
                 {.kind = ToleranceKind::bit_exact,
                  .domain = "equal tables (both executors take the table of S-ROPE-1..3)",
                  .justification =
                      "Products of two BF16 numbers are exact in FP32, so each of the three roundings is of one exact or once-rounded "
                      "operation; no sum has more than two terms."}}},
    .accumulator = "none",
    .rounding_points = {"RN32(theta^(-2i/D))", "RN32(p * inv_freq)", "bf16(RN32(cos)), bf16(RN32(sin))", "bf16(x * cos)",
                        "bf16(rot(x) * sin)", "bf16(sum)"},
    .reduction_order = "none",
    .special_values = "negation in rot is exact; zero times anything keeps its IEEE sign",
    .ties = "none",
    .determinism = Determinism::exact,
    .reference_source = "reference/ops/rope.cpp",
    .optimized_sources = {"optimized/ops/rope.cu", "optimized/ops/decode_projections.cu"},
    .equivalence_tests = {"tests/equivalence/rows_test.cpp"},
};

}  // namespace loopgauge::spec
