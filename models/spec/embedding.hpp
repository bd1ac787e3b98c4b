// SPDX-License-Identifier: Apache-2.0
// embedding: rows of the embedding table (S-EMB-1).
#pragma once

#include "models/spec/op_spec.hpp"

namespace loopgauge::spec {

inline constexpr OpSpec kEmbedding{
    .name = "embedding",
    .equation = "y[m, :] = weight[token[m], :]",
    .clauses = {"S-EMB-1"},
    .axes = {"M", "C", "V"},
    .inputs = {{"token", "M", Format::int32, "token ids in [0, V)"}, {"weight", "V, C", Format::bf16, "row-major"}},
    .outputs = {{"y",
                 "M, C",
                 Format::bf16,
                 "row-major",
                 {"embedding"},
                 {.kind = ToleranceKind::bit_exact, .domain = "all bit patterns", .justification = "a copy"}}},
    .accumulator = "none",
    .rounding_points = {},
    .reduction_order = "none",
    .special_values = "copied",
    .ties = "none",
    .determinism = Determinism::exact,
    .reference_source = "reference/ops/embedding.hpp",
    .optimized_sources = {"optimized/ops/embedding.cu"},
    .equivalence_tests = {"tests/equivalence/rows_test.cpp"},
};

}  // namespace loopgauge::spec
