// SPDX-License-Identifier: Apache-2.0
// head_argmax: logits and the greedy token (S-HEAD-1..2).
#pragma once

#include "models/spec/op_spec.hpp"

namespace loopgauge::spec {

inline constexpr OpSpec kHeadArgmax{
    .name = "head_argmax",
    .equation = "logits[m, v] = dot(h[m, :], weight[v, :]); token[m] = lowest v with the largest logit",
    .clauses = {"S-HEAD-1", "S-HEAD-2", "S-SUM-1", "S-NUM-4"},
    .axes = {"M", "C", "V"},
    .inputs = {{"h", "M, C", Format::bf16, "normed state of the last executed loop, row-major"},
               {"weight", "V, C", Format::bf16, "row-major"}},
    .outputs = {{"logits",
                 "M, V",
                 Format::fp32,
                 "row-major",
                 {"logits"},
                 {.kind = ToleranceKind::norm_bound,
                  .lane_sums = 1,
                  .magnitude = "sum over c of |h[c]| * |weight[v, c]|; terms = C",
                  .domain = "C <= 65536, no overflow",
                  .justification = "Exact products, two orders of one sum, no rounding afterwards."}},
                {"token",
                 "M",
                 Format::int32,
                 "",
                 {},
                 {.kind = ToleranceKind::decision_margin,
                  .margin_factor = 2.0,
                  .compared_value = "head_argmax.logits",
                  .domain = "finite logits",
                  .justification = "Two logits are compared and each may move by its bound. Equal logits give equal tokens."}}},
    .accumulator = "fp32",
    .rounding_points = {"fp32(dot)"},
    .reduction_order = "dot: 16 lanes, element i to lane i mod 16 ascending, halving tree 8, 4, 2, 1",
    .special_values = "a non-finite logit is a numeric error where it chooses a token (S-ERR-2); -0 equals +0",
    .ties = "lowest id",
    .determinism = Determinism::batch_invariant,
    .reference_source = "reference/ops/head_argmax.hpp",
    .optimized_sources = {"optimized/ops/head_argmax.cu"},
    .equivalence_tests = {"tests/equivalence/decisions_test.cpp"},
};

}  // namespace loopgauge::spec
