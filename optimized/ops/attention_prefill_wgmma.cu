// SPDX-License-Identifier: Apache-2.0
#include "optimized/ops/attention_prefill_wgmma.cuh"

#include "optimized/ops/shared_memory.cuh"
#include "optimized/ops/tensor_core.cuh"
#include "optimized/runtime/cuda_check.hpp"

namespace loopgauge::optimized {
namespace {

constexpr int kGroupThreads = 128;  // a warpgroup
constexpr int kGroupRows = 64;      // query rows of one: the M of wgmma
constexpr int kGroups = kPrefillTileRows / kGroupRows;
constexpr int kThreads = (kGroups + 1) * kGroupThreads;
constexpr int kStages = 4;
constexpr int kSwizzledRowBytes = 128;  // rows of a shared-memory tile; a row of head_dim 128 lies in two such tiles
constexpr int kSwizzleBytes = 1024;     // 8 rows: the swizzle repeats, and every tile begins at a multiple
static_assert(kGroups == 2);

template <int kHeadDim>
inline constexpr int kTileBytes = kPageTokens* kHeadDim * static_cast<int>(sizeof(__nv_bfloat16));  // K or V of one page
template <int kHeadDim>
inline constexpr int kSharedBytes = kStages * 2 * kTileBytes<kHeadDim> + kSwizzleBytes;  // the start is rounded up

// A value that every lane of the warp holds, which the compiler cannot know: what follows from it then stands in uniform registers, where the
// operands of warpgroup products are wanted.
template <class T>
__device__ __forceinline__ T uniform(T value) {
  return __shfl_sync(~0u, value, 0);
}

// --- copies ---

__device__ __forceinline__ void copy_async(std::uint32_t shared, std::uint64_t global, bool valid) {
  const int bytes = valid ? 16 : 0;  // the rest of the 16 is filled with zeros
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}
// Shared memory that this thread has written may be read by wgmma of whoever synchronizes with it.
__device__ __forceinline__ void publish_to_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// --- warpgroup products ---

__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Keeps the compiler from moving uses of accumulators across a wait that it does not know to concern them.
template <int kColumns>
__device__ __forceinline__ void pin(float (&values)[kColumns][4]) {
#pragma unroll
  for (int n = 0; n < kColumns; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) asm volatile("" : "+f"(values[n][i])::"memory");
  }
}

// Shared-memory operand in tiles of 128-byte rows with the 128-byte swizzle; `leading` bytes between tiles of a row, where there are two.
__device__ __forceinline__ std::uint64_t operand(std::uint32_t address, int leading) {
  return static_cast<std::uint64_t>((address & 0x3FFFFu) >> 4) | static_cast<std::uint64_t>(leading >> 4) << 16 |
         static_cast<std::uint64_t>(kSwizzleBytes >> 4) << 32 | std::uint64_t{1} << 62;
}

// c[64 x 64] = a[64 x 16] * b^T, or +=; b 64 rows of 16 values.
__device__ __forceinline__ void multiply_64_keys(float (&c)[8][4], const std::uint32_t (&a)[4], std::uint64_t b, bool accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred accumulate;\n"
      "setp.ne.b32 accumulate, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "{%32, %33, %34, %35}, %36, accumulate, 1, 1, 0;\n"
      "}\n"
      : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]), "+f"(c[1][0]), "+f"(c[1][1]), "+f"(c[1][2]), "+f"(c[1][3]),
        "+f"(c[2][0]), "+f"(c[2][1]), "+f"(c[2][2]), "+f"(c[2][3]), "+f"(c[3][0]), "+f"(c[3][1]), "+f"(c[3][2]), "+f"(c[3][3]),
        "+f"(c[4][0]), "+f"(c[4][1]), "+f"(c[4][2]), "+f"(c[4][3]), "+f"(c[5][0]), "+f"(c[5][1]), "+f"(c[5][2]), "+f"(c[5][3]),
        "+f"(c[6][0]), "+f"(c[6][1]), "+f"(c[6][2]), "+f"(c[6][3]), "+f"(c[7][0]), "+f"(c[7][1]), "+f"(c[7][2]), "+f"(c[7][3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)));
}
// c[64 x N] += a[64 x 16] * b; b 16 rows of N values.
__device__ __forceinline__ void multiply_value_rows(float (&c)[8][4], const std::uint32_t (&a)[4], std::uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "{%32, %33, %34, %35}, %36, 1, 1, 1, 1;\n"
      : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]), "+f"(c[1][0]), "+f"(c[1][1]), "+f"(c[1][2]), "+f"(c[1][3]),
        "+f"(c[2][0]), "+f"(c[2][1]), "+f"(c[2][2]), "+f"(c[2][3]), "+f"(c[3][0]), "+f"(c[3][1]), "+f"(c[3][2]), "+f"(c[3][3]),
        "+f"(c[4][0]), "+f"(c[4][1]), "+f"(c[4][2]), "+f"(c[4][3]), "+f"(c[5][0]), "+f"(c[5][1]), "+f"(c[5][2]), "+f"(c[5][3]),
        "+f"(c[6][0]), "+f"(c[6][1]), "+f"(c[6][2]), "+f"(c[6][3]), "+f"(c[7][0]), "+f"(c[7][1]), "+f"(c[7][2]), "+f"(c[7][3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ __forceinline__ void multiply_value_rows(float (&c)[16][4], const std::uint32_t (&a)[4], std::uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
      "{%64, %65, %66, %67}, %68, 1, 1, 1, 1;\n"
      : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]), "+f"(c[1][0]), "+f"(c[1][1]), "+f"(c[1][2]), "+f"(c[1][3]),
        "+f"(c[2][0]), "+f"(c[2][1]), "+f"(c[2][2]), "+f"(c[2][3]), "+f"(c[3][0]), "+f"(c[3][1]), "+f"(c[3][2]), "+f"(c[3][3]),
        "+f"(c[4][0]), "+f"(c[4][1]), "+f"(c[4][2]), "+f"(c[4][3]), "+f"(c[5][0]), "+f"(c[5][1]), "+f"(c[5][2]), "+f"(c[5][3]),
        "+f"(c[6][0]), "+f"(c[6][1]), "+f"(c[6][2]), "+f"(c[6][3]), "+f"(c[7][0]), "+f"(c[7][1]), "+f"(c[7][2]), "+f"(c[7][3]),
        "+f"(c[8][0]), "+f"(c[8][1]), "+f"(c[8][2]), "+f"(c[8][3]), "+f"(c[9][0]), "+f"(c[9][1]), "+f"(c[9][2]), "+f"(c[9][3]),
        "+f"(c[10][0]), "+f"(c[10][1]), "+f"(c[10][2]), "+f"(c[10][3]), "+f"(c[11][0]), "+f"(c[11][1]), "+f"(c[11][2]), "+f"(c[11][3]),
        "+f"(c[12][0]), "+f"(c[12][1]), "+f"(c[12][2]), "+f"(c[12][3]), "+f"(c[13][0]), "+f"(c[13][1]), "+f"(c[13][2]), "+f"(c[13][3]),
        "+f"(c[14][0]), "+f"(c[14][1]), "+f"(c[14][2]), "+f"(c[14][3]), "+f"(c[15][0]), "+f"(c[15][1]), "+f"(c[15][2]), "+f"(c[15][3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

__device__ __forceinline__ float exp2_approximate(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));  // relative error 2^-22
  return y;
}

// --- the warpgroup that copies ---

// Where the versions of one page's rows lie.
struct PageSource {
  std::uint64_t planes[kLoops];
  std::uint64_t active[kLoops];

  __device__ __forceinline__ void load(const RequestTable& request, int page) {
#pragma unroll
    for (int r = 0; r < kLoops; ++r) {
      planes[r] = request.pages[page].bf16[r];
      active[r] = request.maps[page].active[r];
    }
  }
  // The plane that holds the logical version of `row` at `loop`.
  __device__ __forceinline__ std::uint64_t resident(int row, int loop) const {
    std::uint64_t plane = planes[0];
#pragma unroll
    for (int r = 2; r <= kLoops; ++r) {
      if (r <= loop && ((active[r - 1] >> row) & 1u)) plane = planes[r - 1];
    }
    return plane;
  }
};

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

// --- the warpgroups that compute ---

// What one thread holds of its warpgroup's 64 rows: rows lane / 4 and lane / 4 + 8 of its warp's 16 (index `half`), and column pairs
// 2 * (lane % 4) of every 8.
struct RowState {
  float maximum[2];   // of the dots, not scaled
  float base[2];      // scale * log2(e) * maximum, 0 while there is none
  float sum[2];       // of this thread's columns
  float rescale[2];   // what the last page asks of everything before it
};
// A operand of a product with 64 rows of V: 16 keys a step.
struct Weights {
  std::uint32_t high[4][4], low[4][4];
};

// Online softmax of one page, in place: scores become weights relative to the row's maximum so far. `limit[half]`: keys of the page after the limit are masked, relative to this thread's first column.
template <int kHeadDim>
__device__ __forceinline__ void softmax(float (&scores)[8][4], bool masked, const int (&limit)[2], RowState& state) {
  constexpr float kScaleLog2e = kHeadDim == 64 ? static_cast<float>(0.125 * 1.44269504088896340736)
                                               : static_cast<float>(0.08838834764831844055 * 1.44269504088896340736);
  const float kMinusInfinity = __int_as_float(0xFF800000);
  if (masked) {
#pragma unroll
    for (int n = 0; n < 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (n * 8 + i % 2 > limit[i / 2]) scores[n][i] = kMinusInfinity;
      }
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float next = fmaxf(scores[0][2 * half], scores[0][2 * half + 1]);
#pragma unroll
    for (int n = 1; n < 8; ++n) next = fmaxf(next, fmaxf(scores[n][2 * half], scores[n][2 * half + 1]));
    next = fmaxf(next, __shfl_xor_sync(~0u, next, 1));
    next = fmaxf(next, __shfl_xor_sync(~0u, next, 2));
    next = fmaxf(state.maximum[half], next);
    const float base = next == kMinusInfinity ? 0.0f : __fmul_rn(next, kScaleLog2e);  // a padding row has no key at all
    state.rescale[half] = state.maximum[half] == kMinusInfinity ? 0.0f : exp2_approximate(__fsub_rn(state.base[half], base));
    state.maximum[half] = next;
    state.base[half] = base;
    float page_sum = 0.0f;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float left = exp2_approximate(__fmaf_rn(scores[n][2 * half], kScaleLog2e, -base));
      const float right = exp2_approximate(__fmaf_rn(scores[n][2 * half + 1], kScaleLog2e, -base));
      page_sum = __fadd_rn(page_sum, __fadd_rn(left, right));
      scores[n][2 * half] = left;
      scores[n][2 * half + 1] = right;
    }
    state.sum[half] = __fmaf_rn(state.sum[half], state.rescale[half], page_sum);
  }
}

