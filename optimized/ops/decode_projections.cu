// SPDX-License-Identifier: Apache-2.0
#include "optimized/ops/decode_projections.cuh"

#include <algorithm>
#include <cstddef>

#include "optimized/ops/elementary.cuh"
#include "optimized/ops/row_norm.cuh"
#include "optimized/ops/tensor_core.cuh"
#include "optimized/runtime/cuda_check.hpp"

namespace loopgauge::optimized {
namespace {

constexpr int kWarps = 8;             // shares of K, as in linear_split_k
constexpr int kThreads = kWarps * 32;
constexpr int kChunk = 32;            // K values of one rounded addition: two tensor-core steps
constexpr int kStageChunks = 4;       // chunks that a warp requests at a time, of the 16 weight rows of a tile
constexpr int kTileRows = 16;         // weight rows, that is outputs, of a tile: the extent of a tensor-core step
constexpr int kStageRowBytes = kStageChunks * kChunk * 2;
constexpr int kStageBytes = kTileRows * kStageRowBytes;
constexpr int kMostStages = 4;
constexpr int kHeldChunks = 2 * kStageChunks;  // of the rows' K values that a thread keeps in registers
constexpr int kRowPadding = 32;       // elements: neighbouring rows begin half of the banks apart
constexpr int kLanePadding = 8;       // elements behind the values of one of the 16 lanes of a sum of squares
constexpr int kMostPieces = 8;        // 16-byte pieces of a row that a thread norms

enum class Input { rows, normed, added_and_normed };
enum class Output { rows, activated, rotated_and_appended };

struct Phase {
  Input input;
  Output output;
  const Bfloat16* weight;               // [out, in]
  int in, out, tiles;
  const Bfloat16* x;                    // input rows: [rows, in]; added_and_normed: what is normed and added
  Bfloat16* y;
  const Bfloat16* residual;             // normed and added_and_normed
  Bfloat16* new_residual;               // added_and_normed
  int first_norm;                       // index of the norm weights among those in shared memory
};

struct Launch {
  Phase phases[4];
  int phase_count;
  const Bfloat16* norms[4];             // in the order of the phases that use them
  int norm_count;
  DecodeProjectionsArguments a;
};

__device__ __forceinline__ uint4 load_uncached(const Bfloat16* address) {  // written during this launch by another multiprocessor
  return __ldcg(reinterpret_cast<const uint4*>(address));
}

// The first weight row of a tile, and how far behind its first eight rows the other eight lie: what is combined after the product (a gate and
// its up value, a channel and its rotation partner) stands in one tile.
__device__ __forceinline__ void tile_rows(const Phase& phase, const DecodeProjectionsArguments& a, int tile, int& first, int& apart) {
  first = tile * kTileRows;
  apart = kTileRows / 2;
  if (phase.output == Output::activated) {
    first = tile * (kTileRows / 2);
    apart = phase.out / 2;
  } else if (phase.output == Output::rotated_and_appended && first < 2 * a.heads * a.head_dim) {
    const int tiles_of_head = a.head_dim / kTileRows;
    first = tile / tiles_of_head * a.head_dim + tile % tiles_of_head * (kTileRows / 2);
    apart = a.head_dim / 2;
  }
}

// Every block has done what it does before; everybody sees it. `arrivals` counts blocks.
__device__ __forceinline__ void meet(std::uint32_t* arrivals) {
  __syncthreads();
  if (threadIdx.x == 0) {
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(arrivals) : "memory");
    std::uint32_t arrived;
    do {
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(arrived) : "l"(arrivals) : "memory");
    } while (arrived < gridDim.x);
  }
  __syncthreads();
}

