// SPDX-License-Identifier: Apache-2.0
#include "optimized/ops/attention_prefill_wgmma.cuh"

#include "optimized/ops/warpgroup_attention.cuh"
#include "optimized/runtime/cuda_check.hpp"

namespace loopgauge::optimized {
namespace {

constexpr int kThreads = (kGroups + 1) * kGroupThreads;
constexpr int kStages = 4;

template <int kHeadDim>
inline constexpr int kSharedBytes = kStages * 2 * kTileBytes<kHeadDim> + kSwizzleBytes;  // the start is rounded up

// Starts the copies of this thread's part of K and V of one page, every row from the plane that holds its logical version; rows not in
// `keys` become zero, so that nothing unwritten reaches a product. `reading`: the loop whose plane is read; under the planted fault rows of
// the tile itself are read at `own_loop`. `offset`: bytes of the thread's first 16 of K in a plane; V lies `v_distance` further on.
template <int kHeadDim>
__device__ __forceinline__ void copy_page(std::uint32_t stage, const PageSource& source, std::size_t offset, std::size_t v_distance, int page,
                                          std::uint64_t keys, int reading, int own_loop, const std::int32_t* tile_positions) {
  constexpr int kChunks = kHeadDim / 8;  // of 16 bytes, in a row
  constexpr int kRowsPerPass = kGroupThreads / kChunks, kPasses = kPageTokens / kRowsPerPass;
  const int thread = static_cast<int>(threadIdx.x) % kGroupThreads;
  const int chunk = thread % kChunks, first_row = thread / kChunks;
  // Rows of later passes are multiples of 8 further on: the same place in the swizzle.
  static_assert(kRowsPerPass % 8 == 0);
  const std::uint32_t target = stage + static_cast<std::uint32_t>(chunk / 8 * kPageTokens * kSwizzledRowBytes + first_row * kSwizzledRowBytes +
                                                                  ((chunk % 8) ^ (first_row % 8)) * 16);
  const auto copy_row = [&](int pass, std::uint64_t plane, bool valid) {
    const std::uint64_t from = plane + offset + static_cast<std::uint32_t>(pass * kRowsPerPass * kHeadDim * 2);
    const std::uint32_t to = target + static_cast<std::uint32_t>(pass * kRowsPerPass * kSwizzledRowBytes);
    copy_async(to, from, valid);
    copy_async(to + kTileBytes<kHeadDim>, from + v_distance, valid);
  };
  if (reading == own_loop) {
    std::uint64_t plane = 0, active = 0;
#pragma unroll
    for (int r = 1; r <= kLoops; ++r) {
      if (r == own_loop) {
        plane = source.planes[r - 1];
        active = source.active[r - 1];
      }
    }
    if (~active == 0 && ~keys == 0) {
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) copy_row(pass, plane, true);
      return;
    }
  }
#pragma unroll 2
  for (int pass = 0; pass < kPasses; ++pass) {
    const int row = first_row + pass * kRowsPerPass;
    const bool valid = (keys >> row) & 1u;
    int reader = reading;
    if (reading != own_loop) {
      for (int i = 0; i < kPrefillTileRows; ++i) {
        if (tile_positions[i] == page * kPageTokens + row) reader = own_loop;
      }
    }
    // An address is needed even where nothing is read.
    copy_row(pass, valid ? source.resident(row, reader) : source.planes[0], valid);
  }
}

// Pages as the copying warpgroup leaves them: K and V of one page together.
template <int kHeadDim>
struct PageRing {
  std::uint32_t stages;
  std::uint64_t *filled, *emptied;  // [kStages]

  __device__ __forceinline__ std::uint32_t keys(int page) const {
    return stages + static_cast<std::uint32_t>(page % kStages * 2 * kTileBytes<kHeadDim>);
  }
  __device__ __forceinline__ std::uint32_t values(int page) const { return keys(page) + kTileBytes<kHeadDim>; }
  __device__ __forceinline__ void wait_for_keys(int page) const { barrier_wait(&filled[page % kStages], page / kStages & 1); }
  __device__ __forceinline__ void wait_for_values(int) const {}
  __device__ __forceinline__ void release_keys(int) const {}
  __device__ __forceinline__ void release_values(int page) const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(&emptied[page % kStages]);
  }
};

