// SPDX-License-Identifier: Apache-2.0
#include "optimized/kv/region_copy.cuh"

#include "models/error.hpp"
#include "optimized/runtime/cuda_check.hpp"

namespace loopgauge::optimized {
namespace {

constexpr int kThreads = 128;
constexpr int kMostRegions = 65535;   // grid.y
constexpr int kChecksumBlocks = 32;   // a region

template <bool kScatter, class Unit>
__device__ __forceinline__ void copy_units(std::byte* region, std::byte* tile, std::size_t bytes) {
  auto* from = reinterpret_cast<const Unit*>(kScatter ? region : tile);
  auto* to = reinterpret_cast<Unit*>(kScatter ? tile : region);
  for (std::size_t i = threadIdx.x; i < bytes / sizeof(Unit); i += kThreads) to[i] = from[i];
}

// grid (2 * layers * heads, regions): a CTA moves one tile.
template <bool kScatter>
__global__ void __launch_bounds__(kThreads) move_regions_kernel(KvView kv, const RegionCopy* copies) {
  const RegionCopy copy = copies[blockIdx.y];
  const KvShape& shape = kv.shape;
  const int head = static_cast<int>(blockIdx.x) % shape.heads, layer = static_cast<int>(blockIdx.x) / (2 * shape.heads);
  const auto tensor = static_cast<KvTensor>(static_cast<int>(blockIdx.x) / shape.heads % 2);
  const RequestTable request = kv.requests[copy.request];
  const auto rows = static_cast<std::size_t>(copy.rows), tile = static_cast<std::size_t>(blockIdx.x);
  if (copy.content == RegionContent::rows) {
    const std::size_t row_bytes = static_cast<std::size_t>(shape.head_dim) * 2;
    const int units = static_cast<int>(row_bytes / sizeof(uint4));
    for (int i = threadIdx.x; i < copy.rows * units; i += kThreads) {
      const int row = i / units, unit = i % units, position = copy.positions[row];
      const PageTableEntry& page = request.pages[position / kPageTokens];
      auto* native = reinterpret_cast<uint4*>(page.bf16[copy.loop - 1] + page_row_offset(shape, layer, tensor, head, position % kPageTokens) * 2) + unit;
      auto* compact = reinterpret_cast<uint4*>(copy.region + (tile * rows + static_cast<std::size_t>(row)) * row_bytes) + unit;
      if (kScatter) {
        *native = *compact;
      } else {
        *compact = *native;
      }
    }
    return;
  }
  const int first_page = copy.begin / kPageTokens;
  const StreamTile stream = stream_tile(shape, request.pages[first_page], request.maps[first_page], layer, copy.loop, tensor, head);
  if (copy.content == RegionContent::payload) {
    const std::size_t bytes = rows * payload_row_bytes(shape);
    copy_units<kScatter, uint4>(copy.region + tile * bytes, reinterpret_cast<std::byte*>(const_cast<std::uint8_t*>(stream.payload)), bytes);
    return;
  }
  const std::size_t k_bytes = k_parameter_bytes(shape, copy.rows) / shape.heads, v_bytes = v_parameter_bytes(shape, copy.rows) / shape.heads;
  const auto pair = static_cast<std::size_t>(layer) * shape.heads + head;
  auto* native = reinterpret_cast<std::byte*>(const_cast<std::uint32_t*>(stream.parameters));
  if (tensor == KvTensor::k) {
    copy_units<kScatter, uint4>(copy.region + pair * k_bytes, native, k_bytes);
  } else {
    copy_units<kScatter, std::uint32_t>(copy.region + static_cast<std::size_t>(shape.layers) * shape.heads * k_bytes + pair * v_bytes, native, v_bytes);
  }
}

template <bool kScatter>
void move_regions(const KvView& kv, const RegionCopy* copies, int count, cudaStream_t stream) {
  if (kv.shape.head_dim != 64 && kv.shape.head_dim != 128) {
    throw UnsupportedError("region_copy: head_dim " + std::to_string(kv.shape.head_dim) + " is not 64 or 128");
  }
  for (int first = 0; first < count; first += kMostRegions) {
    const dim3 grid(2 * kv.shape.layers * kv.shape.heads, count - first < kMostRegions ? count - first : kMostRegions);
    move_regions_kernel<kScatter><<<grid, kThreads, 0, stream>>>(kv, copies + first);
    LOOPGAUGE_CUDA_CHECK_LAUNCH("region_copy");
  }
}

__device__ __forceinline__ std::uint64_t mix(std::uint64_t x) {
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
  x = (x ^ x >> 27) * 0x94D049BB133111EBu;
  return x ^ x >> 31;
}

__global__ void __launch_bounds__(kThreads) region_checksums_kernel(const RegionBytes* regions, std::uint64_t* sums) {
  const RegionBytes region = regions[blockIdx.y];
  const std::uint64_t whole = region.bytes / 8;
  std::uint64_t sum = 0;
  for (std::uint64_t i = blockIdx.x * kThreads + threadIdx.x; i < whole; i += std::uint64_t{gridDim.x} * kThreads) {
    sum += mix(reinterpret_cast<const std::uint64_t*>(region.data)[i] + (i + 1) * 0x9E3779B97F4A7C15u);
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    sum += mix(region.bytes);
    std::uint64_t word = 0;
    for (std::uint64_t i = 8 * whole; i < region.bytes; ++i) word |= static_cast<std::uint64_t>(region.data[i]) << (8 * (i % 8));
    if (region.bytes % 8 != 0) sum += mix(word + (whole + 1) * 0x9E3779B97F4A7C15u);
  }
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_down_sync(0xFFFFFFFFu, sum, offset);
  if (threadIdx.x % 32 == 0) atomicAdd(reinterpret_cast<unsigned long long*>(sums + blockIdx.y), static_cast<unsigned long long>(sum));
}

}  // namespace

void gather_regions(const KvView& kv, const RegionCopy* copies, int count, cudaStream_t stream) { move_regions<false>(kv, copies, count, stream); }

void scatter_regions(const KvView& kv, const RegionCopy* copies, int count, cudaStream_t stream) { move_regions<true>(kv, copies, count, stream); }

void region_checksums(const RegionBytes* regions, std::uint64_t* sums, int count, cudaStream_t stream) {
  if (count == 0) return;
  LOOPGAUGE_CUDA_CHECK(cudaMemsetAsync(sums, 0, static_cast<std::size_t>(count) * sizeof(std::uint64_t), stream));
  for (int first = 0; first < count; first += kMostRegions) {
    const dim3 grid(kChecksumBlocks, count - first < kMostRegions ? count - first : kMostRegions);
    region_checksums_kernel<<<grid, kThreads, 0, stream>>>(regions + first, sums + first);
    LOOPGAUGE_CUDA_CHECK_LAUNCH("region_checksums");
  }
}

}  // namespace loopgauge::optimized