// Weights on their way to the warp, in the order in which it uses them: tile after tile, product after product.
class WeightRing {
 public:
  __device__ WeightRing(const Launch& launch, std::uint32_t shared, int stages) : launch_(launch), shared_(shared), end_(shared + stages * kStageBytes), to_(shared) {
    const int lane = threadIdx.x % 32;
    unit_ = lane % 16;
    row_ = lane / 16;
    to_offset_ = row_ * kStageRowBytes + (unit_ ^ row_ * 4) * 16;
    phase_ = -1;
    tile_ = 1 << 30;
    next_tile();
  }

  // Requests the next stage, if there is one, into the place that was used longest ago. One group of copies either way.
  __device__ __forceinline__ void request() {
    if (left_ > 0) {
      if (unit_ < left_ * 4) {
        // A row of a stage is 256 bytes: 16 lanes. The pieces of odd rows are swapped by 64 bytes, so that the eight threads that read two rows
        // at once touch all banks.
        const Bfloat16* low = from_;
        const Bfloat16* high = from_ + apart_;
#pragma unroll
        for (int i = 0; i < kTileRows / 4; ++i) {
          copy_async(to_ + to_offset_ + i * 2 * kStageRowBytes, low);
          copy_async(to_ + to_offset_ + (i * 2 + kTileRows / 2) * kStageRowBytes, high);
          low += two_rows_;
          high += two_rows_;
        }
      }
      from_ += kStageChunks * kChunk;
      left_ -= kStageChunks;
      if (left_ <= 0) next_tile();
      to_ += kStageBytes;
      if (to_ == end_) to_ = shared_;
    }
    commit_copies();
  }

 private:
  __device__ __forceinline__ void next_tile() {
    tile_ += gridDim.x;
    while (phase_ < 0 || tile_ >= launch_.phases[phase_].tiles) {
      if (++phase_ == launch_.phase_count) {
        left_ = 0;
        return;
      }
      tile_ = blockIdx.x;
    }
    const Phase& phase = launch_.phases[phase_];
    const int warp = threadIdx.x / 32, chunks = phase.in / kChunk, begin = chunks * warp / kWarps;
    left_ = chunks * (warp + 1) / kWarps - begin;
    int first, apart;
    tile_rows(phase, launch_.a, tile_, first, apart);
    from_ = phase.weight + static_cast<std::size_t>(first + row_) * phase.in + begin * kChunk + unit_ * 8;
    apart_ = static_cast<std::ptrdiff_t>(apart) * phase.in;
    two_rows_ = 2 * phase.in;
  }

  const Launch& launch_;
  const std::uint32_t shared_, end_;
  std::uint32_t to_;
  int unit_, row_, to_offset_;
  int phase_, tile_, left_ = 0;         // chunks of this warp's share of the tile
  const Bfloat16* from_ = nullptr;
  std::ptrdiff_t apart_ = 0;
  int two_rows_ = 0;
};

// Shared memory behind the ring.
struct NormMemory {
  Bfloat16* norms;                      // [norm_count, hidden]
  Bfloat16* rows;                       // [rows, hidden + kRowPadding]: normed rows
  Bfloat16* lanes;                      // [rows, 16, hidden / 16 + kLanePadding]: a row with the values of each lane of its sum side by side
  float* inverse;                       // [rows]
};

__host__ __device__ inline int warps_of_row(int rows) { return rows <= 1 ? 8 : rows <= 2 ? 4 : rows <= 4 ? 2 : 1; }

