// SPDX-License-Identifier: Apache-2.0
#include "optimized/ops/linear_split_k.cuh"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <type_traits>

#include "optimized/ops/programmatic_launch.cuh"
#include "optimized/ops/shared_memory.cuh"
#include "optimized/ops/tensor_core.cuh"
#include "optimized/runtime/cuda_check.hpp"

namespace loopgauge::optimized {
namespace {

constexpr int kShares = 8;         // of K, by `in` alone
constexpr int kChunk = 32;         // K values of one rounded addition: two tensor-core steps
constexpr int kChunkBytes = kChunk * 2;
constexpr int kFragmentOutputs = 16, kFragmentRows = 8;  // of mma.m16n8k16, weights as its A and rows as its B
constexpr int kFewRows = 8;        // one row fragment
constexpr int kMostRows = 64;

// Weights are read once: they need not stay in the first-level cache.
__device__ __forceinline__ uint4 load_once(const Bfloat16* address) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(address));
  return v;
}

template <class Output>
__device__ __forceinline__ void store_output(Output* target, float value) {
  if constexpr (std::is_same_v<Output, float>) *target = value;
  else *target = to_bfloat16(value);
}

// Which K value sits in which slot of a tensor-core step is free as long as both operands agree. Thread t of four takes the eight neighbours
// [8 t, 8 t + 8) of a 32-wide chunk, 16 bytes of each of its weight rows and of its rows: values 0-3 fill its slots of the first step, values 4-7
// those of the second.

// --- one row fragment: a block computes 16 outputs, a warp a share of K; the rows come from the first-level cache ---

constexpr int kFewThreads = kShares * 32;
constexpr int kFewUnroll = 8;      // chunks of weights on their way at once

template <class Output>
__global__ void __launch_bounds__(kFewThreads)
    linear_few_rows_kernel(const Bfloat16* __restrict__ x, int x_stride, const Bfloat16* __restrict__ weight, Output* __restrict__ y, int rows, int in,
                           int out) {
  __shared__ float shares[kShares][kFragmentRows][kFragmentOutputs + 1];

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, quarter = lane % 4;
  const int output0 = blockIdx.x * kFragmentOutputs;
  const int chunks = (in + kChunk - 1) / kChunk;
  const int begin = chunks * warp / kShares, end = chunks * (warp + 1) / kShares;
  const uint4 zero = make_uint4(0, 0, 0, 0);

  float sums[4] = {};
  for (int first = begin; first < end; first += kFewUnroll) {
    uint4 w[kFewUnroll][2];
#pragma unroll
    for (int u = 0; u < kFewUnroll; ++u) {
      const int k = (first + u) * kChunk + quarter * 8;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int output = output0 + half * 8 + group;
        w[u][half] = first + u < end && k < in && output < out ? load_once(weight + static_cast<std::size_t>(output) * in + k) : zero;
      }
    }
#pragma unroll
    for (int u = 0; u < kFewUnroll; ++u) {
      if (first + u >= end) break;
      const int k = (first + u) * kChunk + quarter * 8;
      const uint4 v = k < in && group < rows ? __ldg(reinterpret_cast<const uint4*>(x + static_cast<std::size_t>(group) * x_stride + k)) : zero;
      const uint4 &low = w[u][0], &high = w[u][1];
      float part[4] = {};
      multiply_add(part, low.x, high.x, low.y, high.y, v.x, v.y);
      multiply_add(part, low.z, high.z, low.w, high.w, v.z, v.w);
#pragma unroll
      for (int e = 0; e < 4; ++e) sums[e] = __fadd_rn(sums[e], part[e]);
    }
  }
#pragma unroll
  for (int e = 0; e < 4; ++e) shares[warp][quarter * 2 + e % 2][e / 2 * 8 + group] = sums[e];
  __syncthreads();
  const int row = threadIdx.x / kFragmentOutputs, output = output0 + threadIdx.x % kFragmentOutputs;
  if (row >= rows || output >= out) return;
  float sum = shares[0][row][threadIdx.x % kFragmentOutputs];
#pragma unroll
  for (int share = 1; share < kShares; ++share) sum = __fadd_rn(sum, shares[share][row][threadIdx.x % kFragmentOutputs]);
  store_output(y + static_cast<std::size_t>(row) * out + output, sum);
}

