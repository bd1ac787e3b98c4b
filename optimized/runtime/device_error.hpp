// SPDX-License-Identifier: Apache-2.0
// Errors of the device; read where no CUDA toolkit is, too.
#pragma once

#include <string>

#include "models/error.hpp"

namespace loopgauge::optimized {

// A CUDA or cuBLAS call failed. Kernel faults are sticky: the process can report, but not use the device again.
struct DeviceError : Error {
  explicit DeviceError(const std::string& message) : Error(ErrorKind::internal, message) {}

 protected:
  DeviceError(ErrorKind kind, const std::string& message) : Error(kind, message) {}
};

// The request does not fit the device. Nothing was allocated and the device stays usable.
struct DeviceMemoryError : DeviceError {
  explicit DeviceMemoryError(const std::string& message) : DeviceError(ErrorKind::unsupported, message) {}
};

}  // namespace loopgauge::optimized