// The rows that a product reads, normed; before that, where `x` is there, residual + norm(x). Each row by warps_of_row, kPieces pieces a thread.
template <int kPieces>
__device__ __forceinline__ void norm_rows(const Launch& launch, const Phase& phase, const NormMemory& memory) {
  const DecodeProjectionsArguments& a = launch.a;
  const int threads = 32 * warps_of_row(a.rows);
  const int row = threadIdx.x / threads, thread = threadIdx.x % threads;
  const bool here = row < a.rows;
  const int lane_stride = a.hidden / kLanes + kLanePadding;
  Bfloat16* const lanes = memory.lanes + static_cast<std::size_t>(row) * kLanes * lane_stride;
  union Piece {
    uint4 vector;
    Bfloat16 values[8];
  };
  const auto each_piece = [&](auto&& work) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int chunk = thread + i * threads;
      if (here && chunk < a.hidden / 8) work(i, chunk);
    }
  };
  const auto to_lanes = [&](const Piece& piece, int chunk) {
#pragma unroll
    for (int k = 0; k < 8; ++k) lanes[(chunk % 2 * 8 + k) * lane_stride + chunk / 2] = piece.values[k];
  };
  const auto inverse_of_lanes = [&] {
    __syncthreads();
    if (here && thread < kLanes) {
      const Bfloat16* const mine = lanes + thread * lane_stride;
      float sum = 0.0f;
#pragma unroll 8
      for (int i = 0; i < a.hidden / kLanes; i += 8) {
        Piece piece;
        piece.vector = *reinterpret_cast<const uint4*>(mine + i);
#pragma unroll
        for (int k = 0; k < 8; ++k) {
          const float value = to_float(piece.values[k]);
          sum = __fadd_rn(sum, __fmul_rn(value, value));
        }
      }
      sum = reduce_lanes(sum, 0xFFFFu);
      if (thread == 0) memory.inverse[row] = inverse_root_mean_square(sum, a.hidden, a.epsilon);
    }
    __syncthreads();
    return memory.inverse[here ? row : 0];
  };

  Piece kept[kPieces];
  each_piece([&](int i, int chunk) { kept[i].vector = load_uncached(phase.residual + static_cast<std::size_t>(row) * a.hidden + chunk * 8); });
  const Bfloat16* norm = memory.norms + static_cast<std::size_t>(phase.first_norm) * a.hidden;
  if (phase.input == Input::added_and_normed) {
    Piece added[kPieces];
    each_piece([&](int i, int chunk) {
      added[i].vector = load_uncached(phase.x + static_cast<std::size_t>(row) * a.hidden + chunk * 8);
      to_lanes(added[i], chunk);
    });
    const float inverse = inverse_of_lanes();
    each_piece([&](int i, int chunk) {
      Piece weight;
      weight.vector = *reinterpret_cast<const uint4*>(norm + chunk * 8);
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        const Bfloat16 value = normalized(added[i].values[k], inverse, weight.values[k]);
        kept[i].values[k] = to_bfloat16(__fadd_rn(to_float(kept[i].values[k]), to_float(value)));
      }
      if (blockIdx.x == 0) *reinterpret_cast<uint4*>(phase.new_residual + static_cast<std::size_t>(row) * a.hidden + chunk * 8) = kept[i].vector;
    });
    norm += a.hidden;
  }
  each_piece([&](int i, int chunk) { to_lanes(kept[i], chunk); });
  const float inverse = inverse_of_lanes();
  each_piece([&](int i, int chunk) {
    Piece weight, result;
    weight.vector = *reinterpret_cast<const uint4*>(norm + chunk * 8);
#pragma unroll
    for (int k = 0; k < 8; ++k) result.values[k] = normalized(kept[i].values[k], inverse, weight.values[k]);
    *reinterpret_cast<uint4*>(memory.rows + static_cast<std::size_t>(row) * (a.hidden + kRowPadding) + chunk * 8) = result.vector;
  });
  __syncthreads();
}

using Shares = float[kWarps][kMostProjectionRows][kTileRows + 1];

__device__ __forceinline__ float sum_of_shares(const Shares& shares, int row, int output) {
  float sum = shares[0][row][output];
#pragma unroll
  for (int share = 1; share < kWarps; ++share) sum = __fadd_rn(sum, shares[share][row][output]);
  return sum;
}

