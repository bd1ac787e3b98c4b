// SPDX-License-Identifier: Apache-2.0
// A device array that grows when more is asked for. Its content is lost when it grows, and the array with it where there is no room.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <span>

#include "optimized/runtime/cuda_check.hpp"
#include "optimized/runtime/device_allocator.hpp"
#include "optimized/runtime/pinned_arena.hpp"

namespace loopgauge::optimized {

class GrowableBuffer {
 public:
  GrowableBuffer(DeviceAllocator& allocator, MemoryCategory category) : allocator_(allocator), category_(category) {}

  // Room for `count` elements. The smaller array is freed after the work in flight that reads it (DeviceBuffer::reset).
  template <class T>
  T* reserve(std::size_t count) {
    if (buffer_.size_bytes() < count * sizeof(T)) {
      buffer_.reset();
      ++growths_;  // also where no room is found: what was there is gone
      buffer_ = allocator_.allocate_array<T>(category_, count);
    }
    return buffer_.as<T>();
  }

  // Copies host values to the start of the array, ordered on `stream`, by way of the arena: the host never waits.
  template <class T>
  T* upload(std::span<const T> values, PinnedArena& arena, cudaStream_t stream) {
    T* target = reserve<T>(values.size());
    copy_to_device(target, values, arena, stream);
    return target;
  }

  // The same from pageable memory, which may change once this returns; the host may wait.
  template <class T>
  T* upload(std::span<const T> values, cudaStream_t stream) {
    T* target = reserve<T>(values.size());
    if (!values.empty()) LOOPGAUGE_CUDA_CHECK(cudaMemcpyAsync(target, values.data(), values.size_bytes(), cudaMemcpyHostToDevice, stream));
    return target;
  }

  // Changes when addresses do: a captured graph that uses the array is void then.
  std::uint64_t growths() const { return growths_; }

  template <class T>
  T* as() { return buffer_.as<T>(); }
  void* data() { return buffer_.data(); }

 private:
  DeviceAllocator& allocator_;
  MemoryCategory category_;
  DeviceBuffer buffer_;
  std::uint64_t growths_ = 0;
};

}  // namespace loopgauge::optimized
