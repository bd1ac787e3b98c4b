// SPDX-License-Identifier: Apache-2.0
// kv_append: writes K (after RoPE) and V of the executed rows into the plane of the loop (S-KVA-1).
#pragma once

#include "models/spec/op_spec.hpp"

namespace loopgauge::spec {

inline constexpr OpSpec kKvAppend{
    .name = "kv_append",
    .equation = "K[loop, h, position[m], :] = k[m, h, :], V[loop, h, position[m], :] = v[m, h, :]",
    .clauses = {"S-KVA-1", "S-KVA-2"},
    .axes = {"M", "H", "D", "n"},
    .inputs = {{"k", "M, H, D", Format::bf16, "row-major, after RoPE"},
               {"v", "M, H, D", Format::bf16, "row-major"},
               {"position", "M", Format::int32, "absolute position of the row"}},
    .outputs = {{"plane",
                 "H, n, D",
                 Format::bf16,
                 "logical; the storage order belongs to the executor",
                 {},
                 {.kind = ToleranceKind::bit_exact, .domain = "all bit patterns", .justification = "a copy"}}},
    .accumulator = "none",
    .rounding_points = {},
    .reduction_order = "none",
    .special_values = "copied",
    .ties = "none",
    .determinism = Determinism::exact,
    .reference_source = "reference/kv/kv_planes.cpp",
    .optimized_sources = {"optimized/ops/kv_append.cu", "optimized/ops/decode_projections.cu"},
    .equivalence_tests = {"tests/equivalence/kv_append_test.cpp"},
};

}  // namespace loopgauge::spec
