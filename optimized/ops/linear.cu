// SPDX-License-Identifier: Apache-2.0
#include "optimized/ops/linear.cuh"

#include <string>
#include <type_traits>

#include "optimized/ops/linear_split_k.cuh"
#include "optimized/ops/shared_memory.cuh"
#include "optimized/ops/tensor_core.cuh"
#include "optimized/runtime/cuda_check.hpp"

namespace loopgauge::optimized {
namespace {

constexpr int kDepth = 32;          // K values of one stage: two mma steps
constexpr int kStages = 4;
constexpr int kPaddedDepth = kDepth + 8;  // rows of a stage are 80 bytes apart: eight rows of an ldmatrix touch all 32 banks

__device__ __forceinline__ void copy_or_zero(void* shared, const void* global, bool valid) {
  const auto address = static_cast<std::uint32_t>(__cvta_generic_to_shared(shared));
  const int bytes = valid ? 16 : 0;  // the rest is filled with zeros
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(global), "r"(bytes));
}

__device__ __forceinline__ void load_matrices(std::uint32_t (&r)[4], const Bfloat16* shared) {
  const auto address = static_cast<std::uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address));
}

// A block computes kTileRows x kTileColumns outputs with kWarpRows x kWarpColumns warps. Whatever the tile, an output is the sum of its
// stages in ascending order, each stage two 16-wide products added from zero: the tile is invisible in the bits. Tensor cores truncate what
// they add, so short chains summed by rounded additions keep the error near that of FP32 arithmetic.
template <int kTileRows, int kTileColumns, int kWarpRows, int kWarpColumns, class Output>
__global__ void __launch_bounds__(kWarpRows* kWarpColumns * 32)
    linear_tiles_kernel(const Bfloat16* __restrict__ x, int x_stride, const Bfloat16* __restrict__ weight, Output* __restrict__ y, int rows, int in,
                        int out) {
  constexpr int kThreads = kWarpRows * kWarpColumns * 32;
  constexpr int kFragmentRows = kTileRows / kWarpRows / 16;
  constexpr int kFragmentColumns = kTileColumns / kWarpColumns / 8;
  static_assert(kFragmentRows >= 1 && kFragmentColumns >= 2 && kFragmentColumns % 2 == 0);
  extern __shared__ __align__(16) Bfloat16 stages[];
  Bfloat16* const x_stages = stages;
  Bfloat16* const w_stages = stages + kStages * kTileRows * kPaddedDepth;

  const int row0 = blockIdx.x * kTileRows;
  const int column0 = blockIdx.y * kTileColumns;
  const int steps = (in + kDepth - 1) / kDepth;

  const auto load_stage = [&](int step) {
    const int k0 = step * kDepth;
    Bfloat16* xs = x_stages + (step % kStages) * kTileRows * kPaddedDepth;
    Bfloat16* ws = w_stages + (step % kStages) * kTileColumns * kPaddedDepth;
    constexpr int kChunks = kDepth / 8;
    for (int i = threadIdx.x; i < kTileRows * kChunks; i += kThreads) {
      const int r = i / kChunks, k = i % kChunks * 8;
      const bool valid = row0 + r < rows && k0 + k < in;
      copy_or_zero(xs + r * kPaddedDepth + k, valid ? x + static_cast<std::size_t>(row0 + r) * x_stride + k0 + k : x, valid);
    }
    for (int i = threadIdx.x; i < kTileColumns * kChunks; i += kThreads) {
      const int c = i / kChunks, k = i % kChunks * 8;
      const bool valid = column0 + c < out && k0 + k < in;
      copy_or_zero(ws + c * kPaddedDepth + k, valid ? weight + static_cast<std::size_t>(column0 + c) * in + k0 + k : weight, valid);
    }
  };

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warp_row = warp / kWarpColumns * kFragmentRows * 16;
  const int warp_column = warp % kWarpColumns * kFragmentColumns * 8;
  float sums[kFragmentRows][kFragmentColumns][4] = {};

  for (int step = 0; step < kStages - 1; ++step) {
    if (step < steps) load_stage(step);
    commit_copies();
  }
  for (int step = 0; step < steps; ++step) {
    wait_copies<kStages - 2>();
    __syncthreads();  // stage `step` is visible, and everyone has left the stage that is filled next
    if (step + kStages - 1 < steps) load_stage(step + kStages - 1);
    commit_copies();
    const Bfloat16* xs = x_stages + (step % kStages) * kTileRows * kPaddedDepth;
    const Bfloat16* ws = w_stages + (step % kStages) * kTileColumns * kPaddedDepth;
    std::uint32_t a[kDepth / 16][kFragmentRows][4];
#pragma unroll
    for (int k = 0; k < kDepth; k += 16) {
#pragma unroll
      for (int i = 0; i < kFragmentRows; ++i) {
        load_matrices(a[k / 16][i], xs + (warp_row + i * 16 + lane % 16) * kPaddedDepth + k + lane / 16 * 8);
      }
    }
#pragma unroll
    for (int j = 0; j < kFragmentColumns; j += 2) {
      float parts[2][kFragmentRows][4] = {};
#pragma unroll
      for (int k = 0; k < kDepth; k += 16) {
        std::uint32_t b[4];  // columns j*8..j*8+7: k 0-7, 8-15; columns (j+1)*8..: the same
        load_matrices(b, ws + (warp_column + j * 8 + lane / 16 * 8 + lane % 8) * kPaddedDepth + k + lane / 8 % 2 * 8);
#pragma unroll
        for (int i = 0; i < kFragmentRows; ++i) {
          multiply_add(parts[0][i], a[k / 16][i][0], a[k / 16][i][1], a[k / 16][i][2], a[k / 16][i][3], b[0], b[1]);
          multiply_add(parts[1][i], a[k / 16][i][0], a[k / 16][i][1], a[k / 16][i][2], a[k / 16][i][3], b[2], b[3]);
        }
      }
#pragma unroll
      for (int i = 0; i < kFragmentRows; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          sums[i][j][e] = __fadd_rn(sums[i][j][e], parts[0][i][e]);
          sums[i][j + 1][e] = __fadd_rn(sums[i][j + 1][e], parts[1][i][e]);
        }
      }
    }
  }
  wait_copies<0>();

