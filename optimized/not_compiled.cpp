// SPDX-License-Identifier: Apache-2.0
// The factory of a build without a CUDA toolkit: it says so.
#include "models/error.hpp"
#include "optimized/cuda_executor.hpp"

namespace loopgauge::optimized {

DeviceStatus device_status() { return {false, false, "built without CUDA"}; }

std::unique_ptr<CudaExecutor> make_cuda_executor(const Checkpoint&, const CudaExecutorOptions&) {
  throw UnsupportedError("the CUDA runtime cannot run: " + device_status().description);
}

}  // namespace loopgauge::optimized
