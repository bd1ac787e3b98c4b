// SPDX-License-Identifier: Apache-2.0
#include "optimized/ops/exit_step.cuh"

#include "optimized/ops/elementary.cuh"
#include "optimized/runtime/cuda_check.hpp"

namespace loopgauge::optimized {
namespace {

__global__ void exit_step_kernel(const float* gates, const QueryRow* rows, ExitState* exits, int count, float threshold, int min_loops,
                                 int delay) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count || rows[i].request < 0) return;
  const int loop = rows[i].loop;
  ExitState& state = exits[rows[i].request];
  if (!isfinite(gates[i])) {
    if (state.not_finite == 0) state.not_finite = loop;
    return;
  }
  state.survival = __fmul_rn(state.survival, __fsub_rn(1.0f, sigmoid_binary32(gates[i])));
  const bool fires = loop >= min_loops && threshold < 1.0f && __fsub_rn(1.0f, state.survival) >= threshold;
  if (fires && state.gate_decides != 0) state.last_loop = min(state.last_loop, loop + delay);
}

}  // namespace

void exit_step(const float* gates, const QueryRow* rows, ExitState* exits, int count, float threshold, int min_loops, int delay,
               cudaStream_t stream) {
  if (count == 0) return;
  exit_step_kernel<<<(count + 127) / 128, 128, 0, stream>>>(gates, rows, exits, count, threshold, min_loops, delay);
  LOOPGAUGE_CUDA_CHECK_LAUNCH("exit_step");
}

}  // namespace loopgauge::optimized