// What becomes of a tile's sums. `thread` of 128.
__device__ __forceinline__ void finish_tile(const Launch& launch, const Phase& phase, int tile, const Shares& shares, int thread,
                                            Bfloat16* const* key_pages, const std::int32_t* positions) {
  const DecodeProjectionsArguments& a = launch.a;
  int first, apart;
  tile_rows(phase, a, tile, first, apart);
  if (phase.output == Output::rows || (phase.output == Output::rotated_and_appended && apart == kTileRows / 2)) {
    const int row = thread / kTileRows, output = thread % kTileRows;
    if (row >= a.rows) return;
    const Bfloat16 value = to_bfloat16(sum_of_shares(shares, row, output));
    if (phase.output == Output::rows) {
      phase.y[static_cast<std::size_t>(row) * phase.out + first + output] = value;
    } else if (key_pages[row] != nullptr) {
      const int channel = first + output - 2 * a.heads * a.head_dim;
      Bfloat16* const tile_of_head = key_pages[row] + static_cast<std::size_t>(a.heads + channel / a.head_dim) * kPageTokens * a.head_dim;
      tile_of_head[channel % a.head_dim] = value;
    }
    return;
  }
  const int row = thread / (kTileRows / 2), output = thread % (kTileRows / 2);
  if (row >= a.rows) return;
  const Bfloat16 low = to_bfloat16(sum_of_shares(shares, row, output));
  const Bfloat16 high = to_bfloat16(sum_of_shares(shares, row, output + kTileRows / 2));
  if (phase.output == Output::activated) {
    const Bfloat16 activated = to_bfloat16(silu_binary32(to_float(low)));
    phase.y[static_cast<std::size_t>(row) * (phase.out / 2) + first + output] = to_bfloat16(__fmul_rn(to_float(activated), to_float(high)));
    return;
  }
  const int channel = first % a.head_dim + output;
  const std::size_t angle = static_cast<std::size_t>(positions[row]) * apart + channel;
  const float c = to_float(a.cosine[angle]), s = to_float(a.sine[angle]), x = to_float(low), y = to_float(high);
  const Bfloat16 rotated_low = to_bfloat16(__fadd_rn(to_float(to_bfloat16(__fmul_rn(x, c))), to_float(to_bfloat16(__fmul_rn(-y, s)))));
  const Bfloat16 rotated_high = to_bfloat16(__fadd_rn(to_float(to_bfloat16(__fmul_rn(y, c))), to_float(to_bfloat16(__fmul_rn(x, s)))));
  const int head = first / a.head_dim;
  if (head < a.heads) {
    Bfloat16* const q = phase.y + static_cast<std::size_t>(row) * phase.out + head * a.head_dim + channel;
    q[0] = rotated_low;
    q[apart] = rotated_high;
  } else if (key_pages[row] != nullptr) {
    Bfloat16* const key = key_pages[row] + static_cast<std::size_t>(head - a.heads) * kPageTokens * a.head_dim + channel;
    key[0] = rotated_low;
    key[apart] = rotated_high;
  }
}

// Where k and v of the rows belong, and their positions.
struct Places {
  Bfloat16* key_pages[kMostProjectionRows];  // where the row's key of head 0 belongs; null: nowhere
  std::int32_t positions[kMostProjectionRows];
};

// Finds the place of the row `threadIdx.x`. Each load needs the one before, and loads wait behind the weights that are on their way: one step a
// product, so that nobody waits for them.
class PlaceSearch {
 public:
  __device__ bool done() const { return step_ == 4; }
  __device__ __forceinline__ void step(const DecodeProjectionsArguments& a, Places& places) {
    const int step = step_++;
    if (threadIdx.x >= a.rows) return;
    switch (step) {
      case 0:
        row_ = a.query_rows[threadIdx.x];
        position_ = a.positions[threadIdx.x];
        break;
      case 1:
        if (row_.request >= 0) pages_ = a.kv.requests[row_.request].pages;
        break;
      case 2:
        if (row_.request >= 0) page_ = pages_[row_.position / kPageTokens].bf16[row_.loop - 1];
        break;
      case 3:
        places.positions[threadIdx.x] = position_;
        places.key_pages[threadIdx.x] =
            row_.request < 0 ? nullptr
                             : reinterpret_cast<Bfloat16*>(page_) + page_row_offset(a.kv.shape, a.next_layer, KvTensor::k, 0, row_.position % kPageTokens);
        break;
    }
  }

