// SPDX-License-Identifier: Apache-2.0
// update_score: how much a prompt row changed in the last loop (S-TSEL-2..3).
#pragma once

#include "models/spec/op_spec.hpp"

namespace loopgauge::spec {

inline constexpr OpSpec kUpdateScore{
    .name = "update_score",
    .equation = "score[i] = norm(H[r-1, i] - H[r-2, i]) / max(norm(H[r-1, i]), 1e-12), norm(x) = sqrt(dot(x, x))",
    .clauses = {"S-TSEL-2", "S-TSEL-3", "S-TSEL-5", "S-TSEL-9", "S-SUM-1"},
    .axes = {"N", "C"},
    .inputs = {{"current", "N, C", Format::bf16, "H[r-1], row-major"},
               {"previous", "N, C", Format::bf16, "H[r-2], row-major, other storage"}},
    .outputs =
        {{"score",
          "N",
          Format::fp32,
          "one per eligible row",
          {"update_score"},
          {.kind = ToleranceKind::bit_exact,
           .domain = "all finite inputs",
           .justification = "Both executors add in the declared order and use IEEE square root and division."},
          {.kind = ToleranceKind::norm_bound,
           .lane_sums = 1,
           .relative = 0x1p-20,
           .magnitude = "the score itself; terms = C",
           .domain = "norms between 2^-60 and 2^60",
           .justification =
               "Differences are one rounding on equal inputs, the same on both sides. Both norms are roots of positive sums: half of "
               "the two-order difference each, together one; products, roots and division: at most 16u."}}},
    .accumulator = "fp32",
    .rounding_points = {"fp32(current - previous)", "fp32 products and sums", "fp32(sqrt)", "fp32(quotient)"},
    .reduction_order = "dot: 16 lanes, element i to lane i mod 16 ascending, halving tree 8, 4, 2, 1",
    .special_values = "a non-finite score is a numeric error (S-TSEL-9); a zero norm divides by 1e-12",
    .ties = "none",
    .determinism = Determinism::batch_invariant,
    .reference_source = "reference/ops/token_selection.hpp",
    .optimized_sources = {"optimized/ops/update_score.cu"},
    .equivalence_tests = {"tests/equivalence/rows_test.cpp"},
};

}  // namespace loopgauge::spec
