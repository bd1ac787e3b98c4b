// SPDX-License-Identifier: Apache-2.0
// reference_statistics: what loop 2 of a decode row leaves for loops 3 and 4 (S-SDA-1..3).
#pragma once

#include "models/spec/attention.hpp"
#include "models/spec/op_spec.hpp"

namespace loopgauge::spec {

// Shared by m (magnitude m), C_ref and O_ref (magnitude sum of p |V| over their keys).
constexpr Tolerance reference_statistics_tolerance(std::string_view magnitude) {
  return {.kind = ToleranceKind::inherited,
          .lane_sums = 1,
          .running_sums = 1,
          .relative = kSoftmaxRelative,
          .input_gain = kSoftmaxGain,
          .magnitude = magnitude,
          .domain = "the same S on both sides; score error <= 0.1",
          .justification =
              "As the value product of attention_dense: probabilities with their inherited error, two orders of one sum of products; no "
              "BF16 rounding."};
}

inline constexpr OpSpec kReferenceStatistics{
    .name = "reference_statistics",
    .equation = "S = top budget(bp, n) keys by logit; m = sum_S p; C_ref = sum_S p V; O_ref = sum_n p V",
    .clauses = {"S-SDA-1", "S-SDA-2", "S-SDA-3", "S-SDA-6", "S-SDA-7", "S-SDA-8", "S-CFG-2", "S-SUM-3", "S-NUM-4"},
    .axes = {"H", "D", "n", "k"},
    .inputs = {{"scores", "H, n", Format::fp32, "scaled logits of loop 2, one query row"},
               {"probabilities", "H, n", Format::fp32, "of loop 2"},
               {"V", "H, n, D", Format::fp32, "logical plane of loop 2"}},
    .outputs = {{"keys",
                 "H, k",
                 Format::int32,
                 "absolute positions, ascending",
                 {"sparse_decode.keys"},
                 {.kind = ToleranceKind::decision_margin,
                  .margin_factor = 2.0,
                  .compared_value = "attention_dense.scores",
                  .domain = "finite logits",
                  .justification =
                      "Equal logits give equal sets, exactly. Otherwise a key may be exchanged only if its logit lies within both logits' "
                      "bounds of the boundary."}},
                {"m",
                 "H",
                 Format::fp32,
                 "",
                 {"sparse_decode.mass"},
                 reference_statistics_tolerance("m; input_error = the largest score error; terms = n")},
                {"C_ref",
                 "H, D",
                 Format::fp32,
                 "",
                 {"sparse_decode.c_ref"},
                 reference_statistics_tolerance("sum over S of p[j] * |V[j, d]|; input_error = the largest score error; terms = n")},
                {"O_ref",
                 "H, D",
                 Format::fp32,
                 "",
                 {},
                 reference_statistics_tolerance("sum over n of p[j] * |V[j, d]|; input_error = the largest score error; terms = n")}},
    .accumulator = "fp32",
    .rounding_points = {"fp32(p * v), fp32 sum"},
    .reduction_order = "m, C_ref: ascending positions of S one by one; O_ref: ascending positions one by one",
    .special_values = "a non-finite logit is a numeric error (S-SDA-8); -0 equals +0",
    .ties = "lower position first",
    .determinism = Determinism::batch_invariant,
    .reference_source = "reference/ops/sparse_decode.hpp",
    .optimized_sources = {"optimized/ops/reference_statistics.cu", "optimized/ops/select_keys.cu"},
    .equivalence_tests = {"tests/equivalence/reference_statistics_test.cpp", "tests/equivalence/select_keys_test.cpp"},
};

}  // namespace loopgauge::spec
