// SPDX-License-Identifier: Apache-2.0
// The current device of the calling thread, for a while: objects of a device are made and used with it current.
#pragma once

#include <cuda_runtime_api.h>

#include "optimized/runtime/cuda_check.hpp"

namespace loopgauge::optimized {

class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    LOOPGAUGE_CUDA_CHECK(cudaGetDevice(&before_));
    if (device == before_) return;
    LOOPGAUGE_CUDA_CHECK(cudaSetDevice(device));
    changed_ = true;
  }
  ~DeviceGuard() {
    if (changed_) static_cast<void>(cudaSetDevice(before_));
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
};

}  // namespace loopgauge::optimized
