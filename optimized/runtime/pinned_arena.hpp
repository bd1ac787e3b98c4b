// SPDX-License-Identifier: Apache-2.0
// Page-locked host memory for what one submission sends to the device and gets back: copies from and to it never wait for the host.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <vector>

#include "optimized/runtime/cuda_check.hpp"
#include "optimized/runtime/stream.hpp"

namespace loopgauge::optimized {

// Hands out ranges that stay valid and untouched until reset(), which must come after the work that uses them. Keeps its memory.
class PinnedArena {
 public:
  template <class T>
  T* take(std::size_t count) {
    return static_cast<T*>(take_bytes(count * sizeof(T)));
  }

  // A copy of `values` that may be read by the device at any time before reset().
  template <class T>
  const T* stage(std::span<const T> values) {
    T* copy = take<T>(values.size());
    std::copy(values.begin(), values.end(), copy);
    return copy;
  }

  void reset() { block_ = used_ = 0; }

 private:
  static constexpr std::size_t kAlignment = 64, kSmallestBlock = 1 << 18;

  void* take_bytes(std::size_t bytes) {
    const std::size_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    while (block_ < blocks_.size() && used_ + rounded > blocks_[block_].size_bytes()) {
      ++block_;
      used_ = 0;
    }
    if (block_ == blocks_.size()) blocks_.emplace_back(std::max(rounded, kSmallestBlock));
    std::byte* start = blocks_[block_].as<std::byte>() + used_;
    used_ += rounded;
    return start;
  }

  std::vector<PinnedBuffer> blocks_;
  std::size_t block_ = 0, used_ = 0;
};

// Copies host values to `target` in stream order; the source is the arena's copy.
template <class T>
void copy_to_device(T* target, std::span<const T> values, PinnedArena& arena, cudaStream_t stream) {
  if (values.empty()) return;
  LOOPGAUGE_CUDA_CHECK(cudaMemcpyAsync(target, arena.stage(values), values.size_bytes(), cudaMemcpyHostToDevice, stream));
}

}  // namespace loopgauge::optimized
