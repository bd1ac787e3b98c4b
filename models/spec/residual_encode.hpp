// SPDX-License-Identifier: Apache-2.0
// residual_encode: base and cross-loop residual streams of one block (S-KVQ-1, S-KVQ-8..12).
#pragma once

#include "models/spec/op_spec.hpp"
#include "models/spec/quantize_int4_group.hpp"

namespace loopgauge::spec {

inline constexpr OpSpec kResidualEncode{
    .name = "residual_encode",
    .equation = "stream 1 = enc(X[1]); stream r = enc(X[r] - X_hat[r-1]) over the rows that executed loop r, compact",
    .clauses = {"S-KVQ-1", "S-KVQ-8", "S-KVQ-9", "S-KVQ-10", "S-KVQ-11", "S-KVQ-12"},
    .axes = {"H", "R", "D"},
    .inputs = {{"X", "H, R, D", Format::bf16, "K after RoPE or V, of the stream's rows"},
               {"X_hat", "H, R, D", Format::fp32, "reconstruction of loop r-1; nothing at loop 1"}},
    .outputs = {{"codes", "H, R, D", Format::int4, "groups: K 64 compact rows per channel, V 64 channels per row", {}, kCodecTolerance},
                {"lo16", "H, R, D", Format::fp16, "K [ceil(R/64), D], V [R, ceil(D/64)] per head", {}, kCodecTolerance},
                {"scale16", "H, R, D", Format::fp16, "as lo16", {}, kCodecTolerance}},
    .accumulator = "none",
    .rounding_points = {"fp32(X - X_hat)", "as quantize_int4_group"},
    .reduction_order = "none",
    .special_values = "non-finite values and FP16 overflow are numeric errors naming request, tensor, loop, layer, group (S-KVQ-7)",
    .ties = "rne: half to even",
    .determinism = Determinism::exact,
    .reference_source = "reference/kv/block_encoder.cpp",
    .optimized_sources = {"optimized/ops/residual_encode.cu"},
    .equivalence_tests = {"tests/equivalence/residual_encode_test.cpp"},
};

}  // namespace loopgauge::spec
