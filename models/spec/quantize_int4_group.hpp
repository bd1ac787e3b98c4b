// SPDX-License-Identifier: Apache-2.0
// quantize_int4_group: the affine 4-bit codec of one group (S-KVQ-2..7).
#pragma once

#include "models/spec/op_spec.hpp"

namespace loopgauge::spec {

inline constexpr Tolerance kCodecTolerance{
    .kind = ToleranceKind::bit_exact,
    .domain = "equal FP32 inputs, finite, parameters within FP16",
    .justification =
        "Minimum and maximum do not depend on order (a zero minimum is +0, S-KVQ-6); subtraction, division, rounding to an integer "
        "and conversion to FP16 are single IEEE operations available on both sides."};

inline constexpr OpSpec kQuantizeInt4Group{
    .name = "quantize_int4_group",
    .equation = "scale = (hi - lo) / 15; code[i] = clamp(rne((x[i] - lo) / scale), 0, 15); stored fp16(lo), fp16(scale)",
    .clauses = {"S-KVQ-2", "S-KVQ-3", "S-KVQ-4", "S-KVQ-5", "S-KVQ-6", "S-KVQ-7", "S-NUM-2"},
    .axes = {"G"},
    .inputs = {{"x", "G", Format::fp32, "values of one group"}},
    .outputs = {{"code", "G", Format::int4, "0..15", {}, kCodecTolerance},
                {"lo16", "", Format::fp16, "", {}, kCodecTolerance},
                {"scale16", "", Format::fp16, "0: constant group", {}, kCodecTolerance}},
    .accumulator = "none",
    .rounding_points = {"fp32(hi - lo), fp32(/ 15)", "fp32(x - lo), fp32(/ scale), rne", "fp16(lo), fp16(scale)"},
    .reduction_order = "none (minimum and maximum)",
    .special_values = "non-finite values and FP16 overflow are numeric errors (S-KVQ-7); subnormal FP16 scales are kept; lo of zero is +0",
    .ties = "rne: half to even",
    .determinism = Determinism::exact,
    .reference_source = "reference/ops/codec.hpp",
    .optimized_sources = {"optimized/ops/residual_encode.cu"},
    .equivalence_tests = {"tests/equivalence/residual_encode_test.cpp"},
};

}  // namespace loopgauge::spec