 private:
  int step_ = 0;
  QueryRow row_{};
  std::int32_t position_ = 0;
  const PageTableEntry* pages_ = nullptr;
  std::uint64_t page_ = 0;
};

template <int kStages>
__global__ void __launch_bounds__(kThreads, 1) decode_projections_kernel(const __grid_constant__ Launch launch) {
  extern __shared__ __align__(128) char shared[];
  __shared__ Shares shares[2];          // of a tile while that of the next is made
  __shared__ float inverse[kMostProjectionRows];
  __shared__ Places places;
  const DecodeProjectionsArguments& a = launch.a;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, quarter = lane % 4;

  NormMemory memory;
  memory.norms = reinterpret_cast<Bfloat16*>(shared + kWarps * kStages * kStageBytes);
  memory.rows = memory.norms + static_cast<std::size_t>(launch.norm_count) * a.hidden;
  memory.lanes = memory.rows + static_cast<std::size_t>(a.rows) * (a.hidden + kRowPadding);
  memory.inverse = inverse;

  // Weights depend on no kernel in front.
  for (int norm = 0; norm < launch.norm_count; ++norm) {
    for (int i = threadIdx.x; i < a.hidden / 8; i += kThreads) {
      copy_async(static_cast<std::uint32_t>(__cvta_generic_to_shared(memory.norms + static_cast<std::size_t>(norm) * a.hidden + i * 8)),
                 launch.norms[norm] + i * 8);
    }
  }
  commit_copies();
  char* const ring_memory = shared + warp * kStages * kStageBytes;
  WeightRing ring(launch, static_cast<std::uint32_t>(__cvta_generic_to_shared(ring_memory)), kStages);
#pragma unroll
  for (int stage = 0; stage < kStages; ++stage) ring.request();
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");

  // The pieces of a stage that this thread reads: of weight rows `group` and `group` + 8, 16 bytes of every chunk.
  const char* const read_base = ring_memory + group * kStageRowBytes;
  const int swap = group % 2 * 4;
  PlaceSearch search;
  int slot = 0, buffer = 0;
  for (int index = 0; index < launch.phase_count; ++index) {
    const Phase& phase = launch.phases[index];
    if (index > 0) meet(a.arrivals + index);
    if (a.qkv_weight != nullptr) {
      do search.step(a, places);
      while (index + 1 == launch.phase_count && !search.done());  // the last product needs them
    }
    wait_copies<kStages>();  // the norm weights, which every thread has copied a part of
    if (phase.input != Input::rows) {
      const int threads = 32 * warps_of_row(a.rows), pieces = (a.hidden / 8 + threads - 1) / threads;
      if (pieces <= 1) norm_rows<1>(launch, phase, memory);
      else if (pieces <= 2) norm_rows<2>(launch, phase, memory);
      else if (pieces <= 4) norm_rows<4>(launch, phase, memory);
      else norm_rows<kMostPieces>(launch, phase, memory);
    }

    const int chunks = phase.in / kChunk, begin = chunks * warp / kWarps, count = chunks * (warp + 1) / kWarps - begin;
    const Bfloat16* const x = phase.input == Input::rows ? phase.x + static_cast<std::size_t>(group) * phase.in + begin * kChunk + quarter * 8
                                                         : memory.rows + static_cast<std::size_t>(group) * (a.hidden + kRowPadding) + begin * kChunk + quarter * 8;
    const auto load_rows = [&](uint4(&values)[kStageChunks], int chunk) {
#pragma unroll
      for (int c = 0; c < kStageChunks; ++c) {
        values[c] = make_uint4(0, 0, 0, 0);
        if (chunk + c >= count || group >= a.rows) continue;
        if (phase.input == Input::rows) values[c] = load_uncached(x + (chunk + c) * kChunk);
        else values[c] = *reinterpret_cast<const uint4*>(x + (chunk + c) * kChunk);
      }
    };
    uint4 even[kStageChunks], odd[kStageChunks];
    load_rows(even, 0);
    load_rows(odd, kStageChunks);
    const bool held = count <= kHeldChunks;

    for (int tile = blockIdx.x; tile < phase.tiles; tile += gridDim.x) {
      float sums[4] = {};
      const auto stage = [&](const uint4(&rows)[kStageChunks], int left) {
        wait_copies<kStages - 1>();
        __syncwarp();
        uint4 low[kStageChunks], high[kStageChunks];
        const char* const from = read_base + slot * kStageBytes;
#pragma unroll
        for (int c = 0; c < kStageChunks; ++c) {
          const int piece = ((c * 4 + quarter) ^ swap) * 16;
          low[c] = *reinterpret_cast<const uint4*>(from + piece);
          high[c] = *reinterpret_cast<const uint4*>(from + kTileRows / 2 * kStageRowBytes + piece);
        }
        slot = slot + 1 == kStages ? 0 : slot + 1;
        __syncwarp();  // everybody has read the stage that is now filled anew
        ring.request();
        float parts[kStageChunks][4] = {};
#pragma unroll
        for (int c = 0; c < kStageChunks; ++c) multiply_add(parts[c], low[c].x, high[c].x, low[c].y, high[c].y, rows[c].x, rows[c].y);
#pragma unroll
        for (int c = 0; c < kStageChunks; ++c) multiply_add(parts[c], low[c].z, high[c].z, low[c].w, high[c].w, rows[c].z, rows[c].w);
#pragma unroll
        for (int c = 0; c < kStageChunks; ++c) {
          if (c >= left) break;  // the rest of the stage holds old weights
#pragma unroll
          for (int e = 0; e < 4; ++e) sums[e] = __fadd_rn(sums[e], parts[c][e]);
        }
      };
      for (int chunk = 0; chunk < count; chunk += kHeldChunks) {
        stage(even, count - chunk);
        if (!held) load_rows(even, chunk + kHeldChunks < count ? chunk + kHeldChunks : 0);
        if (chunk + kStageChunks >= count) break;
        stage(odd, count - chunk - kStageChunks);
        if (!held) load_rows(odd, chunk + kHeldChunks + kStageChunks < count ? chunk + kHeldChunks + kStageChunks : kStageChunks);
      }

      Shares& mine = shares[buffer];
#pragma unroll
      for (int e = 0; e < 4; ++e) mine[warp][quarter * 2 + e % 2][e / 2 * 8 + group] = sums[e];
      __syncthreads();
      // Half of the warps finish this tile, the other half the next: the ends of tiles, SwiGLU's above all, run beside products.
      if (warp / 4 == buffer) finish_tile(launch, phase, tile, mine, threadIdx.x % 128, places.key_pages, places.positions);
      buffer ^= 1;
    }
  }
  wait_copies<0>();
}

