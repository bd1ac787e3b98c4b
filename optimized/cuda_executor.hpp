// SPDX-License-Identifier: Apache-2.0
// The optimized CUDA runtime behind the Executor interface.
#pragma once

#include <memory>
#include <string>

#include "models/checkpoint.hpp"
#include "models/executor.hpp"

namespace loopgauge::optimized {

struct DeviceStatus {
  bool compiled = false;           // this binary contains the CUDA runtime
  bool available = false;          // a usable device is present
  std::string description;         // device name and driver, or why it cannot be used ("no CUDA device", "built without CUDA")
};

// Never throws.
DeviceStatus device_status();

// Throws UnsupportedError with device_status().description when the runtime cannot be used. `checkpoint` is copied to the device and
// need not outlive the call.
std::unique_ptr<Executor> make_cuda_executor(const Checkpoint& checkpoint);

}  // namespace loopgauge::optimized
