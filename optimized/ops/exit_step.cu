// SPDX-License-Identifier: Apache-2.0
#include "optimized/ops/exit_step.cuh"

#include "optimized/ops/elementary.cuh"
#include "optimized/runtime/cuda_check.hpp"

namespace loopgauge::optimized {
namespace {

__global__ void exit_step_kernel(const float* gates, float* survival, ExitVerdict* verdicts, int rows, int loop, float threshold, int min_loops) {
  const int row = blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= rows) return;
  const float left = __fmul_rn(survival[row], __fsub_rn(1.0f, sigmoid_binary32(gates[row])));
  survival[row] = left;
  const bool fires = loop >= min_loops && threshold < 1.0f && __fsub_rn(1.0f, left) >= threshold;
  verdicts[row] = !isfinite(gates[row]) ? ExitVerdict::gate_not_finite : fires ? ExitVerdict::fires : ExitVerdict::goes_on;
}

}  // namespace

void exit_step(const float* gates, float* survival, ExitVerdict* verdicts, int rows, int loop, float threshold, int min_loops, cudaStream_t stream) {
  if (rows == 0) return;
  exit_step_kernel<<<(rows + 127) / 128, 128, 0, stream>>>(gates, survival, verdicts, rows, loop, threshold, min_loops);
  LOOPGAUGE_CUDA_CHECK_LAUNCH("exit_step");
}

}  // namespace loopgauge::optimized