// grid (heads, tiles), kThreads threads, one CTA on a multiprocessor.
template <int kHeadDim>
__global__ void __launch_bounds__(kThreads, 1) attention_prefill_wgmma_kernel(AttentionPrefillArguments arguments) {
  extern __shared__ std::uint8_t unaligned_stages[];
  __shared__ std::uint64_t filled[kStages], emptied[kStages];
  __shared__ TilePositions positions;

  const PrefillTile tile = arguments.tiles[arguments.tile_count - 1 - blockIdx.y];  // longest histories start first
  if (tile.encoded_frontier > 0) return;
  const int head = static_cast<int>(blockIdx.x), layer = arguments.layer, thread = static_cast<int>(threadIdx.x);
  const std::uint32_t stages = uniform((shared_address(unaligned_stages) + kSwizzleBytes - 1) / kSwizzleBytes * kSwizzleBytes);
  const PageRing<kHeadDim> ring{stages, filled, emptied};

  if (thread == 0) {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(&filled[i], kGroupThreads);
      barrier_init(&emptied[i], kGroups * kGroupThreads / 32);
    }
    publish_to_products();
  }
  positions.load(arguments.positions, tile);
  const int last = max(positions.last[0], positions.last[1]);
  if (last < 0) return;
  const int pages = uniform(last / kPageTokens + 1);

  if (thread >= kGroups * kGroupThreads) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    const int reading = arguments.fault == Fault::loop_off_by_one && tile.loop > 1 ? tile.loop - 1 : tile.loop;
    const RequestTable request = arguments.kv.requests[tile.request];
    const KvShape& shape = arguments.kv.shape;
    const int chunk = thread % kGroupThreads % (kHeadDim / 8), first_row = thread % kGroupThreads / (kHeadDim / 8);
    const std::size_t k_tile = page_tile_offset(shape, layer, KvTensor::k, head), v_tile = page_tile_offset(shape, layer, KvTensor::v, head);
    const std::size_t offset = (k_tile + static_cast<std::size_t>(first_row * kHeadDim + chunk * 8)) * sizeof(__nv_bfloat16);
    const std::size_t v_distance = (v_tile - k_tile) * sizeof(__nv_bfloat16);
    PageSource source;
    source.load(request, 0);
    for (int page = 0; page < pages; ++page) {
      if (page >= kStages) barrier_wait(&emptied[page % kStages], (page / kStages - 1) & 1);
      copy_page<kHeadDim>(ring.keys(page), source, offset, v_distance, page, page_mask(page, 0, last + 1), reading, tile.loop, positions.rows);
      commit_copies();
      if (page + 1 < pages) source.load(request, page + 1);  // in flight while the copies are
      if (page == 0) continue;
      wait_copies<1>();
      publish_to_products();
      barrier_arrive(&filled[(page - 1) % kStages]);
    }
    wait_copies<0>();
    publish_to_products();
    barrier_arrive(&filled[(pages - 1) % kStages]);
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
  const auto store = [&](int row, int, float, float sum, const auto& values, int half) { write_output<kHeadDim>(arguments, head, row, sum, values, half); };
  attend<kHeadDim, false>(arguments, tile, head, positions, 0, pages, ring, store);
}

template <int kHeadDim>
void launch(const AttentionPrefillArguments& arguments, cudaStream_t stream) {
  const auto kernel = attention_prefill_wgmma_kernel<kHeadDim>;
  LOOPGAUGE_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes<kHeadDim>));
  kernel<<<dim3(arguments.kv.shape.heads, arguments.tile_count), kThreads, kSharedBytes<kHeadDim>, stream>>>(arguments);
  LOOPGAUGE_CUDA_CHECK_LAUNCH("attention_prefill_wgmma");
}

}  // namespace

void attention_prefill_wgmma(const AttentionPrefillArguments& arguments, cudaStream_t stream) {
  arguments.kv.shape.head_dim == 128 ? launch<128>(arguments, stream) : launch<64>(arguments, stream);
}

}  // namespace loopgauge::optimized
