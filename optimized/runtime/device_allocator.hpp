// SPDX-License-Identifier: Apache-2.0
// Device memory: owned by buffers, tagged by category, counted exactly.
#pragma once

#include <array>
#include <cstddef>
#include <functional>
#include <limits>
#include <memory>
#include <utility>

#include "models/memory_category.hpp"

namespace loopgauge::optimized {

// Declared, not included: this file is read where no CUDA toolkit is.
class Stream;

using BytesByCategory = std::array<std::size_t, kMemoryCategories>;

namespace detail {
struct AllocatorState;
}

// One device allocation, freed with the buffer. Movable, not copyable. An empty buffer has data() == nullptr and size 0.
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  DeviceBuffer(DeviceBuffer&& other) noexcept;
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept;
  ~DeviceBuffer() { reset(); }

  void* data() { return data_; }
  const void* data() const { return data_; }
  template <class T>
  T* as() { return static_cast<T*>(data_); }
  template <class T>
  const T* as() const { return static_cast<const T*>(data_); }
  std::size_t size_bytes() const { return bytes_; }
  MemoryCategory category() const { return category_; }
  explicit operator bool() const { return data_ != nullptr; }

  // Frees now. Stream-ordered: once the work that the allocator's stream holds is done, without waiting for it. Else cudaFree, which waits
  // for the whole device.
  void reset() noexcept;

 private:
  friend class DeviceAllocator;
  DeviceBuffer(std::shared_ptr<detail::AllocatorState> state, void* data, std::size_t bytes, MemoryCategory category, bool ordered)
      : state_(std::move(state)), data_(data), bytes_(bytes), category_(category), ordered_(ordered) {}

  std::shared_ptr<detail::AllocatorState> state_;
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
  MemoryCategory category_ = MemoryCategory::workspace;
  bool ordered_ = false;
};

// Part of a buffer; not owned.
struct DeviceRange {
  void* data = nullptr;
  std::size_t bytes = 0;
};

struct MemoryUsage {
  BytesByCategory in_use{};      // bytes of live buffers now, as requested
  BytesByCategory peak{};        // largest in_use of each category since the last reset_peak()
  std::size_t total_in_use = 0;
  std::size_t total_peak = 0;    // largest total; at most the sum of the per-category peaks
  std::size_t live_buffers = 0;
};

struct AllocatorOptions {
  std::size_t limit_bytes = std::numeric_limits<std::size_t>::max();  // total of live bytes that may not be exceeded
  bool poison = false;  // fill fresh buffers with 0xFF (NaN as BF16, FP16 and FP32), so that reading unwritten memory shows
  bool host_memory = false;  // plain host memory: bookkeeping can then be tested where there is no device
  // Memory comes from a pool of the allocator's own, in the order of its own stream(), on which all work with its buffers must be: neither
  // allocating nor freeing waits for the device, so executors that share a device do not wait for each other.
  bool stream_ordered = false;
};

// Called with the bytes that are missing when an allocation does not fit. Gives memory back and returns true when that may be enough;
// otherwise keeps what it has. It must not allocate.
using MemoryPressureHandler = std::function<bool(std::size_t missing_bytes)>;

// Allocates on the current device, with cudaMalloc or in stream order (AllocatorOptions); results are at least 256-byte aligned. Buffers may outlive the allocator object.
// What does not fit is tried once more after all pools of the process have given back what they keep, and again after the pressure handler, if there is one,
// has given memory back.
// Not thread-safe: one owner per executor.
class DeviceAllocator {
 public:
  explicit DeviceAllocator(AllocatorOptions options = {});

  // bytes == 0 gives an empty buffer. Throws DeviceMemoryError naming category, bytes asked, bytes in use and what the device has
  // left; nothing changes then but what the pressure handler has given back.
  DeviceBuffer allocate(MemoryCategory category, std::size_t bytes);
  template <class T>
  DeviceBuffer allocate_array(MemoryCategory category, std::size_t count) { return allocate(category, count * sizeof(T)); }

  // The same with cudaMalloc whatever the allocator's order: memory that other devices and processes can be given.
  DeviceBuffer allocate_shareable(MemoryCategory category, std::size_t bytes);

  // The stream of a stream-ordered allocator. It lives as long as the allocator or a buffer does.
  const Stream& stream() const;

  void on_pressure(MemoryPressureHandler handler);  // replaces the former one; empty: none

  MemoryUsage usage() const;
  void reset_peak();

 private:
  DeviceBuffer allocate(MemoryCategory category, std::size_t bytes, bool ordered);

  std::shared_ptr<detail::AllocatorState> state_;
};

// Bytes that the memory pools of this process keep of a device without a buffer in them: taken, but there for the next buffers of any allocator. Frees count once
// the stream has reached them.
std::size_t kept_bytes(int device);

}  // namespace loopgauge::optimized
