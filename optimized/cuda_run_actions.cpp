// SPDX-License-Identifier: Apache-2.0
#include <string>

#include "models/error.hpp"
#include "optimized/cuda_run.hpp"

namespace loopgauge::optimized {

void CudaRun::act(const Action& action) {
  throw UnsupportedError("the CUDA runtime has no action '" + std::string(to_string(action.kind)) + "' (request " + std::to_string(action.request) + ")");
}

}  // namespace loopgauge::optimized
