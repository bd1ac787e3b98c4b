// SPDX-License-Identifier: Apache-2.0
#include "optimized/ops/embedding.cuh"

#include "optimized/runtime/cuda_check.hpp"

namespace loopgauge::optimized {
namespace {

__global__ void embedding_kernel(const std::int32_t* __restrict__ tokens, const uint4* __restrict__ table, uint4* __restrict__ output,
                                 int chunks) {
  const std::int32_t token = tokens[blockIdx.x];
  if (token < 0) return;
  const std::size_t source = static_cast<std::size_t>(token) * chunks;
  const std::size_t target = static_cast<std::size_t>(blockIdx.x) * chunks;
  for (int i = threadIdx.x; i < chunks; i += blockDim.x) output[target + i] = table[source + i];
}

}  // namespace

void embedding(const std::int32_t* tokens, const Bfloat16* table, Bfloat16* output, int rows, int hidden, cudaStream_t stream) {
  if (hidden % 8 != 0) throw UnsupportedError("embedding: hidden is not a multiple of 8");
  if (rows == 0) return;
  embedding_kernel<<<rows, 128, 0, stream>>>(tokens, reinterpret_cast<const uint4*>(table), reinterpret_cast<uint4*>(output), hidden / 8);
  LOOPGAUGE_CUDA_CHECK_LAUNCH("embedding");
}

}  // namespace loopgauge::optimized
