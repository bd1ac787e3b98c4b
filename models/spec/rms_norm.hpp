// SPDX-License-Identifier: Apache-2.0
// rms_norm: root-mean-square normalization with a weight, two BF16 roundings (S-RMS-1..3).
#pragma once

#include "models/spec/op_spec.hpp"

namespace loopgauge::spec {

inline constexpr OpSpec kRmsNorm{
    .name = "rms_norm",
    .equation = "y[m, c] = bf16(weight[c] * bf16(x[m, c] * inv[m])), inv = 1 / sqrt(dot(x, x) / C + eps)",
    .clauses = {"S-RMS-1", "S-RMS-2", "S-RMS-3", "S-SUM-1"},
    .axes = {"M", "C"},
    .inputs = {{"x", "M, C", Format::bf16, "row-major"}, {"weight", "C", Format::bf16, ""}, {"eps", "", Format::fp32, ""}},
    .outputs =
        {{"y",
          "M, C",
          Format::bf16,
          "row-major",
          {"rms_norm.input_layernorm", "rms_norm.input_layernorm_2", "rms_norm.post_attention_layernorm",
           "rms_norm.post_attention_layernorm_2", "rms_norm.norm"},
          {.kind = ToleranceKind::bit_exact,
           .domain = "all finite inputs",
           .justification =
               "Both executors add the squares in the declared order (16 lanes, S-SUM-1) and use IEEE division and square root."},
          {.kind = ToleranceKind::ulp,
           .ulps = 2.0,
           .format = Format::bf16,
           .differing_share = 0.02,
           .domain = "C <= 32768, sum of squares neither overflows nor is subnormal",
           .justification =
               "All terms of the sum are positive, so two orders differ by at most gamma(C/16 + 3) + gamma(C), and inv by half of it "
               "plus 6u: below 2^-9. x * inv then moves by less than half a BF16 spacing and bf16 of it by at most one spacing, "
               "2^-7 relative; the weight turns that into less than 2 spacings of the product, rounding into less than 3, so 2. The "
               "expected share of differing elements is the relative change times 2^8: 1e-3 for random errors at C = 2048, 0.016 "
               "if all roundings went one way."}}},
    .accumulator = "fp32",
    .rounding_points = {"fp32 after every operation of inv", "bf16(x * inv)", "bf16(weight * that)"},
    .reduction_order = "dot: 16 lanes, element i to lane i mod 16 ascending, halving tree 8, 4, 2, 1",
    .special_values = "IEEE 754: a non-finite x makes its row NaN or zero; a zero row gives zeros (eps > 0)",
    .ties = "none",
    .determinism = Determinism::batch_invariant,
    .reference_source = "reference/ops/rms_norm.cpp",
    .optimized_sources = {"optimized/ops/rms_norm.cu", "optimized/ops/decode_projections.cu"},
    .equivalence_tests = {"tests/equivalence/rows_test.cpp"},
};

}  // namespace loopgauge::spec
