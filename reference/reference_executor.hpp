// SPDX-License-Identifier: Apache-2.0
// The bit-explicit CPU reference behind the Executor interface.
#pragma once

#include <memory>

#include "models/checkpoint.hpp"
#include "models/executor.hpp"

namespace loopgauge::reference {

// `checkpoint` must outlive the executor. Supports every profile, every configuration and the planted faults with `in_reference`.
std::unique_ptr<Executor> make_reference_executor(const Checkpoint& checkpoint);

}  // namespace loopgauge::reference