// --- more row fragments: a share of K is a block, eight blocks a cluster, outputs are dealt out to clusters ---
//
// A block keeps its share of the rows in shared memory, and its weights go through registers, kDepth chunks ahead, also beyond the end of a round. In
// a round a warp makes kWarpFragments * 16 outputs; then every block adds up a part of the outputs of the round, from the shares of all.
template <int kRowFragments, int kWarps, int kWarpFragments>
struct ClusterTile {
  static constexpr int kRows = kRowFragments * kFragmentRows;
  static constexpr int kThreads = kWarps * 32;       // that multiply
  static constexpr int kFragments = kWarps * kWarpFragments;
  static constexpr int kOutputs = kFragments * kFragmentOutputs;
  static constexpr int kShareStride = kOutputs + 4;  // floats: the four quarters of a warp write to different banks
  static constexpr int kShareBytes = kRows * kShareStride * static_cast<int>(sizeof(float));
};

// Of rows in shared memory; neighbours begin half of the banks apart.
__host__ __device__ constexpr int row_bytes(int chunks) { return (chunks | 1) * kChunkBytes; }

// Every thread of a block arrives before it waits, once at a time; a round is two of these. Relaxed: what a thread has stored is not ordered before its
// arrival, but by the fence of the warp that multiplies nothing, behind a __syncthreads. What it has loaded is there when it arrives, since it has stored
// a sum of it (the machine code has the store in front of the arrival).
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

__device__ __forceinline__ float4 load_of_block(const float* mine, int block) {
  std::uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(mine)), "r"(block));
  float4 v;
  asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(address) : "memory");
  return v;
}

