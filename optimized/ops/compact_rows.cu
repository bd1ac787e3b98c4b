// SPDX-License-Identifier: Apache-2.0
#include "optimized/ops/compact_rows.cuh"

#include "optimized/runtime/cuda_check.hpp"

namespace loopgauge::optimized {
namespace {

template <bool kScatter>
__global__ void move_rows_kernel(const uint4* __restrict__ source, const std::int32_t* __restrict__ indices, uint4* __restrict__ target, int chunks) {
  const std::int32_t index = indices[blockIdx.x];
  if (index < 0) return;
  const std::size_t compact = static_cast<std::size_t>(blockIdx.x) * chunks;
  const std::size_t spread = static_cast<std::size_t>(index) * chunks;
  const std::size_t from = kScatter ? compact : spread;
  const std::size_t to = kScatter ? spread : compact;
  for (int i = threadIdx.x; i < chunks; i += blockDim.x) target[to + i] = source[from + i];
}

template <bool kScatter>
void move_rows(const Bfloat16* source, const std::int32_t* indices, Bfloat16* target, int rows, int hidden, cudaStream_t stream) {
  if (hidden % 8 != 0) throw UnsupportedError("compact_rows: hidden is not a multiple of 8");
  if (rows == 0) return;
  move_rows_kernel<kScatter><<<rows, 128, 0, stream>>>(reinterpret_cast<const uint4*>(source), indices, reinterpret_cast<uint4*>(target), hidden / 8);
  LOOPGAUGE_CUDA_CHECK_LAUNCH("move_rows");
}

}  // namespace

void gather_rows(const Bfloat16* source, const std::int32_t* indices, Bfloat16* target, int rows, int hidden, cudaStream_t stream) {
  move_rows<false>(source, indices, target, rows, hidden, stream);
}

void scatter_rows(const Bfloat16* source, const std::int32_t* indices, Bfloat16* target, int rows, int hidden, cudaStream_t stream) {
  move_rows<true>(source, indices, target, rows, hidden, stream);
}

}  // namespace loopgauge::optimized