#pragma unroll
  for (int i = 0; i < kFragmentRows; ++i) {
#pragma unroll
    for (int j = 0; j < kFragmentColumns; ++j) {
      const int column = column0 + warp_column + j * 8 + lane % 4 * 2;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = row0 + warp_row + i * 16 + lane / 4 + half * 8;
        if (row >= rows || column >= out) continue;  // out is even, so a pair is wholly inside or outside
        Output* target = y + static_cast<std::size_t>(row) * out + column;
        if constexpr (std::is_same_v<Output, float>) {
          *reinterpret_cast<float2*>(target) = make_float2(sums[i][j][half * 2], sums[i][j][half * 2 + 1]);
        } else {
          *reinterpret_cast<__nv_bfloat162*>(target) = __nv_bfloat162(to_bfloat16(sums[i][j][half * 2]), to_bfloat16(sums[i][j][half * 2 + 1]));
        }
      }
    }
  }
}

template <int kTileRows, int kTileColumns, int kWarpRows, int kWarpColumns, class Output>
void launch_tiles(const Bfloat16* x, int x_stride, const Bfloat16* weight, Output* y, int rows, int in, int out, cudaStream_t stream) {
  constexpr std::size_t kBytes = kStages * (kTileRows + kTileColumns) * kPaddedDepth * sizeof(Bfloat16);
  const auto kernel = linear_tiles_kernel<kTileRows, kTileColumns, kWarpRows, kWarpColumns, Output>;
  LOOPGAUGE_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kBytes)));
  const dim3 grid((rows + kTileRows - 1) / kTileRows, (out + kTileColumns - 1) / kTileColumns);
  kernel<<<grid, kWarpRows * kWarpColumns * 32, kBytes, stream>>>(x, x_stride, weight, y, rows, in, out);
  LOOPGAUGE_CUDA_CHECK_LAUNCH("linear");
}

template <class Output>
void linear_any(CublasLt& library, LinearImplementation implementation, const Bfloat16* x, int x_stride, const Bfloat16* weight, Output* y, int rows,
                int in, int out, cudaStream_t stream) {
  constexpr bool kFloat = std::is_same_v<Output, float>;
  if (in % 8 != 0 || x_stride % 8 != 0 || out % (kFloat ? 4 : 8) != 0) {
    throw UnsupportedError("linear: " + std::to_string(in) + " inputs and " + std::to_string(out) + " outputs are not multiples of 8");
  }
  if (rows == 0) return;
  const LinearImplementation chosen = resolve(implementation, in, out);
  if (chosen == LinearImplementation::split_k) {
    linear_split_k(x, x_stride, weight, y, rows, in, out, stream);
  } else if (chosen == LinearImplementation::library) {
    library.multiply(x, x_stride, weight, y, kFloat ? CUDA_R_32F : CUDA_R_16BF, rows, in, out, stream);
  } else if (rows <= 16) {
    launch_tiles<16, 64, 1, 4>(x, x_stride, weight, y, rows, in, out, stream);
  } else if (rows <= 64) {
    launch_tiles<32, 64, 2, 2>(x, x_stride, weight, y, rows, in, out, stream);
  } else {
    launch_tiles<128, 128, 2, 4>(x, x_stride, weight, y, rows, in, out, stream);
  }
}

}  // namespace

std::string_view to_string(LinearImplementation implementation) {
  switch (implementation) {
    case LinearImplementation::automatic: return "automatic";
    case LinearImplementation::library: return "library";
    case LinearImplementation::tensor_core_tiles: return "tensor_core_tiles";
    case LinearImplementation::split_k: return "split_k";
  }
  return "unknown";
}

LinearImplementation resolve(LinearImplementation implementation, int in, int out) {
  if (implementation != LinearImplementation::automatic) return implementation;
  // The library's rows were measured to be independent of their number at the extents of Ouro-1.4B, where its speed counts; the own
  // kernels' are by construction.
  constexpr int kMeasured = 2048;
  return in >= kMeasured && out >= kMeasured ? LinearImplementation::library : LinearImplementation::tensor_core_tiles;
}

void linear(CublasLt& library, LinearImplementation implementation, const Bfloat16* x, int x_stride, const Bfloat16* weight, Bfloat16* y,
            int rows, int in, int out, cudaStream_t stream) {
  linear_any(library, implementation, x, x_stride, weight, y, rows, in, out, stream);
}

void linear(CublasLt& library, LinearImplementation implementation, const Bfloat16* x, int x_stride, const Bfloat16* weight, float* y, int rows,
            int in, int out, cudaStream_t stream) {
  linear_any(library, implementation, x, x_stride, weight, y, rows, in, out, stream);
}

}  // namespace loopgauge::optimized
