// SPDX-License-Identifier: Apache-2.0
// The one registry of operations. Coverage, equivalence tests, the report's operation table and tap names come from it.
#pragma once

#include <span>
#include <string_view>

#include "models/spec/op_spec.hpp"

namespace loopgauge::spec {

// In execution order of a layer, then selection, sparse decode, codec, exits and draws.
std::span<const OpSpec* const> op_list();

// nullptr when there is no such operation.
const OpSpec* find_op(std::string_view name);

struct TapOwner {
  const OpSpec* op = nullptr;
  const OutputSpec* output = nullptr;
};
// The operations whose output is observed under this tap name. Usually one; "attention.output" is attention_dense or sparse_correction.
// Empty for an unknown name.
List<TapOwner, 2> find_tap(std::string_view tap);

}  // namespace loopgauge::spec
