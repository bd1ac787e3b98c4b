// SPDX-License-Identifier: Apache-2.0
#include "harness/executor_by_name.hpp"

#include <string>

#include "harness/handoff/handoff_executor.hpp"
#include "harness/handoff/host_transport.hpp"
#include "models/error.hpp"
#include "optimized/cuda_executor.hpp"
#include "reference/reference_executor.hpp"

namespace loopgauge::harness {

std::unique_ptr<Executor> make_executor(std::string_view name, const Checkpoint& checkpoint) {
  if (name == "reference") {
    return make_handoff_executor([&checkpoint] { return reference::make_reference_executor(checkpoint); }, make_host_transport);
  }
  if (name == "optimized") {
    return make_handoff_executor([&checkpoint]() -> std::unique_ptr<Executor> { return optimized::make_cuda_executor(checkpoint); }, make_host_transport);
  }
  throw ConfigError("executor '" + std::string(name) + "' is not one of: reference, optimized");
}

}  // namespace loopgauge::harness
