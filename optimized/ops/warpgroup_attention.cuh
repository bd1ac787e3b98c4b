// SPDX-License-Identifier: Apache-2.0
// Attention of up to 128 prompt rows by two warpgroups, from pages of K and V in shared memory: what the two kernels of attention_prefill with
// warpgroup products share. Who brings the pages there is theirs. Compute capability 9.0 only.
#pragma once

#include "optimized/ops/attention_prefill.cuh"
#include "optimized/ops/shared_memory.cuh"
#include "optimized/ops/tensor_core.cuh"
#include "optimized/ops/uniform.cuh"

namespace loopgauge::optimized {

#ifdef __CUDACC__

inline constexpr int kGroupThreads = 128;  // a warpgroup
inline constexpr int kGroupRows = 64;      // query rows of one: the M of wgmma
inline constexpr int kGroups = kPrefillTileRows / kGroupRows;
inline constexpr int kSwizzledRowBytes = 128;  // rows of a shared-memory tile; a row of head_dim 128 lies in two such tiles
inline constexpr int kSwizzleBytes = 1024;     // 8 rows: the swizzle repeats, and every tile begins at a multiple
static_assert(kGroups == 2);

template <int kHeadDim>
inline constexpr int kTileBytes = kPageTokens* kHeadDim * static_cast<int>(sizeof(__nv_bfloat16));  // K or V of one page

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

// Online softmax of one page, in place: scores become weights relative to the row's maximum so far. `limit[half]`: keys of the page after the limit
// are masked, relative to this thread's first column.
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

// scores[64 x 64] = q[64 x D] * K^T, or +=.
template <int kHeadDim>
__device__ __forceinline__ void multiply_keys(float (&scores)[8][4], const std::uint32_t (&q)[kHeadDim / 16][4], std::uint32_t keys,
                                              bool accumulate = false) {
#pragma unroll
  for (int step = 0; step < kHeadDim / 16; ++step) {
    // 16 channels are 32 bytes of a row; four such steps are one tile.
    const std::uint32_t address = keys + static_cast<std::uint32_t>(step / 4 * (kPageTokens * kSwizzledRowBytes) + step % 4 * 32);
    multiply_64_keys(scores, q[step], operand(address, 16), accumulate || step > 0);
  }
}

// output[64 x D] += weights[64 x 64] * V; with two parts of V, which lie side by side, the product of both low parts is left out (2^-17 of 2^-9).
template <int kHeadDim, bool kTwoParts>
__device__ __forceinline__ void multiply_values(float (&output)[kHeadDim / 8][4], const Weights& weights, std::uint32_t values) {
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    const auto rows = static_cast<std::uint32_t>(step * 16 * kSwizzledRowBytes);
    const std::uint64_t v = operand(values + rows, kPageTokens * kSwizzledRowBytes);
    multiply_value_rows(output, weights.high[step], v);
    multiply_value_rows(output, weights.low[step], v);
    if constexpr (kTwoParts) {
      multiply_value_rows(output, weights.high[step], operand(values + kTileBytes<kHeadDim> + rows, kPageTokens * kSwizzledRowBytes));
    }
  }
}

// The tile's positions as the kernel has read them.
struct TilePositions {
  std::int32_t rows[kPrefillTileRows];
  std::int32_t last[kGroups], first[kGroups];  // of the rows of each warpgroup; last < 0: none

  // Of all threads; what it writes is visible after it. Rows of the tile that do not exist have no position.
  __device__ __forceinline__ void load(const std::int32_t* positions, const PrefillTile& tile) {
    const int thread = static_cast<int>(threadIdx.x);
    if (thread < kGroups) {
      last[thread] = -1;
      first[thread] = 0x7FFFFFFF;
    }
    __syncthreads();
    if (thread < kPrefillTileRows) {
      const int position = thread < tile.row_count ? positions[tile.row_begin + thread] : -1;
      rows[thread] = position;
      if (position >= 0) {
        atomicMax(&last[thread / kGroupRows], position);
        atomicMin(&first[thread / kGroupRows], position);
      }
    }
    __syncthreads();
  }
};

