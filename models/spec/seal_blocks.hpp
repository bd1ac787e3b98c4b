// SPDX-License-Identifier: Apache-2.0
// seal_blocks: the encoded frontier and the block cuts of the policies, at prompt completion and at every commit (S-POL-1..4).
#pragma once

#include "models/spec/op_spec.hpp"

namespace loopgauge::spec {

inline constexpr OpSpec kSealBlocks{
    .name = "seal_blocks",
    .equation =
        "E = frontier(policy, P, W, tail, committed length); [E_before, E) cut at window boundaries (prompt) or every 64 positions (flush)",
    .clauses = {"S-POL-1", "S-POL-2", "S-POL-3", "S-POL-4", "S-TIME-1", "S-TIME-3", "S-TIME-4", "S-KVQ-8", "S-INV-6", "S-EX-6"},
    .axes = {"n"},
    .inputs = {{"committed", "", Format::int32, "committed length"}, {"prompt length", "", Format::int32, "P"}},
    .outputs = {{"encoded frontier",
                 "",
                 Format::int32,
                 "positions",
                 {},
                 {.kind = ToleranceKind::bit_exact,
                  .domain = "all configurations",
                  .justification = "integer arithmetic, shared by both executors"}}},
    .accumulator = "none",
    .rounding_points = {},
    .reduction_order = "none",
    .special_values = "none",
    .ties = "none",
    .determinism = Determinism::exact,
    .reference_source = "models/algorithm_config.cpp",
    .gap = "the rule is integer code in models/ that both executors call; sealing itself is residual_encode",
};

}  // namespace loopgauge::spec