// `shares_at`: bytes of shared memory in front of the shares; 0: they take the place of the rows, in launches of one round.
template <int kRowFragments, int kWarps, int kWarpFragments, int kDepth, int kBlocks, class Output>
__global__ void __cluster_dims__(kShares) __launch_bounds__(kWarps * 32 + 32, kBlocks)
    linear_cluster_kernel(const Bfloat16* __restrict__ x, int x_stride, const Bfloat16* __restrict__ weight, Output* __restrict__ y, int rows, int in, int out,
                          int shares_at) {
  using Tile = ClusterTile<kRowFragments, kWarps, kWarpFragments>;
  extern __shared__ __align__(128) char memory[];
  __shared__ std::uint64_t rows_arrived;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, quarter = lane % 4;
  const int share = blockIdx.x % kShares, cluster = blockIdx.x / kShares, clusters = gridDim.x / kShares;
  const int chunks = (in + kChunk - 1) / kChunk;
  const int begin = chunks * share / kShares, count = chunks * (share + 1) / kShares - begin;
  const int values = min(count * kChunk, in - begin * kChunk);  // of the share
  const int fragments = (out + kFragmentOutputs - 1) / kFragmentOutputs;
  const int first = fragments * cluster / clusters, end = fragments * (cluster + 1) / clusters;
  const int rounds = (end - first + Tile::kFragments - 1) / Tile::kFragments;
  const int stride = row_bytes(count);

  if (threadIdx.x == 0) {
    barrier_init(&rows_arrived, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();

  // A warp of its own brings the rows and makes shares visible to the cluster: a fence waits for all that is on its way to its thread, and for this one
  // there are no weights.
  if (warp == kWarps) {
    wait_for_previous_kernel();
    const int bytes = max(values, 0) * static_cast<int>(sizeof(Bfloat16));
    if (lane == 0) barrier_arrive_expecting(&rows_arrived, rows * bytes);
    __syncwarp();
    for (int row = lane; row < rows && bytes > 0; row += 32) {
      bulk_copy(memory + row * stride, x + static_cast<std::size_t>(row) * x_stride + begin * kChunk, bytes, &rows_arrived);
    }
    for (int row = lane; row < rows; row += 32) {  // what the last chunk has beyond K
      for (int at = bytes; at < count * kChunkBytes; at += 16) *reinterpret_cast<uint4*>(memory + row * stride + at) = make_uint4(0, 0, 0, 0);
    }
    __syncthreads();
    for (int round = 0; round < rounds; ++round) {
      if (round > 0) cluster_wait();
      else if (shares_at == 0) __syncthreads();
      __syncthreads();
      asm volatile("fence.acq_rel.cluster;" ::: "memory");
      cluster_arrive();
      cluster_wait();
      cluster_arrive();
    }
    cluster_wait();
    return;
  }

  uint4 low[kDepth][kWarpFragments], high[kDepth][kWarpFragments];  // of outputs `group` and `group` + 8 of each fragment
  const Bfloat16* from = nullptr;
  int left[kWarpFragments][2];  // K values from the thread's first on; 0 for outputs that are not there
  const std::size_t eight_rows = static_cast<std::size_t>(kFragmentRows) * in;
  const auto seek = [&](int round) {
    const int fragment = first + (round * kWarps + warp) * kWarpFragments, output = fragment * kFragmentOutputs + group;
    from = weight + static_cast<std::size_t>(output) * in + begin * kChunk + quarter * 8;
#pragma unroll
    for (int n = 0; n < kWarpFragments; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        left[n][half] = fragment + n < end && output + n * kFragmentOutputs + half * 8 < out ? values - quarter * 8 : 0;
      }
    }
  };
  const auto load = [&](int slot, int chunk) {
    const uint4 zero = make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int n = 0; n < kWarpFragments; ++n) {
      low[slot][n] = chunk * kChunk < left[n][0] ? load_once(from + chunk * kChunk + 2 * n * eight_rows) : zero;
      high[slot][n] = chunk * kChunk < left[n][1] ? load_once(from + chunk * kChunk + (2 * n + 1) * eight_rows) : zero;
    }
  };
  seek(0);
#pragma unroll
  for (int u = 0; u < kDepth; ++u) load(u, u);  // weights depend on no kernel in front
  wait_for_previous_kernel();
  barrier_wait(&rows_arrived, 0);
  __syncthreads();

  float* const shares = reinterpret_cast<float*>(memory + shares_at);
  const char* const my_rows = memory + group * stride + quarter * 16;
  for (int round = 0; round < rounds; ++round) {
    float sums[kWarpFragments][kRowFragments][4] = {};
#pragma unroll 1
    for (int chunk = 0; chunk < count; chunk += kDepth) {
      int next = chunk + kDepth;
      if (next >= count) {
        next = 0;
        seek(round + 1);
      }
#pragma unroll
      for (int u = 0; u < kDepth; ++u) {
        // The operands of a step, in registers of their own: the compiler would move them together for every step anew.
        std::uint32_t a[kWarpFragments][2][4];
#pragma unroll
        for (int n = 0; n < kWarpFragments; ++n) {
          const uint4 &l = low[u][n], &h = high[u][n];
          asm volatile(
              "mov.b32 %0, %8; mov.b32 %1, %12; mov.b32 %2, %9; mov.b32 %3, %13;\n"
              "mov.b32 %4, %10; mov.b32 %5, %14; mov.b32 %6, %11; mov.b32 %7, %15;"
              : "=&r"(a[n][0][0]), "=&r"(a[n][0][1]), "=&r"(a[n][0][2]), "=&r"(a[n][0][3]), "=&r"(a[n][1][0]), "=&r"(a[n][1][1]), "=&r"(a[n][1][2]), "=&r"(a[n][1][3])
              : "r"(l.x), "r"(l.y), "r"(l.z), "r"(l.w), "r"(h.x), "r"(h.y), "r"(h.z), "r"(h.w));
        }
        load(u, next + u);
        if (chunk + u >= count) continue;
        const char* const at = my_rows + (chunk + u) * kChunkBytes;
        constexpr int kBatch = kRowFragments < 4 / kWarpFragments ? kRowFragments : 4 / kWarpFragments;  // independent steps: four where there are
#pragma unroll
        for (int r0 = 0; r0 < kRowFragments; r0 += kBatch) {
          uint4 v[kBatch];
          float parts[kBatch][kWarpFragments][4] = {};
#pragma unroll
          for (int r = 0; r < kBatch && r0 + r < kRowFragments; ++r) v[r] = *reinterpret_cast<const uint4*>(at + (r0 + r) * kFragmentRows * stride);
#pragma unroll
          for (int step = 0; step < 2; ++step) {
#pragma unroll
            for (int r = 0; r < kBatch && r0 + r < kRowFragments; ++r) {
#pragma unroll
              for (int n = 0; n < kWarpFragments; ++n) {
                const std::uint32_t(&w)[4] = a[n][step];
                multiply_add(parts[r][n], w[0], w[1], w[2], w[3], step == 0 ? v[r].x : v[r].z, step == 0 ? v[r].y : v[r].w);
              }
            }
          }
#pragma unroll
          for (int r = 0; r < kBatch && r0 + r < kRowFragments; ++r) {
#pragma unroll
            for (int n = 0; n < kWarpFragments; ++n) {
#pragma unroll
              for (int e = 0; e < 4; ++e) sums[n][r0 + r][e] = __fadd_rn(sums[n][r0 + r][e], parts[r][n][e]);
            }
          }
        }
      }
    }

    if (round > 0) cluster_wait();  // every block has read the shares of the round before
    else if (shares_at == 0) __syncthreads();
#pragma unroll
    for (int n = 0; n < kWarpFragments; ++n) {
#pragma unroll
      for (int r = 0; r < kRowFragments; ++r) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          shares[(r * kFragmentRows + quarter * 2 + e % 2) * Tile::kShareStride + (warp * kWarpFragments + n) * kFragmentOutputs + e / 2 * 8 + group] = sums[n][r][e];
        }
      }
    }
    __syncthreads();  // before the fence of the other warp
    cluster_arrive();
    cluster_wait();
    constexpr int kRowVectors = Tile::kOutputs / 4;
    const int output0 = (first + round * Tile::kFragments) * kFragmentOutputs, output_end = min(out, end * kFragmentOutputs);
    for (int i = share * Tile::kThreads + threadIdx.x; i < Tile::kRows * kRowVectors; i += kShares * Tile::kThreads) {
      const int row = i / kRowVectors, output = i % kRowVectors * 4;
      if (row >= rows || output0 + output >= output_end) continue;
      const float* const mine = shares + row * Tile::kShareStride + output;
      float4 sum = load_of_block(mine, 0);
      constexpr int kLoads = 4;  // at once
#pragma unroll
      for (int s0 = 0; s0 < kShares; s0 += kLoads) {
        float4 v[kLoads];
#pragma unroll
        for (int s = 0; s < kLoads; ++s) {
          if (s0 + s > 0) v[s] = load_of_block(mine, s0 + s);
        }
#pragma unroll
        for (int s = 0; s < kLoads; ++s) {
          if (s0 + s == 0) continue;
          sum.x = __fadd_rn(sum.x, v[s].x);
          sum.y = __fadd_rn(sum.y, v[s].y);
          sum.z = __fadd_rn(sum.z, v[s].z);
          sum.w = __fadd_rn(sum.w, v[s].w);
        }
      }
      Output* const target = y + static_cast<std::size_t>(row) * out + output0 + output;
      if constexpr (std::is_same_v<Output, float>) *reinterpret_cast<float4*>(target) = sum;
      else *reinterpret_cast<uint2*>(target) = make_uint2(pack_bf16(sum.x, sum.y), pack_bf16(sum.z, sum.w));
    }
    cluster_arrive();  // the shares have been read: their sum has been stored
  }
  cluster_wait();  // nobody leaves while its shares are read
}

