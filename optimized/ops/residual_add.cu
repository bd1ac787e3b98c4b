// SPDX-License-Identifier: Apache-2.0
#include "optimized/ops/residual_add.cuh"
#include "optimized/runtime/cuda_check.hpp"

namespace loopgauge::optimized {
namespace {

__global__ void residual_add_kernel(uint4* residual, const uint4* __restrict__ addend, std::size_t chunks) {
  const std::size_t i = blockIdx.x * static_cast<std::size_t>(blockDim.x) + threadIdx.x;
  if (i >= chunks) return;
  union {
    uint4 vector;
    Bfloat16 values[8];
  } a, b;
  a.vector = residual[i];
  b.vector = addend[i];
#pragma unroll
  for (int k = 0; k < 8; ++k) a.values[k] = to_bfloat16(__fadd_rn(to_float(a.values[k]), to_float(b.values[k])));
  residual[i] = a.vector;
}

}  // namespace

void residual_add(Bfloat16* residual, const Bfloat16* addend, std::size_t count, cudaStream_t stream) {
  if (count % 8 != 0) throw InternalError("residual_add: the element count is not a multiple of 8");
  if (count == 0) return;
  const std::size_t chunks = count / 8;
  residual_add_kernel<<<static_cast<unsigned>((chunks + 255) / 256), 256, 0, stream>>>(reinterpret_cast<uint4*>(residual),
                                                                                     reinterpret_cast<const uint4*>(addend), chunks);
  LOOPGAUGE_CUDA_CHECK_LAUNCH("residual_add");
}

}  // namespace loopgauge::optimized
