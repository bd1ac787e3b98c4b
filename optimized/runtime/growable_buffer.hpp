// SPDX-License-Identifier: Apache-2.0
// A device array that grows when more is asked for. Its content is lost when it grows.
#pragma once

#include <cuda_runtime_api.h>

#include <span>

#include "optimized/runtime/cuda_check.hpp"
#include "optimized/runtime/device_allocator.hpp"

namespace loopgauge::optimized {

class GrowableBuffer {
 public:
  GrowableBuffer(DeviceAllocator& allocator, MemoryCategory category) : allocator_(allocator), category_(category) {}

  // Room for `count` elements. Freeing the smaller array waits for the device, so work in flight keeps what it reads.
  template <class T>
  T* reserve(std::size_t count) {
    if (buffer_.size_bytes() < count * sizeof(T)) {
      buffer_.reset();
      buffer_ = allocator_.allocate_array<T>(category_, count);
    }
    return buffer_.as<T>();
  }

  // Copies host values to the start of the array, ordered on `stream`. The source is pageable and may change once this returns.
  template <class T>
  T* upload(std::span<const T> values, cudaStream_t stream) {
    T* target = reserve<T>(values.size());
    if (!values.empty()) LOOPGAUGE_CUDA_CHECK(cudaMemcpyAsync(target, values.data(), values.size_bytes(), cudaMemcpyHostToDevice, stream));
    return target;
  }

  template <class T>
  T* as() { return buffer_.as<T>(); }
  void* data() { return buffer_.data(); }

 private:
  DeviceAllocator& allocator_;
  MemoryCategory category_;
  DeviceBuffer buffer_;
};

}  // namespace loopgauge::optimized
