// SPDX-License-Identifier: Apache-2.0
#include "optimized/ops/swiglu.cuh"

#include "optimized/ops/elementary.cuh"
#include "optimized/runtime/cuda_check.hpp"

namespace loopgauge::optimized {
namespace {

__global__ void __launch_bounds__(256) swiglu_kernel(const uint4* __restrict__ gate_up, uint4* __restrict__ output, std::size_t count,
                                                     int row_chunks) {
  const std::size_t i = blockIdx.x * static_cast<std::size_t>(blockDim.x) + threadIdx.x;
  if (i >= count) return;
  const std::size_t row = i / row_chunks;
  const std::size_t gate_chunk = row * 2 * row_chunks + i % row_chunks;
  union {
    uint4 vector;
    Bfloat16 values[8];
  } gate, up;
  gate.vector = gate_up[gate_chunk];
  up.vector = gate_up[gate_chunk + row_chunks];
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    const Bfloat16 activated = to_bfloat16(silu_binary32(to_float(gate.values[k])));
    gate.values[k] = to_bfloat16(__fmul_rn(to_float(activated), to_float(up.values[k])));
  }
  output[i] = gate.vector;
}

}  // namespace

void swiglu(const Bfloat16* gate_up, Bfloat16* output, int rows, int intermediate, cudaStream_t stream) {
  if (intermediate % 8 != 0) throw UnsupportedError("swiglu: intermediate is not a multiple of 8");
  if (rows == 0) return;
  const int row_chunks = intermediate / 8;
  const std::size_t count = static_cast<std::size_t>(rows) * row_chunks;
  swiglu_kernel<<<static_cast<unsigned>((count + 255) / 256), 256, 0, stream>>>(reinterpret_cast<const uint4*>(gate_up),
                                                                              reinterpret_cast<uint4*>(output), count, row_chunks);
  LOOPGAUGE_CUDA_CHECK_LAUNCH("swiglu");
}

}  // namespace loopgauge::optimized
