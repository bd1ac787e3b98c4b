// SPDX-License-Identifier: Apache-2.0
// The tensor-core step, its operands, and the asynchronous copies that the matrix products share.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "optimized/ops/numeric.cuh"

namespace loopgauge::optimized {

#ifdef __CUDACC__

// c += a b over 16 K values: a [16, 16] and b [16, 8] BF16 in the fragment layout of mma.m16n8k16, c [16, 8] FP32.
__device__ __forceinline__ void multiply_add(float (&c)[4], std::uint32_t a0, std::uint32_t a1, std::uint32_t a2, std::uint32_t a3, std::uint32_t b0,
                                             std::uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ std::uint32_t pack_bf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const std::uint32_t*>(&pair);
}
// x = high + low + error, |error| <= 2^-17 |x|.
__device__ __forceinline__ void split_bf16(float x, float y, std::uint32_t& high, std::uint32_t& low) {
  high = pack_bf16(x, y);
  low = pack_bf16(__fsub_rn(x, low_value(high)), __fsub_rn(y, high_value(high)));
}

// 16 bytes from global to shared memory, past the first-level cache; both 16-byte aligned.
__device__ __forceinline__ void copy_async(std::uint32_t shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(global));
}

#endif  // __CUDACC__

}  // namespace loopgauge::optimized
