// SPDX-License-Identifier: Apache-2.0
// attention_dense: scores, softmax and value product over all causal positions of a logical plane (S-ATT-1..5).
#pragma once

#include "models/spec/op_spec.hpp"

namespace loopgauge::spec {

// Relative cost of operands that an executor may round to BF16 when its report says so; added as Element::declared_relative for
// probabilities and V, and, times sum |q||k| * scale, to the score error for K (S-ATT-5, S-KVQ-13).
inline constexpr double kBf16Operand = unit_roundoff(Format::bf16);
// An FP32 operand given to tensor cores as two BF16 parts, high and low: what is left over is below 2^-16 of it.
inline constexpr double kTwoBf16Parts = 0x1p-16;

// exp on the two sides: 2^-23 (S-ELEM-4) and an assumed 2^-20; rounding of s - max with |s - max| <= 128, on both sides: 2 * 2^-17; the
// division: 2u. Together below 2^-15.
inline constexpr double kSoftmaxRelative = 0x1p-15;
// A score error of delta on every key changes a probability by at most e^(2 delta) - 1 <= 2.25 delta for delta <= 0.1.
inline constexpr double kSoftmaxGain = 2.25;

inline constexpr Tolerance kScoreTolerance{
    .kind = ToleranceKind::norm_bound,
    .lane_sums = 1,
    .relative = 0x1p-22,
    .magnitude = "sum over d of |q[d]| * |k[d]|, times scale; terms = D",
    .domain = "D <= 1024, no overflow",
    .justification =
        "Two orders of one dot product (gamma_u(D/16 + 3) + gamma_2u(D)); rounding of the products where K is reconstructed FP32 "
        "and of the multiplication by scale, on both sides: 4u."};

inline constexpr OpSpec kAttentionDense{
    .name = "attention_dense",
    .equation = "o[m, h, :] = bf16(sum over j <= p of softmax_j(dot(q[m, h], K[h, j]) * scale) * V[h, j, :]), p = position[m]",
    .clauses = {"S-ATT-1", "S-ATT-2", "S-ATT-3", "S-ATT-4", "S-ATT-5", "S-SUM-1", "S-SUM-2", "S-SUM-3", "S-ELEM-2", "S-TIME-1"},
    .axes = {"M", "H", "D", "n"},
    .inputs = {{"q", "M, H, D", Format::bf16, "row-major, after RoPE"},
               {"position", "M", Format::int32, "absolute position of the row; n = position + 1"},
               {"K", "H, n, D", Format::fp32, "logical plane: BF16 values, or FP32 reconstruction below the visible frontier"},
               {"V", "H, n, D", Format::fp32, "logical plane, as K"},
               {"scale", "", Format::fp32, "RN32(1 / sqrt(D))"}},
    .outputs =
        {{"scores", "M, H, n", Format::fp32, "internal", {}, kScoreTolerance},
         {"probabilities",
          "M, H, n",
          Format::fp32,
          "internal",
          {},
          {.kind = ToleranceKind::inherited,
           .lane_sums = 1,
           .relative = kSoftmaxRelative,
           .input_gain = kSoftmaxGain,
           .magnitude = "the probability; input_error = the largest score error of the row; terms = n",
           .domain = "score error <= 0.1",
           .justification =
               "e[j] and Z are positive: the score error enters numerator and denominator (kSoftmaxGain), Z adds two orders of its "
               "sum, the rest is kSoftmaxRelative."}},
         {"o",
          "M, H, D",
          Format::bf16,
          "row-major, heads side by side",
          {"attention.output"},
          {.kind = ToleranceKind::inherited,
           .ulps = 1.0,
           .format = Format::bf16,
           .lane_sums = 1,
           .running_sums = 1,
           .relative = kSoftmaxRelative,
           .input_gain = kSoftmaxGain,
           .differing_share = 0.05,
           .magnitude = "sum over j of p[j] * |V[j, d]|; input_error = the largest score error of the row; terms = n",
           .domain = "score error <= 0.1, n <= 2^20",
           .justification =
               "First-order composition: relative error of every probability, then two orders of the sum of n products, then one BF16 "
               "rounding on each side (together one spacing). Share: the relative change is about 2 * score error + sqrt(n) u, near 1e-5 "
               "for |s| <= 20, times 2^8; 0.05 covers outputs near zero. BF16 probabilities exceed the share by design; then the report "
               "declares them and only the bound applies."}}},
    .accumulator = "fp32",
    .rounding_points = {"fp32(dot), fp32(* scale)", "fp32(s - max), fp32(exp), fp32 sum, fp32 quotient", "fp32(p * v), fp32 sum",
                        "bf16(o)"},
    .reduction_order = "scores: dot, 16 lanes; Z: lane_sum, position j in lane j mod 16; value product: ascending positions one by one",
    .special_values = "IEEE 754: a NaN score makes the row NaN; exp underflows to zero, never to NaN, because the maximum subtracts",
    .ties = "none",
    .determinism = Determinism::batch_invariant,
    .reference_source = "reference/ops/attention.cpp",
    .optimized_sources = {"optimized/ops/attention_decode.cu", "optimized/ops/attention_prefill.cu", "optimized/ops/attention_prefill_wgmma.cu",
                          "optimized/ops/attention_prefill_encoded.cu"},
    .equivalence_tests = {"tests/equivalence/attention_decode_test.cpp", "tests/equivalence/attention_prefill_test.cpp"},
};

}  // namespace loopgauge::spec
