// SPDX-License-Identifier: Apache-2.0
// linear: the seven projections of a layer (S-LIN-1).
#pragma once

#include "models/spec/op_spec.hpp"

namespace loopgauge::spec {

inline constexpr OpSpec kLinear{
    .name = "linear",
    .equation = "y[m, o] = bf16(dot(x[m, :], weight[o, :]))",
    .clauses = {"S-LIN-1", "S-SUM-1"},
    .axes = {"M", "I", "O"},
    .inputs = {{"x", "M, I", Format::bf16, "row-major"}, {"weight", "O, I", Format::bf16, "row-major"}},
    .outputs =
        {{"y",
          "M, O",
          Format::bf16,
          "row-major",
          {"linear.q_proj", "linear.k_proj", "linear.v_proj", "linear.o_proj", "linear.gate_proj", "linear.up_proj", "linear.down_proj"},
          {.kind = ToleranceKind::norm_bound,
           .ulps = 1.0,
           .format = Format::bf16,
           .lane_sums = 1,
           .differing_share = 0.02,
           .magnitude = "sum over i of |x[m, i]| * |weight[o, i]|; terms = I",
           .domain = "I <= 65536, no overflow of a partial sum",
           .justification =
               "Products of BF16 numbers are exact in FP32. The reference adds in chains of I/16 and a tree, the executor in any order "
               "with unit 2u: |difference| <= (gamma_u(I/16 + 3) + gamma_2u(I)) * sum |x||w|. Each side rounds to BF16 once, half a "
               "spacing each. Share: errors of random sign are about sqrt(I) u relative to the result, so differing elements are about "
               "sqrt(I) * 2^-16, 1e-3 at I = 5632; 0.02 leaves room for truncation in tensor cores and for results near zero. Integer "
               "inputs with sum |x||w| < 2^24 must be equal bit for bit."}}},
    .accumulator = "fp32",
    .rounding_points = {"bf16(dot)"},
    .reduction_order = "dot: 16 lanes, element i to lane i mod 16 ascending, halving tree 8, 4, 2, 1",
    .special_values = "IEEE 754; overflow to BF16 infinity is visible in the record",
    .ties = "none",
    .determinism = Determinism::batch_invariant,
    .reference_source = "reference/ops/linear.cpp",
    .optimized_sources = {"optimized/ops/linear.cu", "optimized/ops/linear_split_k.cu", "optimized/ops/decode_projections.cu"},
    .equivalence_tests = {"tests/equivalence/linear_test.cpp"},
};

}  // namespace loopgauge::spec
