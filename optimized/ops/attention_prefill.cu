// SPDX-License-Identifier: Apache-2.0
#include "optimized/ops/attention_prefill.cuh"

#include <algorithm>
#include <string>

#include "models/error.hpp"
#include "optimized/kv/reconstruct.cuh"
#include "optimized/ops/attention_prefill_encoded.cuh"
#include "optimized/ops/attention_prefill_wgmma.cuh"
#include "optimized/ops/shared_memory.cuh"
#include "optimized/ops/tensor_core.cuh"
#include "optimized/runtime/cuda_check.hpp"

namespace loopgauge::optimized {
namespace {

constexpr int kThreads = 128;
constexpr int kWarpRows = 16;
constexpr int kPartRows = kThreads / 32 * kWarpRows;  // rows of a CTA: a part of a tile
constexpr int kParts = kPrefillTileRows / kPartRows;
static_assert(kParts * kPartRows == kPrefillTileRows);

// Shared-memory tiles are [64 rows][head_dim + 8] BF16: the padding puts the rows that one ldmatrix reads into different banks.
template <int kHeadDim>
inline constexpr int kTileStride = kHeadDim + 8;
template <int kHeadDim>
inline constexpr int kTileElements = kPageTokens* kTileStride<kHeadDim>;

__device__ __forceinline__ void load_matrix_x4(std::uint32_t (&r)[4], std::uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void load_matrix_x4_transposed(std::uint32_t (&r)[4], std::uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
// c[16x8] += a[16x16] * b[16x8], BF16 operands, FP32 accumulation.
__device__ __forceinline__ void multiply_accumulate(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void copy_async(void* shared, const void* global, bool valid) {
  const int bytes = valid ? 16 : 0;  // the rest of the 16 is filled with zeros
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global), "r"(bytes) : "memory");
}

// e^x for x <= 0: the rounding of x * log2(e) costs |x| e^x 2^-24, at most 2^-25.
__device__ __forceinline__ float exp_not_positive(float x) { return exp2f(__fmul_rn(x, 1.44269504f)); }

// What the tile's queries read of one page.
struct PageOfTile {
  const PageTableEntry* entry;
  const ActivityMap* map;
  int page;
  int loop;
  int history_loop;               // differs from `loop` under a planted fault only
  std::uint64_t keys;             // rows that may be read: up to the part's last position
  const std::int32_t* positions;  // of the part's rows [kPartRows]

  __device__ __forceinline__ int resident(int row) const {
    int reader = loop;
    if (history_loop != loop) {
      reader = history_loop;
      for (int i = 0; i < kPartRows; ++i) {
        if (positions[i] == page * kPageTokens + row) reader = loop;
      }
    }
    return resident_loop(*map, row, reader);
  }
};

// Starts the copies of K and V rows 0..63 of one BF16 page, every row from the plane that holds its logical version; rows not in `keys`
// become zero, so that nothing unwritten reaches a product.
template <int kHeadDim>
__device__ __forceinline__ void copy_bf16_tiles(__nv_bfloat16* keys, __nv_bfloat16* values, const KvShape& shape, const PageOfTile& page,
                                                int layer, int head) {
  constexpr int kChunks = kHeadDim / 8;  // of 16 bytes
  constexpr int kRowsPerPass = kThreads / kChunks;
  const int chunk = threadIdx.x % kChunks;
  const std::size_t k_tile = page_tile_offset(shape, layer, KvTensor::k, head) + chunk * 8;
  const std::size_t v_tile = page_tile_offset(shape, layer, KvTensor::v, head) + chunk * 8;
  const bool one_plane = page.history_loop == page.loop && (page.keys & ~page.map->active[page.loop - 1]) == 0;
#pragma unroll 4
  for (int row = threadIdx.x / kChunks; row < kPageTokens; row += kRowsPerPass) {
    const bool valid = (page.keys >> row) & 1u;
    const int resident = one_plane || !valid ? page.loop : page.resident(row);
    const auto* source = reinterpret_cast<const __nv_bfloat16*>(page.entry->bf16[resident - 1]) + static_cast<std::size_t>(row) * kHeadDim;
    // An address is needed even where nothing is read.
    copy_async(keys + row * kTileStride<kHeadDim> + chunk * 8, valid ? static_cast<const void*>(source + k_tile) : page.map, valid);
    copy_async(values + row * kTileStride<kHeadDim> + chunk * 8, valid ? static_cast<const void*>(source + v_tile) : page.map, valid);
  }
}

// One tensor of an encoded page: X_hat[loop] as BF16 high and low parts.
template <int kHeadDim>
__device__ __forceinline__ void load_encoded_tile(__nv_bfloat16* high_tile, __nv_bfloat16* low_tile, const KvShape& shape,
                                                  const PageTableEntry& entry, const ActivityMap& map, int layer, KvTensor tensor, int head,
                                                  int loop) {
  constexpr int kWords = kHeadDim / 8;  // of 8 codes
  StreamTile tiles[kLoops];
  for (int stream = 1; stream <= kLoops; ++stream) {
    if (stream <= loop) tiles[stream - 1] = stream_tile(shape, entry, map, layer, stream, tensor, head);
  }
  for (int i = threadIdx.x; i < kPageTokens * kWords; i += kThreads) {
    const int row = i / kWords, word = i % kWords;
    float values[8] = {};
#pragma unroll
    for (int stream = 1; stream <= kLoops; ++stream) {
      if (stream > loop || !((map.active[stream - 1] >> row) & 1u)) continue;
      const StreamTile& tile = tiles[stream - 1];
      const int compact = static_cast<int>(map.rank[stream - 1]) + bits_below(map.active[stream - 1], row);
      const std::uint32_t codes =
          __ldg(reinterpret_cast<const std::uint32_t*>(tile.payload + static_cast<std::size_t>(compact) * (kHeadDim / 2)) + word);
      const std::uint32_t* parameters =
          tensor == KvTensor::k ? tile.parameters + static_cast<std::size_t>(compact / kGroupSize) * kHeadDim + 8 * word
                                : tile.parameters + static_cast<std::size_t>(compact) * (kHeadDim / kGroupSize) + 8 * word / kGroupSize;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const std::uint32_t pair = __ldg(parameters + (tensor == KvTensor::k ? j : 0));
        const float minimum = __half2float(__ushort_as_half(static_cast<unsigned short>(pair & 0xFFFFu)));
        const float scale = __half2float(__ushort_as_half(static_cast<unsigned short>(pair >> 16)));
        const float decoded = __fadd_rn(__fmul_rn(static_cast<float>((codes >> (4 * j)) & 0xFu), scale), minimum);
        values[j] = stream == 1 ? decoded : __fadd_rn(values[j], decoded);
      }
    }
    std::uint32_t high[4], low[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) split_bf16(values[2 * j], values[2 * j + 1], high[j], low[j]);
    const int offset = row * kTileStride<kHeadDim> + word * 8;
    *reinterpret_cast<uint4*>(high_tile + offset) = make_uint4(high[0], high[1], high[2], high[3]);
    *reinterpret_cast<uint4*>(low_tile + offset) = make_uint4(low[0], low[1], low[2], low[3]);
  }
}

// scores[16 x 64] += q[16 x D] * K^T.
template <int kHeadDim>
__device__ __forceinline__ void multiply_keys(float (&scores)[8][4], const std::uint32_t (&q)[kHeadDim / 16][4], const __nv_bfloat16* keys,
                                              int lane) {
  // One x4 load gives the B fragments of two 8-key columns for one 16-channel step.
  const int row = (lane & 7) + (lane & 16 ? 8 : 0), column = lane & 8 ? 8 : 0;
#pragma unroll
  for (int step = 0; step < kHeadDim / 16; ++step) {
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      std::uint32_t b[4];
      load_matrix_x4(b, shared_address(keys + (pair * 16 + row) * kTileStride<kHeadDim> + step * 16 + column));
      multiply_accumulate(scores[2 * pair], q[step], b[0], b[1]);
      multiply_accumulate(scores[2 * pair + 1], q[step], b[2], b[3]);
    }
  }
}

// output[16 x D] += weights[16 x 64] * V.
template <int kHeadDim>
__device__ __forceinline__ void multiply_values(float (&output)[kHeadDim / 8][4], const std::uint32_t (&weights)[4][4],
                                                const __nv_bfloat16* values, int lane) {
  const int row = lane & 15, column = lane & 16 ? 8 : 0;
#pragma unroll
  for (int step = 0; step < 4; ++step) {
#pragma unroll
    for (int pair = 0; pair < kHeadDim / 16; ++pair) {
      std::uint32_t b[4];
      load_matrix_x4_transposed(b, shared_address(values + (step * 16 + row) * kTileStride<kHeadDim> + pair * 16 + column));
      multiply_accumulate(output[2 * pair], weights[step], b[0], b[1]);
      multiply_accumulate(output[2 * pair + 1], weights[step], b[2], b[3]);
    }
  }
}

// grid (heads, tiles, kParts), kThreads threads.
template <int kHeadDim, bool kEncodedHistory>
__global__ void __launch_bounds__(kThreads) attention_prefill_kernel(AttentionPrefillArguments arguments) {
  // Two stages of K and V without encoded history, so that copies run ahead; one stage of K, V and their low parts with it.
  extern __shared__ __align__(16) __nv_bfloat16 tiles[];
  constexpr int kStages = kEncodedHistory ? 1 : 2;
  __nv_bfloat16* const keys_low = tiles + 2 * kTileElements<kHeadDim>;
  __nv_bfloat16* const values_low = tiles + 3 * kTileElements<kHeadDim>;
  __shared__ std::int32_t positions[kPartRows];
  __shared__ std::int32_t last_position, first_position;

  PrefillTile tile = arguments.tiles[arguments.tile_count - 1 - blockIdx.y];  // longest histories start first
  tile.row_begin += static_cast<int>(blockIdx.z) * kPartRows;
  tile.row_count = min(tile.row_count - static_cast<int>(blockIdx.z) * kPartRows, kPartRows);
  if (tile.row_count <= 0) return;
  const int head = blockIdx.x, layer = arguments.layer;
  const KvShape& shape = arguments.kv.shape;
  const RequestTable request = arguments.kv.requests[tile.request];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  if (threadIdx.x == 0) {
    last_position = -1;
    first_position = 0x7FFFFFFF;
  }
  __syncthreads();
  if (threadIdx.x < kPartRows) {
    const int position = static_cast<int>(threadIdx.x) < tile.row_count ? arguments.positions[tile.row_begin + threadIdx.x] : -1;
    positions[threadIdx.x] = position;
    if (position >= 0) {
      atomicMax(&last_position, position);
      atomicMin(&first_position, position);
    }
  }
  // Q goes through the first K tile into registers.
  constexpr int kChunks = kHeadDim / 8;
  for (int i = threadIdx.x; i < kPartRows * kChunks; i += kThreads) {
    const int row = i / kChunks, chunk = i % kChunks;
    uint4 data = make_uint4(0, 0, 0, 0);
    if (row < tile.row_count) {
      data = __ldg(reinterpret_cast<const uint4*>(arguments.q + (tile.row_begin + row) * arguments.q_row_stride + head * kHeadDim) + chunk);
    }
    *reinterpret_cast<uint4*>(tiles + row * kTileStride<kHeadDim> + chunk * 8) = data;
  }
  __syncthreads();
  if (last_position < 0) return;
  std::uint32_t q[kHeadDim / 16][4];
#pragma unroll
  for (int step = 0; step < kHeadDim / 16; ++step) {
    load_matrix_x4(q[step],
                   shared_address(tiles + (warp * kWarpRows + (lane & 15)) * kTileStride<kHeadDim> + step * 16 + (lane & 16 ? 8 : 0)));
  }

  // A lane owns rows lane / 4 and lane / 4 + 8 of its warp's 16 (index `half`), and column pairs 2 * (lane % 4) of every 8.
  const int row_position[2] = {positions[warp * kWarpRows + lane / 4], positions[warp * kWarpRows + lane / 4 + 8]};
  const float kMinusInfinity = __int_as_float(0xFF800000);
  const float scale = kHeadDim == 64 ? 0.125f : static_cast<float>(0.08838834764831844055);  // RN32(1 / sqrt(D)) from double
  const int history_loop = arguments.fault == Fault::loop_off_by_one && tile.loop > 1 ? tile.loop - 1 : tile.loop;
  float maximum[2] = {kMinusInfinity, kMinusInfinity}, sum[2] = {0.0f, 0.0f};
  float output[kHeadDim / 8][4] = {};

  const int last = last_position, first = first_position;
  const auto stage_of = [&](int page) { return tiles + (page % kStages) * 2 * kTileElements<kHeadDim>; };
  const auto is_encoded = [&](int page) { return kEncodedHistory && page * kPageTokens < tile.encoded_frontier; };
  const auto load = [&](int page) {
    const PageOfTile source{request.pages + page, request.maps + page,          page,     tile.loop,
                            history_loop,         page_mask(page, 0, last + 1), positions};
    __nv_bfloat16* keys = stage_of(page);
    __nv_bfloat16* values = keys + kTileElements<kHeadDim>;
    if (is_encoded(page)) {
      load_encoded_tile<kHeadDim>(keys, keys_low, shape, *source.entry, *source.map, layer, KvTensor::k, head, history_loop);
      load_encoded_tile<kHeadDim>(values, values_low, shape, *source.entry, *source.map, layer, KvTensor::v, head, history_loop);
    } else {
      copy_bf16_tiles<kHeadDim>(keys, values, shape, source, layer, head);
    }
    commit_copies();
  };
  __syncthreads();  // Q has left the tile
  if constexpr (kStages == 2) load(0);
  for (int page = 0; page * kPageTokens <= last; ++page) {
    if constexpr (kStages == 2) {
      wait_copies<0>();
      __syncthreads();  // this stage is visible, and everyone has left the other
      if ((page + 1) * kPageTokens <= last) load(page + 1);
    } else {
      __syncthreads();
      load(page);
      wait_copies<0>();
      __syncthreads();
    }
    const bool encoded = is_encoded(page);
    const __nv_bfloat16* keys = stage_of(page);
    const __nv_bfloat16* values = keys + kTileElements<kHeadDim>;

    float scores[8][4] = {};
    multiply_keys<kHeadDim>(scores, q, keys, lane);
    if (encoded) multiply_keys<kHeadDim>(scores, q, keys_low, lane);
    const bool masked = page * kPageTokens + kPageTokens - 1 > first;
    float page_maximum[2] = {kMinusInfinity, kMinusInfinity};
#pragma unroll
    for (int n = 0; n < 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int key = page * kPageTokens + n * 8 + 2 * (lane % 4) + i % 2;
        float score = __fmul_rn(scores[n][i], scale);
        if (masked && key > row_position[i / 2]) score = kMinusInfinity;
        scores[n][i] = score;
        page_maximum[i / 2] = fmaxf(page_maximum[i / 2], score);
      }
    }
    float rescale[2], base[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      page_maximum[half] = fmaxf(page_maximum[half], __shfl_xor_sync(~0u, page_maximum[half], 1));
      page_maximum[half] = fmaxf(page_maximum[half], __shfl_xor_sync(~0u, page_maximum[half], 2));
      const float next = fmaxf(maximum[half], page_maximum[half]);
      base[half] = next == kMinusInfinity ? 0.0f : next;  // a padding row has no key at all
      rescale[half] = exp_not_positive(__fsub_rn(maximum[half], base[half]));
      maximum[half] = next;
      sum[half] = __fmul_rn(sum[half], rescale[half]);
    }
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) output[n][i] = __fmul_rn(output[n][i], rescale[i / 2]);
    }
    std::uint32_t high[4][4], low[4][4];  // weights as A fragments, 16 keys a step
    float page_sum[2] = {0.0f, 0.0f};