__device__ __forceinline__ void split_weights(const float (&scores)[8][4], Weights& weights) {
#pragma unroll
  for (int n = 0; n < 8; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      split_bf16(scores[n][2 * half], scores[n][2 * half + 1], weights.high[n / 2][n % 2 * 2 + half], weights.low[n / 2][n % 2 * 2 + half]);
    }
  }
}

// scores[64 x 64] = q[64 x D] * K^T.
template <int kHeadDim>
__device__ __forceinline__ void multiply_keys(float (&scores)[8][4], const std::uint32_t (&q)[kHeadDim / 16][4], std::uint32_t keys) {
#pragma unroll
  for (int step = 0; step < kHeadDim / 16; ++step) {
    // 16 channels are 32 bytes of a row; four such steps are one tile.
    const std::uint32_t address = keys + static_cast<std::uint32_t>(step / 4 * (kPageTokens * kSwizzledRowBytes) + step % 4 * 32);
    multiply_64_keys(scores, q[step], operand(address, 16), step > 0);
  }
}

// output[64 x D] += weights[64 x 64] * V.
template <int kHeadDim>
__device__ __forceinline__ void multiply_values(float (&output)[kHeadDim / 8][4], const Weights& weights, std::uint32_t values) {
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    const std::uint64_t v = operand(values + static_cast<std::uint32_t>(step * 16 * kSwizzledRowBytes), kPageTokens * kSwizzledRowBytes);
    multiply_value_rows(output, weights.high[step], v);
    multiply_value_rows(output, weights.low[step], v);
  }
}

