// SPDX-License-Identifier: Apache-2.0
#include "optimized/ops/swiglu.cuh"

#include <limits>

#include "optimized/ops/elementary.cuh"
#include "optimized/runtime/cuda_check.hpp"

namespace loopgauge::optimized {
namespace {

// The specification's sequence in binary64: half the rate of binary32 here, and about sixty operations.
__device__ __noinline__ Bfloat16 silu_by_definition(float x) { return to_bfloat16(silu_binary32(x)); }

// The same bits. For BF16 x with 2^-64 <= |x| <= 64 binary32 comes within 10 spacings of silu(x), which decides the BF16 value wherever the
// boundary between two of them is further away: for all but one x in a thousand.
__device__ __forceinline__ Bfloat16 silu_bfloat16(float x) {
  constexpr float kLog2eHigh = 0x1.7154p+0f;       // 15 bits: its product with the 8 bits of x is exact
  constexpr float kLowTimesLn2 = 0x1.480fb6p-18f;  // (log2(e) - high) * ln(2): e^-x = 2^(-x high) * e^(-x low ln 2)
  constexpr int kDoubtful = 32;                    // spacings of binary32
  const float magnitude = fabsf(x);
  if (!(magnitude >= 0x1p-64f && magnitude <= 64.0f)) return silu_by_definition(x);  // NaN too
  float power, reciprocal;
  // Relative errors: 2^-22; the neglected square of |x low ln 2| < 2^-11, below 2^-23; 2^-23.
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(__fmul_rn(-x, kLog2eHigh)));
  const float exponential = __fmaf_rn(power, __fmul_rn(-x, kLowTimesLn2), power);
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(__fadd_rn(1.0f, exponential)));
  const float value = __fmul_rn(x, reciprocal);
  const int beyond_boundary = static_cast<int>(__float_as_uint(value) & 0xFFFFu) - 0x8000;
  if (beyond_boundary >= -kDoubtful && beyond_boundary <= kDoubtful) return silu_by_definition(x);
  return to_bfloat16(value);
}

__global__ void __launch_bounds__(256) swiglu_kernel(const uint4* __restrict__ gate_up, uint4* __restrict__ output, std::uint32_t count,
                                                     std::uint32_t row_chunks) {
  const std::uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const std::uint32_t row = i / row_chunks;
  const std::size_t gate_chunk = static_cast<std::size_t>(row) * row_chunks + i;  // 2 * row * row_chunks + i % row_chunks
  union {
    uint4 vector;
    Bfloat16 values[8];
  } gate, up;
  gate.vector = gate_up[gate_chunk];
  up.vector = gate_up[gate_chunk + row_chunks];
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    const Bfloat16 activated = silu_bfloat16(to_float(gate.values[k]));
    gate.values[k] = to_bfloat16(__fmul_rn(to_float(activated), to_float(up.values[k])));
  }
  output[i] = gate.vector;
}

}  // namespace

void swiglu(const Bfloat16* gate_up, Bfloat16* output, int rows, int intermediate, cudaStream_t stream) {
  if (intermediate % 8 != 0) throw UnsupportedError("swiglu: intermediate is not a multiple of 8");
  if (rows == 0) return;
  const int row_chunks = intermediate / 8;
  const std::size_t count = static_cast<std::size_t>(rows) * static_cast<std::size_t>(row_chunks);
  if (count > std::numeric_limits<std::uint32_t>::max() - 256) throw UnsupportedError("swiglu: more than 2^32 chunks of 8 values");
  swiglu_kernel<<<static_cast<unsigned>((count + 255) / 256), 256, 0, stream>>>(
      reinterpret_cast<const uint4*>(gate_up), reinterpret_cast<uint4*>(output), static_cast<std::uint32_t>(count), static_cast<std::uint32_t>(row_chunks));
  LOOPGAUGE_CUDA_CHECK_LAUNCH("swiglu");
}

}  // namespace loopgauge::optimized