#pragma unroll
    for (int n = 0; n < 8; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float left = exp_not_positive(__fsub_rn(scores[n][2 * half], base[half]));
        const float right = exp_not_positive(__fsub_rn(scores[n][2 * half + 1], base[half]));
        page_sum[half] = __fadd_rn(page_sum[half], __fadd_rn(left, right));
        split_bf16(left, right, high[n / 2][n % 2 * 2 + half], low[n / 2][n % 2 * 2 + half]);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) sum[half] = __fadd_rn(sum[half], page_sum[half]);
    multiply_values<kHeadDim>(output, high, values, lane);
    multiply_values<kHeadDim>(output, low, values, lane);
    if (encoded) multiply_values<kHeadDim>(output, high, values_low, lane);
  }

#pragma unroll
  for (int half = 0; half < 2; ++half) {
    sum[half] = __fadd_rn(sum[half], __shfl_xor_sync(~0u, sum[half], 1));
    sum[half] = __fadd_rn(sum[half], __shfl_xor_sync(~0u, sum[half], 2));
    if (row_position[half] < 0) continue;
    const std::int64_t row = tile.row_begin + warp * kWarpRows + lane / 4 + 8 * half;
    __nv_bfloat16* target = arguments.output + (row * shape.heads + head) * kHeadDim + 2 * (lane % 4);
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; ++n) {
      *reinterpret_cast<std::uint32_t*>(target + n * 8) =
          pack_bf16(__fdiv_rn(output[n][2 * half], sum[half]), __fdiv_rn(output[n][2 * half + 1], sum[half]));
    }
  }
}

