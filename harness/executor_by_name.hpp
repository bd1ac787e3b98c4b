// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string_view>

#include "models/checkpoint.hpp"
#include "models/executor.hpp"

namespace loopgauge::harness {

// "reference" or "optimized". Throws ConfigError for another word, UnsupportedError when the optimized runtime cannot be used.
// `checkpoint` must outlive the executor.
std::unique_ptr<Executor> make_executor(std::string_view name, const Checkpoint& checkpoint);

}  // namespace loopgauge::harness
