// SPDX-License-Identifier: Apache-2.0
// residual_decode: reconstruction of an encoded row at a loop (S-KVQ-1, S-KVQ-4, S-KVQ-9).
#pragma once

#include "models/spec/op_spec.hpp"

namespace loopgauge::spec {

inline constexpr OpSpec kResidualDecode{
    .name = "residual_decode",
    .equation =
        "X_hat[1] = code * scale16 + lo16; X_hat[r] = X_hat[r-1] + (code * scale16 + lo16), or X_hat[r-1] for a row absent from stream r",
    .clauses = {"S-KVQ-1", "S-KVQ-4", "S-KVQ-5", "S-KVQ-9", "S-KVQ-13"},
    .axes = {"H", "R", "D"},
    .inputs = {{"codes", "H, R, D", Format::int4, "streams 1..r of the row's block"},
               {"lo16", "H, R, D", Format::fp16, "K [ceil(R/64), D], V [R, ceil(D/64)] per head"},
               {"scale16", "H, R, D", Format::fp16, "as lo16"}},
    .outputs =
        {{"X_hat",
          "H, R, D",
          Format::fp32,
          "",
          {},
          {.kind = ToleranceKind::bit_exact,
           .domain = "the FP32 reconstruction as recorded; narrower operands inside attention are judged there (S-KVQ-13)",
           .justification =
               "The product of a 4-bit code and an FP16 number has at most 15 bits and is exact, so fused and unfused addition agree; "
               "at most four terms in a fixed order."}}},
    .accumulator = "fp32",
    .rounding_points = {"fp32(product + lo16)", "fp32(X_hat[r-1] + that)"},
    .reduction_order = "loops ascending",
    .special_values = "all stored parameters are finite",
    .ties = "none",
    .determinism = Determinism::exact,
    .reference_source = "reference/kv/block_encoder.cpp",
    .optimized_sources = {"optimized/ops/attention_decode.cu"},
    .equivalence_tests = {"tests/equivalence/residual_encode_test.cpp", "tests/equivalence/attention_decode_test.cpp"},
};

}  // namespace loopgauge::spec
