// SPDX-License-Identifier: Apache-2.0
// inherit: hidden, K and V of a row that does not execute a loop (S-TERM-4, S-TSEL-7, S-KVA-2, S-EXIT-5).
#pragma once

#include "models/spec/op_spec.hpp"

namespace loopgauge::spec {

inline constexpr OpSpec kInherit{
    .name = "inherit",
    .equation = "H[r, p] = H[r-1, p]; K[r, h, p, :] = K[r-1, h, p, :]; V alike, for a row p that does not execute loop r",
    .clauses = {"S-TERM-3", "S-TERM-4", "S-TSEL-7", "S-KVA-2", "S-KVQ-9", "S-EXIT-5", "S-INV-5"},
    .axes = {"H", "D", "n", "C"},
    .inputs = {{"predecessor", "H, n, D", Format::bf16, "plane of loop r-1"}, {"hidden", "n, C", Format::bf16, "H[r-1]"}},
    .outputs = {{"plane",
                 "H, n, D",
                 Format::bf16,
                 "logical plane of loop r, where the row did not execute",
                 {},
                 {.kind = ToleranceKind::bit_exact,
                  .domain = "all bit patterns",
                  .justification = "the predecessor's bits: nothing is computed"}}},
    .accumulator = "none",
    .rounding_points = {},
    .reduction_order = "none",
    .special_values = "copied",
    .ties = "none",
    .determinism = Determinism::exact,
    .reference_source = "reference/kv/kv_planes.cpp",
    .gap =
        "the optimized runtime resolves inheritance when a plane is read and has no kernel of its own; comparison of logical K/V covers it",
};

}  // namespace loopgauge::spec
