// SPDX-License-Identifier: Apache-2.0
// sparse_correction: attention of loops 3 and 4 over S, corrected by loop 2's reference (S-SDA-4..5).
#pragma once

#include "models/spec/attention.hpp"
#include "models/spec/op_spec.hpp"

namespace loopgauge::spec {

inline constexpr OpSpec kSparseCorrection{
    .name = "sparse_correction",
    .equation = "o[h, :] = bf16((O_ref - C_ref) + m * sum over S of softmax_S(dot(q, K[h, j]) * scale) * V[h, j, :])",
    .clauses = {"S-SDA-4", "S-SDA-5", "S-SDA-9", "S-SDA-10", "S-SDA-11", "S-SUM-1", "S-SUM-2", "S-SUM-3", "S-ELEM-2"},
    .axes = {"H", "D", "n", "k"},
    .inputs = {{"q", "H, D", Format::bf16, "one row, after RoPE, of loop r"},
               {"K", "H, n, D", Format::fp32, "logical plane of loop r"},
               {"V", "H, n, D", Format::fp32, "logical plane of loop r"},
               {"keys", "H, k", Format::int32, "S of loop 2, ascending"},
               {"m", "H", Format::fp32, "of loop 2"},
               {"C_ref", "H, D", Format::fp32, "of loop 2"},
               {"O_ref", "H, D", Format::fp32, "of loop 2, not rounded to BF16"}},
    .outputs = {{"o",
                 "H, D",
                 Format::bf16,
                 "heads side by side",
                 {"attention.output"},
                 {.kind = ToleranceKind::inherited,
                  .ulps = 1.0,
                  .format = Format::bf16,
                  .lane_sums = 1,
                  .running_sums = 1,
                  .relative = kSoftmaxRelative,
                  .input_gain = kSoftmaxGain,
                  .differing_share = 0.05,
                  .magnitude =
                      "|O_ref| + |C_ref| + m * sum over S of p_local[j] * |V[j, d]|; input_error = the largest score error; terms = k",
                  .domain = "equal S, m, C_ref and O_ref; score error <= 0.1",
                  .justification =
                      "L as the output of attention_dense with k terms; the three FP32 roundings of the combination are below 6u of the "
                      "magnitude; one BF16 rounding on each side."}}},
    .accumulator = "fp32",
    .rounding_points = {"as attention_dense, over S", "fp32(O_ref - C_ref)", "fp32(m * L)", "fp32(sum)", "bf16(o)"},
    .reduction_order = "scores: dot, 16 lanes; Z: lane_sum, index in S's list mod 16; L: ascending positions of S one by one",
    .special_values = "IEEE 754; missing or stale reference state is an error (S-SDA-10)",
    .ties = "none",
    .determinism = Determinism::batch_invariant,
    .reference_source = "reference/ops/sparse_decode.hpp",
    .optimized_sources = {"optimized/ops/sparse_correction.cu"},
    .equivalence_tests = {"tests/equivalence/sparse_correction_test.cpp"},
};

}  // namespace loopgauge::spec
