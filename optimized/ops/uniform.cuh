// SPDX-License-Identifier: Apache-2.0
// What a warp has in common, said to the compiler.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace loopgauge::optimized {

#ifdef __CUDACC__

// A value that every lane of a converged warp holds, which the compiler does not see of what was loaded or is a number of a warp: it would guard every
// exchange of a warp behind a branch on it, and keep it out of uniform registers, where the operands of warpgroup products are wanted.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(~0u, value, 0); }
template <class T>
__device__ __forceinline__ T uniform(const T& value) {
  static_assert(sizeof(T) % 4 == 0 && std::is_trivially_copyable_v<T>);
  T result;
#pragma unroll
  for (std::size_t i = 0; i < sizeof(T) / 4; ++i) {
    reinterpret_cast<std::uint32_t*>(&result)[i] = __shfl_sync(~0u, reinterpret_cast<const std::uint32_t*>(&value)[i], 0);
  }
  return result;
}

#endif  // __CUDACC__

}  // namespace loopgauge::optimized
