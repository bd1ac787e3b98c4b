// SPDX-License-Identifier: Apache-2.0
// exit_gate: the gate logit of a row after a loop (S-GATE-1).
#pragma once

#include "models/spec/op_spec.hpp"

namespace loopgauge::spec {

inline constexpr OpSpec kExitGate{
    .name = "exit_gate",
    .equation = "g[m] = dot(h[m, :], weight) + bias",
    .clauses = {"S-GATE-1", "S-SUM-1"},
    .axes = {"M", "C"},
    .inputs = {{"h", "M, C", Format::bf16, "normed state of the loop, row-major"},
               {"weight", "C", Format::bf16, ""},
               {"bias", "", Format::bf16, ""}},
    .outputs =
        {{"g",
          "M",
          Format::fp32,
          "",
          {"exit_gate"},
          {.kind = ToleranceKind::bit_exact, .domain = "all finite inputs", .justification = "Both executors add in the declared order."},
          {.kind = ToleranceKind::norm_bound,
           .lane_sums = 1,
           .relative = 0x1p-23,
           .magnitude = "sum over c of |h[c]| * |weight[c]|, plus |bias|; terms = C",
           .domain = "C <= 65536, no overflow",
           .justification = "Two orders of one dot product, and the addition of the bias on both sides (2u)."}}},
    .accumulator = "fp32",
    .rounding_points = {"fp32(dot)", "fp32(+ bias)"},
    .reduction_order = "dot: 16 lanes, element i to lane i mod 16 ascending, halving tree 8, 4, 2, 1",
    .special_values = "IEEE 754; refused where it decides an exit (S-ERR-2)",
    .ties = "none",
    .determinism = Determinism::batch_invariant,
    .reference_source = "reference/ops/exit_gate.hpp",
    .optimized_sources = {"optimized/ops/exit_gate.cu"},
    .equivalence_tests = {"tests/equivalence/decisions_test.cpp"},
};

}  // namespace loopgauge::spec