// grid (heads, tiles), kThreads threads, one CTA on a multiprocessor.
template <int kHeadDim>
__global__ void __launch_bounds__(kThreads, 1) attention_prefill_wgmma_kernel(AttentionPrefillArguments arguments) {
  extern __shared__ std::uint8_t unaligned_stages[];
  __shared__ std::uint64_t filled[kStages], emptied[kStages];
  __shared__ std::int32_t positions[kPrefillTileRows];
  __shared__ std::int32_t last_position[kGroups], first_position[kGroups];

  const PrefillTile tile = arguments.tiles[arguments.tile_count - 1 - blockIdx.y];  // longest histories start first
  if (tile.encoded_frontier > 0) return;
  const int head = static_cast<int>(blockIdx.x), layer = arguments.layer, thread = static_cast<int>(threadIdx.x);
  const std::uint32_t stages = uniform((shared_address(unaligned_stages) + kSwizzleBytes - 1) / kSwizzleBytes * kSwizzleBytes);
  const auto stage_of = [&](int page) { return stages + static_cast<std::uint32_t>(page % kStages * 2 * kTileBytes<kHeadDim>); };

  if (thread < kGroups) {
    last_position[thread] = -1;
    first_position[thread] = 0x7FFFFFFF;
  }
  if (thread == 0) {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(&filled[i], kGroupThreads);
      barrier_init(&emptied[i], kGroups * kGroupThreads / 32);
    }
    publish_to_products();
  }
  __syncthreads();
  if (thread < kPrefillTileRows) {
    const int position = thread < tile.row_count ? arguments.positions[tile.row_begin + thread] : -1;
    positions[thread] = position;
    if (position >= 0) {
      atomicMax(&last_position[thread / kGroupRows], position);
      atomicMin(&first_position[thread / kGroupRows], position);
    }
  }
  __syncthreads();
  const int last = max(last_position[0], last_position[1]);
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
      copy_page<kHeadDim>(stage_of(page), source, offset, v_distance, page, page_mask(page, 0, last + 1), reading, tile.loop, positions);
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
  const int group = uniform(thread / kGroupThreads), warp = thread % kGroupThreads / 32, lane = thread % 32;
  const auto release = [&](int page) {
    __syncwarp();
    if (lane == 0) barrier_arrive(&emptied[page % kStages]);
  };
  const auto wait_for_page = [&](int page) { barrier_wait(&filled[page % kStages], page / kStages & 1); };

  const int rows[2] = {group * kGroupRows + warp * 16 + lane / 4, group * kGroupRows + warp * 16 + lane / 4 + 8};
  const int row_position[2] = {positions[rows[0]], positions[rows[1]]};
  const int own_pages = uniform(last_position[group] < 0 ? 0 : last_position[group] / kPageTokens + 1), first = first_position[group];
  std::uint32_t q[kHeadDim / 16][4];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const bool exists = rows[half] < tile.row_count;
    const __nv_bfloat16* row = arguments.q + (tile.row_begin + rows[half]) * arguments.q_row_stride + head * kHeadDim + 2 * (lane % 4);
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step) {
      q[step][half] = exists ? __ldg(reinterpret_cast<const std::uint32_t*>(row + step * 16)) : 0;
      q[step][2 + half] = exists ? __ldg(reinterpret_cast<const std::uint32_t*>(row + step * 16 + 8)) : 0;
    }
  }

  const float kMinusInfinity = __int_as_float(0xFF800000);
  RowState state{{kMinusInfinity, kMinusInfinity}, {0.0f, 0.0f}, {0.0f, 0.0f}, {0.0f, 0.0f}};
  float output[kHeadDim / 8][4] = {};
  float scores[8][4];
  const auto page_softmax = [&](int page) {
    const int limit[2] = {row_position[0] - page * kPageTokens - 2 * (lane % 4), row_position[1] - page * kPageTokens - 2 * (lane % 4)};
    softmax<kHeadDim>(scores, page * kPageTokens + kPageTokens - 1 > first, limit, state);
  };
  Weights weights;
  if (own_pages > 0) {
    wait_for_page(0);
    products_begin();
    multiply_keys<kHeadDim>(scores, q, stage_of(0));
    products_commit();
    wait_for_products<0>();
    pin(scores);
    page_softmax(0);
    split_weights(scores, weights);
    // The scores of page + 1 and the values of `page` are multiplied together, so that the softmax of page + 1 runs beside the latter.
    if (own_pages > 1) wait_for_page(1);
    for (int page = 0; page + 1 < own_pages; ++page) {
      pin(scores);
      pin(output);
      products_begin();
      multiply_keys<kHeadDim>(scores, q, stage_of(page + 1));
      products_commit();
      multiply_values<kHeadDim>(output, weights, stage_of(page) + kTileBytes<kHeadDim>);
      products_commit();
      wait_for_products<1>();
      pin(scores);
      page_softmax(page + 1);
      pin(scores);
      // Here rather than at the top: the branch keeps the assembler from moving the wait for the values up before the softmax.
      if (page + 2 < own_pages) wait_for_page(page + 2);
      wait_for_products<0>();
      pin(output);
      release(page);
      // Multiplying by one changes nothing: maxima rise rarely.
      if (__any_sync(~0u, state.rescale[0] != 1.0f || state.rescale[1] != 1.0f)) {
#pragma unroll
        for (int n = 0; n < kHeadDim / 8; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) output[n][i] = __fmul_rn(output[n][i], state.rescale[i / 2]);
        }
      }
      split_weights(scores, weights);
    }
    pin(output);
    products_begin();
    multiply_values<kHeadDim>(output, weights, stage_of(own_pages - 1) + kTileBytes<kHeadDim>);
    products_commit();
    wait_for_products<0>();
    pin(output);
    release(own_pages - 1);
  }
  // Pages that only the other warpgroup's rows read. Each is waited for, so that a stage is released once for every time it is filled.
  for (int page = own_pages; page < pages; ++page) {
    wait_for_page(page);
    release(page);
  }