std::size_t shared_bytes(int stages, const DecodeProjectionsArguments& a, int norms) {
  const auto rows = static_cast<std::size_t>(a.rows), hidden = static_cast<std::size_t>(a.hidden);
  return static_cast<std::size_t>(kWarps) * stages * kStageBytes +
         (norms * hidden + rows * (hidden + kRowPadding) + rows * kLanes * (hidden / kLanes + kLanePadding)) * sizeof(Bfloat16);
}

struct DeviceLimits {
  int multiprocessors = 0, shared_bytes = 0;
};

DeviceLimits device_limits() {
  int device = 0;
  DeviceLimits limits;
  LOOPGAUGE_CUDA_CHECK(cudaGetDevice(&device));
  LOOPGAUGE_CUDA_CHECK(cudaDeviceGetAttribute(&limits.multiprocessors, cudaDevAttrMultiProcessorCount, device));
  LOOPGAUGE_CUDA_CHECK(cudaDeviceGetAttribute(&limits.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  limits.shared_bytes -= static_cast<int>(2 * sizeof(Shares)) + 1024;
  return limits;
}

template <int kStages>
void launch_with(const Launch& launch, const DeviceLimits& limits, cudaStream_t stream) {
  const std::size_t bytes = shared_bytes(kStages, launch.a, launch.norm_count);
  const auto kernel = decode_projections_kernel<kStages>;
  // Always the same value: other threads launch the kernel too, with more or fewer bytes.
  LOOPGAUGE_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, limits.shared_bytes));
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeCooperative;  // all blocks are there at once, whatever else runs on the device: they wait for each other
  attributes[0].val.cooperative = 1;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = limits.multiprocessors;
  config.blockDim = kThreads;
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = 2;
  LOOPGAUGE_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, launch));
}

}  // namespace

