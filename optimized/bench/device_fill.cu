// SPDX-License-Identifier: Apache-2.0
#include "optimized/bench/device_fill.cuh"

#include "optimized/runtime/cuda_check.hpp"

namespace loopgauge::optimized {
namespace {

constexpr int kBlocks = 132 * 8;
constexpr int kThreads = 256;

__device__ std::uint32_t hash(std::uint64_t index, std::uint32_t seed) {
  std::uint32_t x = static_cast<std::uint32_t>(index) * 0x9E3779B1u ^ static_cast<std::uint32_t>(index >> 32) * 0x85EBCA77u ^ seed;
  x = (x ^ (x >> 16)) * 0x7FEB352Du;
  x = (x ^ (x >> 15)) * 0x846CA68Bu;
  return x ^ (x >> 16);
}

__global__ void fill_random_kernel(Bfloat16* values, std::size_t count, std::uint32_t seed, float scale) {
  for (std::size_t i = blockIdx.x * static_cast<std::size_t>(blockDim.x) + threadIdx.x; i < count; i += static_cast<std::size_t>(gridDim.x) * blockDim.x) {
    values[i] = to_bfloat16((static_cast<float>(hash(i, seed) >> 8) * 0x1p-23f - 1.0f) * scale);
  }
}

__global__ void read_all_kernel(const uint4* __restrict__ data, std::size_t count, std::uint32_t* result) {
  constexpr int kUnroll = 4;
  const std::size_t stride = static_cast<std::size_t>(gridDim.x) * blockDim.x;
  std::size_t i = blockIdx.x * static_cast<std::size_t>(blockDim.x) + threadIdx.x;
  std::uint32_t total = 0;
  for (; i + (kUnroll - 1) * stride < count; i += kUnroll * stride) {
    uint4 part[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) part[u] = __ldcs(data + i + u * stride);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) total ^= part[u].x ^ part[u].y ^ part[u].z ^ part[u].w;
  }
  for (; i < count; i += stride) total ^= data[i].x ^ data[i].y ^ data[i].z ^ data[i].w;
  atomicXor(result, total);
}

}  // namespace

void fill_random(Bfloat16* values, std::size_t count, std::uint32_t seed, float scale, cudaStream_t stream) {
  if (count == 0) return;
  fill_random_kernel<<<kBlocks, kThreads, 0, stream>>>(values, count, seed, scale);
  LOOPGAUGE_CUDA_CHECK_LAUNCH("fill_random");
}

void read_all(const void* data, std::size_t bytes, std::uint32_t* result, cudaStream_t stream) {
  read_all_kernel<<<kBlocks, kThreads, 0, stream>>>(static_cast<const uint4*>(data), bytes / 16, result);
  LOOPGAUGE_CUDA_CHECK_LAUNCH("read_all");
}

}  // namespace loopgauge::optimized