// What one computing warpgroup (threads 0..127 or 128..255 of the CTA) does: its 64 rows of the tile over pages [first_page, pages). A Ring is where
// pages arrive: wait_for_keys(page) and wait_for_values(page) before keys(page) and values(page) are read, release_keys(page) and
// release_values(page) after. With two parts the low one lies kTileBytes beyond the high one. store(row, position, base, sum, values, half) takes what
// this thread has of a row: values[n][2 * half] and the next are channels 8 n + 2 (lane % 4) and the next.
template <int kHeadDim, bool kTwoParts, class Ring, class Store>
__device__ __forceinline__ void attend(const AttentionPrefillArguments& arguments, const PrefillTile& tile, int head, const TilePositions& positions,
                                       int first_page, int pages, const Ring& ring, const Store& store) {
  const int thread = static_cast<int>(threadIdx.x);
  const int group = uniform(thread / kGroupThreads), warp = thread % kGroupThreads / 32, lane = thread % 32;

  const int rows[2] = {group * kGroupRows + warp * 16 + lane / 4, group * kGroupRows + warp * 16 + lane / 4 + 8};
  const int row_position[2] = {positions.rows[rows[0]], positions.rows[rows[1]]};
  const int own_pages = uniform(min(positions.last[group] < 0 ? 0 : positions.last[group] / kPageTokens + 1, pages)), first = positions.first[group];
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
  if (own_pages > first_page) {
    ring.wait_for_keys(first_page);
    products_begin();
    multiply_keys<kHeadDim>(scores, q, ring.keys(first_page));
    if constexpr (kTwoParts) multiply_keys<kHeadDim>(scores, q, ring.keys(first_page) + kTileBytes<kHeadDim>, true);
    products_commit();
    wait_for_products<0>();
    pin(scores);
    ring.release_keys(first_page);
    page_softmax(first_page);
    split_weights(scores, weights);
    // The scores of page + 1 and the values of `page` are multiplied together, so that the softmax of page + 1 runs beside the latter.
    if (own_pages > first_page + 1) ring.wait_for_keys(first_page + 1);
    ring.wait_for_values(first_page);
    for (int page = first_page; page + 1 < own_pages; ++page) {
      pin(scores);
      pin(output);
      products_begin();
      multiply_keys<kHeadDim>(scores, q, ring.keys(page + 1));
      if constexpr (kTwoParts) multiply_keys<kHeadDim>(scores, q, ring.keys(page + 1) + kTileBytes<kHeadDim>, true);
      products_commit();
      multiply_values<kHeadDim, kTwoParts>(output, weights, ring.values(page));
      products_commit();
      wait_for_products<1>();
      pin(scores);
      ring.release_keys(page + 1);
      page_softmax(page + 1);
      pin(scores);
      // Here rather than at the top: the branch keeps the assembler from moving the wait for the values up before the softmax.
      if (page + 2 < own_pages) ring.wait_for_keys(page + 2);
      wait_for_products<0>();
      pin(output);
      ring.release_values(page);
      // Multiplying by one changes nothing: maxima rise rarely.
      if (__any_sync(~0u, state.rescale[0] != 1.0f || state.rescale[1] != 1.0f)) {
#pragma unroll
        for (int n = 0; n < kHeadDim / 8; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) output[n][i] = __fmul_rn(output[n][i], state.rescale[i / 2]);
        }
      }
      split_weights(scores, weights);
      ring.wait_for_values(page + 1);
    }
    pin(output);
    products_begin();
    multiply_values<kHeadDim, kTwoParts>(output, weights, ring.values(own_pages - 1));
    products_commit();
    wait_for_products<0>();
    pin(output);
    ring.release_values(own_pages - 1);
  }
  // Pages that only the other warpgroup's rows read. Each is waited for, so that a stage is released once for every time it is filled.
  for (int page = max(own_pages, first_page); page < pages; ++page) {
    ring.wait_for_keys(page);
    ring.release_keys(page);
    ring.wait_for_values(page);
    ring.release_values(page);
  }

#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float sum = __fadd_rn(state.sum[half], __shfl_xor_sync(~0u, state.sum[half], 1));
    sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, 2));
    if (row_position[half] >= 0) store(tile.row_begin + rows[half], row_position[half], state.base[half], sum, output, half);
  }
}

// Output of a row that has seen all its keys.
template <int kHeadDim>
__device__ __forceinline__ void write_output(const AttentionPrefillArguments& arguments, int head, int row, float sum,
                                             const float (&values)[kHeadDim / 8][4], int half) {
  const int first = 2 * static_cast<int>(threadIdx.x % 4);
  __nv_bfloat16* target = arguments.output + (static_cast<std::int64_t>(row) * arguments.kv.shape.heads + head) * kHeadDim + first;
#pragma unroll
  for (int n = 0; n < kHeadDim / 8; ++n) {
    *reinterpret_cast<std::uint32_t*>(target + n * 8) = pack_bf16(__fdiv_rn(values[n][2 * half], sum), __fdiv_rn(values[n][2 * half + 1], sum));
  }
}

#endif  // __CUDACC__

}  // namespace loopgauge::optimized
