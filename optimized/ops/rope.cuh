// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "optimized/ops/numeric.cuh"

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
// Requires: head_dim even; 0 <= positions[i] < the table's positions.
// Numerics: bit-exact: bf16(x * cos), bf16(rot(x) * sin), bf16(sum), half rotation.
// Determinism: element-wise.
// Launch: one block a row; a thread rotates one pair.
// Traffic: reads and writes the rotated part of each row once.
void rope(Bfloat16* values, std::int64_t row_stride, const std::int32_t* positions, const Bfloat16* cosine, const Bfloat16* sine, int rows,
          int heads, int head_dim, cudaStream_t stream);

}  // namespace loopgauge::optimized