template <int kHeadDim, bool kEncodedHistory>
void launch(const AttentionPrefillArguments& arguments, cudaStream_t stream) {
  constexpr int kSharedBytes = 4 * kTileElements<kHeadDim> * static_cast<int>(sizeof(__nv_bfloat16));
  const auto kernel = attention_prefill_kernel<kHeadDim, kEncodedHistory>;
  if constexpr (kSharedBytes > 40 * 1024) {
    LOOPGAUGE_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
  }
  kernel<<<dim3(arguments.kv.shape.heads, arguments.tile_count, kParts), kThreads, kSharedBytes, stream>>>(arguments);
  LOOPGAUGE_CUDA_CHECK_LAUNCH("attention_prefill");
}

}  // namespace

std::vector<PrefillTile> make_prefill_tiles(std::span<const PrefillSegment> segments, int heads) {
  // Half a tile takes 0.7 of the time of a whole one, alone on a multiprocessor as both are.
  constexpr int kMultiprocessors = 132;
  const auto tiles_of = [&](int tile_rows) {
    int count = 0;
    for (const PrefillSegment& segment : segments) count += (segment.row_count + tile_rows - 1) / tile_rows;
    return count;
  };
  const int tile_rows = tiles_of(kPrefillTileRows / 2) * heads <= kMultiprocessors ? kPrefillTileRows / 2 : kPrefillTileRows;
  std::vector<PrefillTile> tiles;
  tiles.reserve(static_cast<std::size_t>(tiles_of(tile_rows)));
  for (const PrefillSegment& segment : segments) {
    for (int row = 0; row < segment.row_count; row += tile_rows) {
      PrefillTile tile = segment;
      tile.row_begin = segment.row_begin + row;
      tile.row_count = std::min(tile_rows, segment.row_count - row);
      tiles.push_back(tile);
    }
  }
  return tiles;
}