constexpr int kMostSharedBytes = 226 * 1024;  // of a block; 227 KiB less what is static

// How many clusters of a kernel are on the device at once. Remembered, since asking takes longer than launching.
int resident_clusters(const void* kernel, int threads, int bytes) {
  static std::mutex mutex;
  static std::map<std::tuple<const void*, int, int>, int> known;  // by kernel, device and bytes
  int device = 0;
  LOOPGAUGE_CUDA_CHECK(cudaGetDevice(&device));
  const std::lock_guard lock(mutex);
  const std::tuple key{kernel, device, bytes};
  if (const auto place = known.find(key); place != known.end()) return place->second;
  cudaLaunchConfig_t config{};
  config.gridDim = kShares;
  config.blockDim = static_cast<unsigned>(threads);
  config.dynamicSmemBytes = static_cast<std::size_t>(bytes);
  int clusters = 0;
  LOOPGAUGE_CUDA_CHECK(cudaOccupancyMaxActiveClusters(&clusters, kernel, &config));
  known.emplace(key, clusters);
  return clusters;
}

// False: the rows do not fit shared memory.
template <int kRowFragments, int kWarps, int kWarpFragments, int kDepth, int kBlocks, class Output>
bool launch_cluster(const Bfloat16* x, int x_stride, const Bfloat16* weight, Output* y, int rows, int in, int out, cudaStream_t stream) {
  using Tile = ClusterTile<kRowFragments, kWarps, kWarpFragments>;
  const auto kernel = linear_cluster_kernel<kRowFragments, kWarps, kWarpFragments, kDepth, kBlocks, Output>;
  constexpr int kThreads = Tile::kThreads + 32;
  const int most_chunks = ((in + kChunk - 1) / kChunk + kShares - 1) / kShares, rows_bytes = Tile::kRows * row_bytes(most_chunks);
  if (rows_bytes + Tile::kShareBytes > kMostSharedBytes) return false;
  LOOPGAUGE_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMostSharedBytes));
  const auto resident = [&](int bytes) { return resident_clusters(reinterpret_cast<const void*>(kernel), kThreads, bytes); };
  // One round, if all outputs find a place on the device at once; else blocks keep their rows for several.
  const int fragments = (out + kFragmentOutputs - 1) / kFragmentOutputs;
  int clusters = (fragments + Tile::kFragments - 1) / Tile::kFragments, bytes = std::max(rows_bytes, Tile::kShareBytes), shares_at = 0;
  if (clusters > resident(bytes)) {
    shares_at = rows_bytes;
    bytes = rows_bytes + Tile::kShareBytes;
    clusters = std::min(clusters, std::max(resident(bytes), 1));
  }
  launch_in_turn(true, kernel, dim3(static_cast<unsigned>(clusters * kShares)), kThreads, bytes, stream, x, x_stride, weight, y, rows, in, out, shares_at);
  return true;
}

