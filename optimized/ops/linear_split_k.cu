// SPDX-License-Identifier: Apache-2.0
#include "optimized/ops/linear_split_k.cuh"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "optimized/ops/tensor_core.cuh"
#include "optimized/runtime/cuda_check.hpp"

namespace loopgauge::optimized {
namespace {

constexpr int kWarps = 8;          // shares of K
constexpr int kThreads = kWarps * 32;
constexpr int kChunk = 32;         // K values of one rounded addition: two tensor-core steps
constexpr int kFragmentOutputs = 16, kFragmentRows = 8;  // of mma.m16n8k16, weights as its A and rows as its B
constexpr int kMostRows = 64;
constexpr int kManyRowFragments = 4;  // from here on rows are requested a chunk ahead

// Weights are read once: they need not stay in the first-level cache, where the rows are.
__device__ __forceinline__ uint4 load_once(const Bfloat16* address) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(address));
  return v;
}

// A block computes kOutputFragments * 16 outputs of kRowFragments * 8 rows. Neither shows in the bits: an output's order of additions depends
// on `in` alone.
//
// Which K value sits in which slot of a tensor-core step is free as long as both operands agree. Thread t of four takes the eight neighbours
// [8 t, 8 t + 8) of a 32-wide chunk, one 16-byte load for each of its weight rows and of its rows: values 0-3 fill its slots of the first step,
// values 4-7 those of the second.
template <int kOutputFragments, int kRowFragments, int kUnroll, class Output>
__global__ void __launch_bounds__(kThreads)
    linear_split_k_kernel(const Bfloat16* __restrict__ x, int x_stride, const Bfloat16* __restrict__ weight, Output* __restrict__ y, int rows, int in,
                          int out) {
  constexpr int kBlockOutputs = kOutputFragments * kFragmentOutputs;
  __shared__ float shares[kWarps][kFragmentRows][kBlockOutputs + 1];  // of one row fragment at a time

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, quarter = lane % 4;
  const int output0 = blockIdx.x * kBlockOutputs;
  const int chunks = (in + kChunk - 1) / kChunk;
  const int begin = chunks * warp / kWarps, end = chunks * (warp + 1) / kWarps;
  const uint4 zero = make_uint4(0, 0, 0, 0);

  float sums[kOutputFragments][kRowFragments][4] = {};
  const auto load_weights = [&](uint4(&w)[kOutputFragments][2], int chunk) {
    const int k = chunk * kChunk + quarter * 8;
    const bool inside = chunk < end && k < in;
#pragma unroll
    for (int o = 0; o < kOutputFragments; ++o) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int output = output0 + o * kFragmentOutputs + half * 8 + group;
        w[o][half] = inside && output < out ? load_once(weight + static_cast<std::size_t>(output) * in + k) : zero;
      }
    }
  };
  const auto load_row = [&](int r, int chunk) {
    const int k = chunk * kChunk + quarter * 8, row = r * kFragmentRows + group;
    return chunk < end && k < in && row < rows ? __ldg(reinterpret_cast<const uint4*>(x + static_cast<std::size_t>(row) * x_stride + k)) : zero;
  };
  const auto add_chunk = [&](const uint4(&w)[kOutputFragments][2], const uint4& v, int r) {
#pragma unroll
    for (int o = 0; o < kOutputFragments; ++o) {
      const uint4 &low = w[o][0], &high = w[o][1];
      float part[4] = {};
      multiply_add(part, low.x, high.x, low.y, high.y, v.x, v.y);
      multiply_add(part, low.z, high.z, low.w, high.w, v.z, v.w);
#pragma unroll
      for (int e = 0; e < 4; ++e) sums[o][r][e] = __fadd_rn(sums[o][r][e], part[e]);
    }
  };
  if constexpr (kRowFragments >= kManyRowFragments) {
    // The rows outweigh the weights: both of the next chunk are on their way while this one is multiplied.
    uint4 next_weights[kOutputFragments][2], next_rows[kRowFragments];
    const auto load = [&](int chunk) {
      load_weights(next_weights, chunk);
#pragma unroll
      for (int r = 0; r < kRowFragments; ++r) next_rows[r] = load_row(r, chunk);
    };
    load(begin);
    for (int chunk = begin; chunk < end; ++chunk) {
      uint4 w[kOutputFragments][2], v[kRowFragments];
#pragma unroll
      for (int o = 0; o < kOutputFragments; ++o) {
        w[o][0] = next_weights[o][0];
        w[o][1] = next_weights[o][1];
      }
#pragma unroll
      for (int r = 0; r < kRowFragments; ++r) v[r] = next_rows[r];
      load(chunk + 1);
#pragma unroll
      for (int r = 0; r < kRowFragments; ++r) add_chunk(w, v[r], r);
    }
  } else {
    for (int first = begin; first < end; first += kUnroll) {
      uint4 w[kUnroll][kOutputFragments][2];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) load_weights(w[u], first + u);
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (first + u >= end) break;
#pragma unroll
        for (int r = 0; r < kRowFragments; ++r) add_chunk(w[u], load_row(r, first + u), r);
      }
    }
  }