std::size_t attention_prefill_workspace_bytes(const KvShape& shape, int row_count, int max_length) {
  const int splits = prefill_splits(max_length);
  if (splits == 1) return 0;
  return static_cast<std::size_t>(row_count) * shape.heads * splits * static_cast<std::size_t>(shape.head_dim + 2) * sizeof(float);
}

void attention_prefill(const AttentionPrefillArguments& arguments, cudaStream_t stream) {
  const KvShape& shape = arguments.kv.shape;
  if (shape.head_dim != 64 && shape.head_dim != 128) {
    throw UnsupportedError("attention_prefill: head_dim " + std::to_string(shape.head_dim) + " is not 64 or 128");
  }
  if (arguments.tile_count < 0 || arguments.tile_count > 65535) {
    throw InternalError("attention_prefill: " + std::to_string(arguments.tile_count) + " tiles in one launch, at most 65535");
  }
  if (arguments.tile_count == 0) return;
  if (arguments.encoded_history && (arguments.max_length < 1 || arguments.row_count < 1)) {
    throw InternalError("attention_prefill: encoded history without the number of rows and the largest length");
  }
  if (attention_prefill_wgmma_available()) {
    // A tile's kernel follows from its own frontier, so that its bits do not depend on what else is in the launch.
    attention_prefill_wgmma(arguments, stream);
    if (arguments.encoded_history) attention_prefill_encoded(arguments, stream);
  } else if (shape.head_dim == 128) {
    arguments.encoded_history ? launch<128, true>(arguments, stream) : launch<128, false>(arguments, stream);
  } else {
    arguments.encoded_history ? launch<64, true>(arguments, stream) : launch<64, false>(arguments, stream);
  }
}

}  // namespace loopgauge::optimized
