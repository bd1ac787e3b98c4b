// SPDX-License-Identifier: Apache-2.0
#include "harness/executor_by_name.hpp"

#include <string>

#include "models/error.hpp"
#include "optimized/cuda_executor.hpp"
#include "reference/reference_executor.hpp"

namespace loopgauge::harness {

std::unique_ptr<Executor> make_executor(std::string_view name, const Checkpoint& checkpoint) {
  if (name == "reference") return reference::make_reference_executor(checkpoint);
  if (name == "optimized") return optimized::make_cuda_executor(checkpoint);
  throw ConfigError("executor '" + std::string(name) + "' is not one of: reference, optimized");
}

}  // namespace loopgauge::harness
