// SPDX-License-Identifier: Apache-2.0
// exit_step: the early-exit decision of one decode row after a loop (S-EXIT-1..4).
#pragma once

#include "models/spec/op_spec.hpp"

namespace loopgauge::spec {

inline constexpr OpSpec kExitStep{
    .name = "exit_step",
    .equation = "s = s * (1 - sigmoid(g)); exit = r >= min_loops and 1 - s >= threshold and threshold < 1",
    .clauses = {"S-EXIT-1", "S-EXIT-2", "S-EXIT-3", "S-EXIT-4", "S-ELEM-3"},
    .axes = {"M"},
    .inputs = {{"g", "M", Format::fp32, "gate logit of loop r"}, {"s", "M", Format::fp32, "survival, 1 before loop 1"}},
    .outputs = {{"exit probability",
                 "M",
                 Format::fp32,
                 "1 - s",
                 {},
                 {.kind = ToleranceKind::inherited,
                  .relative = 0x1p-18,
                  .input_gain = 0.25,
                  .magnitude = "1; input_error = sum of the gate errors of loops 1..r",
                  .domain = "finite gates",
                  .justification =
                      "sigmoid has slope at most 1/4 and every factor is at most 1, so gate errors add up with gain 1/4; per loop at most "
                      "2^-20 for an executor's sigmoid and 4u for the roundings, four loops: below 2^-18 absolute."}},
                {"exit",
                 "M",
                 Format::uint8,
                 "flag",
                 {},
                 {.kind = ToleranceKind::decision_margin,
                  .margin_factor = 1.0,
                  .compared_value = "exit_step.exit probability",
                  .domain = "finite gates",
                  .justification =
                      "The decision compares one computed value with a constant: it may differ only if |1 - s - threshold| is within that "
                      "value's bound. Equal gates give equal decisions where S-ELEM-3 is evaluated as written."}}},
    .accumulator = "fp32",
    .rounding_points = {"fp32(sigmoid)", "fp32(1 - sigmoid)", "fp32(s * that)", "fp32(1 - s)"},
    .reduction_order = "loops ascending",
    .special_values = "a non-finite gate is a numeric error (S-ERR-2)",
    .ties = "1 - s == threshold exits",
    .determinism = Determinism::exact,
    .reference_source = "reference/ops/exit_gate.hpp",
    .optimized_sources = {"optimized/ops/exit_step.cu"},
    .equivalence_tests = {"tests/equivalence/decisions_test.cpp"},
};

}  // namespace loopgauge::spec