template <class Output>
bool launch_many_rows(const Bfloat16* x, int x_stride, const Bfloat16* weight, Output* y, int rows, int in, int out, cudaStream_t stream) {
  if (rows <= 16) return launch_cluster<2, 8, 1, 4, 2>(x, x_stride, weight, y, rows, in, out, stream);
  if (rows <= 24) return launch_cluster<3, 8, 1, 4, 2>(x, x_stride, weight, y, rows, in, out, stream);
  if (rows <= 32) return launch_cluster<4, 8, 1, 4, 2>(x, x_stride, weight, y, rows, in, out, stream);
  if (rows <= 48) return launch_cluster<6, 8, 1, 4, 2>(x, x_stride, weight, y, rows, in, out, stream);
  return launch_cluster<8, 8, 1, 4, 2>(x, x_stride, weight, y, rows, in, out, stream);
}

// Loads, bulk copies and vector stores need these; on the device a fault would end the process.
void require_pieces(const Bfloat16* x, int x_stride, const Bfloat16* weight, int in, int out) {
  const auto aligned = [](const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer) % 16 == 0; };
  if (in % 8 != 0 || x_stride % 8 != 0 || out % 4 != 0 || !aligned(x) || !aligned(weight)) {
    throw UnsupportedError("linear_split_k: " + std::to_string(in) + " inputs of rows " + std::to_string(x_stride) + " apart and " + std::to_string(out) +
                           " outputs are not whole 16-byte pieces");
  }
}

template <class Output>
void split_k(const Bfloat16* x, int x_stride, const Bfloat16* weight, Output* y, int rows, int in, int out, cudaStream_t stream) {
  require_pieces(x, x_stride, weight, in, out);
  int most = kMostRows;
  for (int row = 0; row < rows;) {
    const int count = std::min(most, rows - row);
    const Bfloat16* const from = x + static_cast<std::size_t>(row) * x_stride;
    Output* const to = y + static_cast<std::size_t>(row) * out;
    if (count <= kFewRows) {
      linear_few_rows_kernel<<<(out + kFragmentOutputs - 1) / kFragmentOutputs, kFewThreads, 0, stream>>>(from, x_stride, weight, to, count, in, out);
      LOOPGAUGE_CUDA_CHECK_LAUNCH("linear_split_k");
    } else if (!launch_many_rows(from, x_stride, weight, to, count, in, out, stream)) {
      most /= 2;
      continue;
    }
    row += count;
  }
}

}  // namespace

void linear_split_k(const Bfloat16* x, int x_stride, const Bfloat16* weight, Bfloat16* y, int rows, int in, int out, cudaStream_t stream) {
  split_k(x, x_stride, weight, y, rows, in, out, stream);
}

void linear_split_k(const Bfloat16* x, int x_stride, const Bfloat16* weight, float* y, int rows, int in, int out, cudaStream_t stream) {
  split_k(x, x_stride, weight, y, rows, in, out, stream);
}

}  // namespace loopgauge::optimized
