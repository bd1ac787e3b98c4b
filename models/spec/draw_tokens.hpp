// SPDX-License-Identifier: Apache-2.0
// draw_tokens: the distribution of a row, the token drawn from it, and what becomes of a candidate (S-SAMP-1..4).
#pragma once

#include "models/spec/op_spec.hpp"

namespace loopgauge::spec {

inline constexpr OpSpec kDrawTokens{
    .name = "draw_tokens",
    .equation = "p = softmax(logits / t); a candidate x stands when u q(x) < p(x), else the token is drawn from max(p - q, 0); without one from p",
    .clauses = {"S-SAMP-1", "S-SAMP-2", "S-SAMP-3", "S-SAMP-4", "S-ELEM-2", "S-SUM-2", "S-SUM-3"},
    .axes = {"M", "V"},
    .inputs = {{"logits", "M, V", Format::fp32, "row-major"},
               {"u", "M", Format::fp32, "numbers of the position that is decided, one for each purpose"},
               {"candidate", "M", Format::int32, "token id, or none"},
               {"q", "M, V", Format::fp32, "what the candidate was drawn from; 1 at a given one"}},
    .outputs = {{"p",
                 "M, V",
                 Format::fp32,
                 "row-major",
                 {},
                 {.kind = ToleranceKind::bit_exact,
                  .domain = "finite logits, 0.01 <= t <= 100",
                  .justification = "Both sides divide, take the exponential and add as S-SAMP-1 writes it."},
                 {.kind = ToleranceKind::norm_bound,
                  .lane_sums = 1,
                  .magnitude = "p[v]; terms = V",
                  .domain = "the same",
                  .justification = "Another order of one sum of positive terms moves the divisor by its bound; the quotient follows."}},
                {"token",
                 "M",
                 Format::int32,
                 "",
                 {},
                 {.kind = ToleranceKind::decision_margin,
                  .margin_factor = 2.0,
                  .compared_value = "draw_tokens.p",
                  .domain = "finite logits",
                  .justification = "A number is compared with probabilities and their running sums. Equal distributions give equal tokens."}}},
    .accumulator = "fp32",
    .rounding_points = {"fp32(logit / t)", "fp32(that - max)", "fp32(exp)", "fp32(lane_sum)", "fp32(e / sum)", "fp32(p - q)", "fp32(u * W)"},
    .reduction_order = "lane_sum: 16 lanes, id v to lane v mod 16 ascending, halving tree; running_sum over ids ascending",
    .special_values = "a row with a non-finite logit is a numeric error (S-ERR-2) and draws nothing",
    .ties = "u equal to a running sum takes the next id; u q(x) equal to p(x) rejects",
    .determinism = Determinism::batch_invariant,
    .reference_source = "reference/ops/sampling.hpp",
    .optimized_sources = {"optimized/ops/draw_tokens.cu", "optimized/ops/speculative_rows.cu"},
    .equivalence_tests = {"tests/equivalence/draw_tokens_test.cpp"},
};

}  // namespace loopgauge::spec