bool decode_projections_cover(int rows, int hidden, int heads, int head_dim, int intermediate) {
  const int width = heads * head_dim;
  if (rows < 1 || rows > kMostProjectionRows) return false;
  // A warp has a share of every product; tiles are whole; a row's lanes are whole 16-byte pieces.
  if (hidden % 128 != 0 || width % kChunk != 0 || intermediate % kChunk != 0 || head_dim % kTileRows != 0) return false;
  if (hidden < kWarps * kChunk || width < kWarps * kChunk || intermediate < kWarps * kChunk) return false;
  if (hidden / 8 > kMostPieces * 32 * warps_of_row(rows)) return false;
  DecodeProjectionsArguments a;
  a.rows = rows;
  a.hidden = hidden;
  return shared_bytes(2, a, 4) <= static_cast<std::size_t>(device_limits().shared_bytes);
}

void decode_projections(const DecodeProjectionsArguments& a, cudaStream_t stream) {
  Launch launch{};
  launch.a = a;
  const int width = a.heads * a.head_dim;
  const auto add = [&](const Phase& phase) { launch.phases[launch.phase_count++] = phase; };
  const auto norm = [&](const Bfloat16* weight) {
    launch.norms[launch.norm_count] = weight;
    return launch.norm_count++;
  };
  if (a.attended != nullptr) {
    add({Input::rows, Output::rows, a.o_proj, width, a.hidden, a.hidden / kTileRows, a.attended, a.projected, nullptr, nullptr, 0});
    const int first = norm(a.norm_after_attention);
    norm(a.norm_before_mlp);
    add({Input::added_and_normed, Output::activated, a.gate_up, a.hidden, 2 * a.intermediate, 2 * a.intermediate / kTileRows, a.projected, a.activated,
         a.residual, a.residual_after_attention, first});
    add({Input::rows, Output::rows, a.down_proj, a.intermediate, a.hidden, a.hidden / kTileRows, a.activated, a.projected, nullptr, nullptr, 0});
  }
  if (a.qkv_weight != nullptr) {
    const bool behind = a.attended != nullptr;
    const int first = behind ? norm(a.norm_after_mlp) : 0;
    norm(a.input_norm);
    add({behind ? Input::added_and_normed : Input::normed, Output::rotated_and_appended, a.qkv_weight, a.hidden, 3 * width, 3 * width / kTileRows,
         a.projected, a.qkv, behind ? a.residual_after_attention : a.residual, a.residual, first});
  }
  const DeviceLimits limits = device_limits();
  const auto fits = [&](int stages) { return shared_bytes(stages, a, launch.norm_count) <= static_cast<std::size_t>(limits.shared_bytes); };
  if (fits(kMostStages)) launch_with<kMostStages>(launch, limits, stream);
  else if (fits(3)) launch_with<3>(launch, limits, stream);
  else launch_with<2>(launch, limits, stream);
}

}  // namespace loopgauge::optimized
