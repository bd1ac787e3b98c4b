// SPDX-License-Identifier: Apache-2.0
// Data for measurements, made on the device, and the read that measures the memory ceiling.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "optimized/ops/numeric.cuh"

namespace loopgauge::optimized {

// Uniform BF16 values in [-scale, scale) from an integer hash of (index, seed): never zeros, which would run faster than real data.
void fill_random(Bfloat16* values, std::size_t count, std::uint32_t seed, float scale, cudaStream_t stream);

// Reads `bytes` (a multiple of 16) with 16-byte loads in a grid-stride loop and writes their XOR to `result`.
void read_all(const void* data, std::size_t bytes, std::uint32_t* result, cudaStream_t stream);

}  // namespace loopgauge::optimized
