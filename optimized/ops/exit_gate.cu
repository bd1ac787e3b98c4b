// SPDX-License-Identifier: Apache-2.0
#include "optimized/ops/exit_gate.cuh"

#include "optimized/runtime/cuda_check.hpp"

namespace loopgauge::optimized {
namespace {

constexpr int kRowsPerBlock = 8;

__global__ void exit_gate_kernel(const Bfloat16* __restrict__ states, const Bfloat16* __restrict__ weight, const Bfloat16* __restrict__ bias,
                                 float* __restrict__ logits, int rows, int hidden) {
  const int row = blockIdx.x * kRowsPerBlock + threadIdx.x / kLanes;
  if (row >= rows) return;
  const int lane = threadIdx.x % kLanes;
  const Bfloat16* state = states + static_cast<std::size_t>(row) * hidden;
  float sum = 0.0f;
#pragma unroll 8
  for (int i = lane; i < hidden; i += kLanes) sum = __fadd_rn(sum, __fmul_rn(to_float(state[i]), to_float(weight[i])));
  sum = reduce_lanes(sum, threadIdx.x % 32 < kLanes ? 0x0000FFFFu : 0xFFFF0000u);
  if (lane == 0) logits[row] = __fadd_rn(sum, to_float(*bias));
}

}  // namespace

void exit_gate(const Bfloat16* states, const Bfloat16* weight, const Bfloat16* bias, float* logits, int rows, int hidden, cudaStream_t stream) {
  if (rows == 0) return;
  exit_gate_kernel<<<(rows + kRowsPerBlock - 1) / kRowsPerBlock, kRowsPerBlock * kLanes, 0, stream>>>(states, weight, bias, logits, rows, hidden);
  LOOPGAUGE_CUDA_CHECK_LAUNCH("exit_gate");
}

}  // namespace loopgauge::optimized