#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float sum = __fadd_rn(state.sum[half], __shfl_xor_sync(~0u, state.sum[half], 1));
    sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, 2));
    if (row_position[half] < 0) continue;
    const std::int64_t row = tile.row_begin + rows[half];
    __nv_bfloat16* target = arguments.output + (row * arguments.kv.shape.heads + head) * kHeadDim + 2 * (lane % 4);
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; ++n) {
      *reinterpret_cast<std::uint32_t*>(target + n * 8) =
          pack_bf16(__fdiv_rn(output[n][2 * half], sum), __fdiv_rn(output[n][2 * half + 1], sum));
    }
  }
}

template <int kHeadDim>
void launch(const AttentionPrefillArguments& arguments, cudaStream_t stream) {
  const auto kernel = attention_prefill_wgmma_kernel<kHeadDim>;
  LOOPGAUGE_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes<kHeadDim>));
  kernel<<<dim3(arguments.kv.shape.heads, arguments.tile_count), kThreads, kSharedBytes<kHeadDim>, stream>>>(arguments);
  LOOPGAUGE_CUDA_CHECK_LAUNCH("attention_prefill_wgmma");
}

}  // namespace

bool attention_prefill_wgmma_available() {
  int device = 0, major = 0, minor = 0;
  LOOPGAUGE_CUDA_CHECK(cudaGetDevice(&device));
  LOOPGAUGE_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  LOOPGAUGE_CUDA_CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
  return major == 9 && minor == 0;
}

void attention_prefill_wgmma(const AttentionPrefillArguments& arguments, cudaStream_t stream) {
  arguments.kv.shape.head_dim == 128 ? launch<128>(arguments, stream) : launch<64>(arguments, stream);
}

}  // namespace loopgauge::optimized