#pragma unroll
  for (int r = 0; r < kRowFragments; ++r) {
    if (r * kFragmentRows >= rows) break;
    if (r > 0) __syncthreads();  // the fragment before has been read
#pragma unroll
    for (int o = 0; o < kOutputFragments; ++o) {
#pragma unroll
      for (int e = 0; e < 4; ++e) shares[warp][quarter * 2 + e % 2][o * kFragmentOutputs + e / 2 * 8 + group] = sums[o][r][e];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < kFragmentRows * kBlockOutputs; i += kThreads) {
      const int row = r * kFragmentRows + i / kBlockOutputs, output = output0 + i % kBlockOutputs;
      if (row >= rows || output >= out) continue;
      float sum = shares[0][i / kBlockOutputs][i % kBlockOutputs];
#pragma unroll
      for (int share = 1; share < kWarps; ++share) sum = __fadd_rn(sum, shares[share][i / kBlockOutputs][i % kBlockOutputs]);
      Output* target = y + static_cast<std::size_t>(row) * out + output;
      if constexpr (std::is_same_v<Output, float>) {
        *target = sum;
      } else {
        *target = to_bfloat16(sum);
      }
    }
  }
}

template <int kOutputFragments, int kRowFragments, int kUnroll, class Output>
void launch(const Bfloat16* x, int x_stride, const Bfloat16* weight, Output* y, int rows, int in, int out, cudaStream_t stream) {
  constexpr int kBlockOutputs = kOutputFragments * kFragmentOutputs;
  linear_split_k_kernel<kOutputFragments, kRowFragments, kUnroll>
      <<<(out + kBlockOutputs - 1) / kBlockOutputs, kThreads, 0, stream>>>(x, x_stride, weight, y, rows, in, out);
  LOOPGAUGE_CUDA_CHECK_LAUNCH("linear_split_k");
}

// Few outputs in smaller pieces, so that there are blocks for all multiprocessors.
template <int kRowFragments, class Output>
void launch_many(const Bfloat16* x, int x_stride, const Bfloat16* weight, Output* y, int rows, int in, int out, cudaStream_t stream) {
  constexpr int kMultiprocessors = 132;
  if (out <= kMultiprocessors * kFragmentOutputs) launch<1, kRowFragments, 1>(x, x_stride, weight, y, rows, in, out, stream);
  else launch<2, kRowFragments, 1>(x, x_stride, weight, y, rows, in, out, stream);
}

template <class Output>
void split_k(const Bfloat16* x, int x_stride, const Bfloat16* weight, Output* y, int rows, int in, int out, cudaStream_t stream) {
  for (int row = 0; row < rows; row += kMostRows) {
    const int count = std::min(kMostRows, rows - row);
    const Bfloat16* const from = x + static_cast<std::size_t>(row) * x_stride;
    Output* const to = y + static_cast<std::size_t>(row) * out;
    if (count <= 8) {
      launch<1, 1, 8>(from, x_stride, weight, to, count, in, out, stream);
    } else if (count <= 16) {
      launch<1, 2, 8>(from, x_stride, weight, to, count, in, out, stream);
    } else if (count <= 32) {
      launch_many<4>(from, x_stride, weight, to, count, in, out, stream);
    } else {
      launch_many<8>(from, x_stride, weight, to, count, in, out, stream);
    }
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
