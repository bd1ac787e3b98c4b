// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "optimized/ops/numeric.cuh"
#include "optimized/ops/tensor_core.cuh"

namespace loopgauge::optimized {

// The cosine and sine of every (position, channel pair), as BF16 bit patterns made on the host: cos and sin are the one use of libm.
// S-ROPE-1..3: inv_freq = RN32(theta^(-2i/D)) from double; angle = RN32(pos * inv_freq); cos, sin in double, RN32, then bf16.
struct RopeTable {
  std::vector<std::uint16_t> cosine;  // [positions, head_dim / 2]
  std::vector<std::uint16_t> sine;    // [positions, head_dim / 2]
};
RopeTable make_rope_table(int positions, int head_dim, double theta);

// Specification clause and reference counterpart: S-ROPE-4; reference/ops/rope.
// Shapes and layouts: rows of `row_stride` BF16 values, the first heads * head_dim of each are rotated in place;
//   positions [rows] int32; cosine, sine [positions, head_dim / 2] BF16. All on the device.
// Requires: head_dim % 16 == 0; 16-byte aligned rows; 0 <= positions[i] < the table's positions.
// Numerics: bit-exact: bf16(x * cos), bf16(rot(x) * sin), bf16(sum), half rotation.
// Determinism: element-wise.
// Launch: one block of 128 threads a row; a thread rotates eight pairs at a time.
// Traffic: reads and writes the rotated part of each row once.
void rope(Bfloat16* values, std::int64_t row_stride, const std::int32_t* positions, const Bfloat16* cosine, const Bfloat16* sine, int rows,
          int heads, int head_dim, cudaStream_t stream);

#ifdef __CUDACC__

// Eight neighbouring channels of the lower half of a head and their partners in the upper half.
__device__ __forceinline__ void rotate_channels(uint4& low, uint4& high, const uint4& cosine, const uint4& sine) {
  const auto rotate = [](std::uint32_t& a, std::uint32_t& b, std::uint32_t c, std::uint32_t s) {
    const std::uint32_t ac = pack_bf16(__fmul_rn(low_value(a), low_value(c)), __fmul_rn(high_value(a), high_value(c)));
    const std::uint32_t bs = pack_bf16(__fmul_rn(-low_value(b), low_value(s)), __fmul_rn(-high_value(b), high_value(s)));
    const std::uint32_t bc = pack_bf16(__fmul_rn(low_value(b), low_value(c)), __fmul_rn(high_value(b), high_value(c)));
    const std::uint32_t as = pack_bf16(__fmul_rn(low_value(a), low_value(s)), __fmul_rn(high_value(a), high_value(s)));
    a = pack_bf16(__fadd_rn(low_value(ac), low_value(bs)), __fadd_rn(high_value(ac), high_value(bs)));
    b = pack_bf16(__fadd_rn(low_value(bc), low_value(as)), __fadd_rn(high_value(bc), high_value(as)));
  };
  rotate(low.x, high.x, cosine.x, sine.x);
  rotate(low.y, high.y, cosine.y, sine.y);
  rotate(low.z, high.z, cosine.z, sine.z);
  rotate(low.w, high.w, cosine.w, sine.w);
}

#endif  // __CUDACC__

}  // namespace loopgauge::optimized
