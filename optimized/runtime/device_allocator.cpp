// SPDX-License-Identifier: Apache-2.0
#include "optimized/runtime/device_allocator.hpp"

#include <algorithm>
#include <cstring>
#include <cstdint>
#include <mutex>
#include <new>
#include <optional>
#include <string>
#include <vector>

#include "models/error.hpp"
#include "optimized/runtime/cuda_check.hpp"
#include "optimized/runtime/stream.hpp"

namespace loopgauge::optimized {

namespace {

// What a pool keeps for its next buffers once it is free, as a share of the device's memory; the rest goes back to the device. Taking the BF16 pages of an 8K prompt
// of Ouro-1.4B from the device again and giving them back takes 10 ms. Other pools and allocations of this process get what is kept when they need it, other
// processes do not.
constexpr std::uint64_t kKeptShare = 4;

struct PoolOfDevice {
  int device;
  cudaMemPool_t pool;
};

// Every live pool of the process.
struct Pools {
  std::mutex mutex;
  std::vector<PoolOfDevice> live;
};
Pools& pools() {
  static Pools all;
  return all;
}

std::uint64_t attribute(cudaMemPool_t pool, cudaMemPoolAttr which) {
  std::uint64_t value = 0;
  LOOPGAUGE_CUDA_CHECK(cudaMemPoolGetAttribute(pool, which, &value));
  return value;
}

// A memory pool of the current device, and the stream in whose order it hands out memory.
class OrderedPool {
 public:
  OrderedPool() {
    cudaMemPoolProps properties{};
    properties.allocType = cudaMemAllocationTypePinned;
    properties.location.type = cudaMemLocationTypeDevice;
    LOOPGAUGE_CUDA_CHECK(cudaGetDevice(&properties.location.id));
    std::size_t free_bytes = 0, total_bytes = 0;
    LOOPGAUGE_CUDA_CHECK(cudaMemGetInfo(&free_bytes, &total_bytes));
    LOOPGAUGE_CUDA_CHECK(cudaMemPoolCreate(&pool_, &properties));
    std::uint64_t kept = total_bytes / kKeptShare;
    LOOPGAUGE_CUDA_CHECK(cudaMemPoolSetAttribute(pool_, cudaMemPoolAttrReleaseThreshold, &kept));
    const std::lock_guard lock(pools().mutex);
    pools().live.push_back({properties.location.id, pool_});
  }
  ~OrderedPool() {
    {
      const std::lock_guard lock(pools().mutex);
      std::erase_if(pools().live, [&](const PoolOfDevice& other) { return other.pool == pool_; });
    }
    // Destruction waits for nothing: the driver releases the pool once the frees that the stream holds have happened.
    static_cast<void>(cudaMemPoolDestroy(pool_));
  }
  OrderedPool(const OrderedPool&) = delete;
  OrderedPool& operator=(const OrderedPool&) = delete;

  cudaMemPool_t pool() const { return pool_; }
  const Stream& stream() const { return stream_; }

 private:
  Stream stream_;
  cudaMemPool_t pool_ = nullptr;
};

// Gives what the pools of the current device keep back to it.
void release_kept() {
  int device = 0;
  LOOPGAUGE_CUDA_CHECK(cudaGetDevice(&device));
  const std::lock_guard lock(pools().mutex);
  for (const PoolOfDevice& each : pools().live) {
    if (each.device == device) LOOPGAUGE_CUDA_CHECK(cudaMemPoolTrimTo(each.pool, 0));
  }
}

}  // namespace

namespace detail {
struct AllocatorState {
  AllocatorOptions options;
  std::optional<OrderedPool> ordered;
  MemoryUsage usage;
  MemoryPressureHandler on_pressure;
};
}  // namespace detail

namespace {

constexpr std::align_val_t kHostAlignment{256};

// Null when the memory is exhausted.
void* try_to_obtain(std::size_t bytes, const detail::AllocatorState& state, bool ordered) {
  if (state.options.host_memory) return ::operator new(bytes, kHostAlignment, std::nothrow);
  void* data = nullptr;
  const cudaError_t status = ordered ? cudaMallocFromPoolAsync(&data, bytes, state.ordered->pool(), state.ordered->stream())
                                     : cudaMalloc(&data, bytes);
  if (status == cudaErrorMemoryAllocation) {
    cudaGetLastError();  // not sticky: the device stays usable
    return nullptr;
  }
  LOOPGAUGE_CUDA_CHECK(status);
  return data;
}

// The same, with what pools keep.
void* obtain(std::size_t bytes, const detail::AllocatorState& state, bool ordered) {
  void* data = try_to_obtain(bytes, state, ordered);
  if (data != nullptr || state.options.host_memory) return data;
  if (state.ordered) state.ordered->stream().synchronize();  // what this allocator has freed is free then
  release_kept();
  return try_to_obtain(bytes, state, ordered);
}

void poison(void* data, std::size_t bytes, const detail::AllocatorState& state, bool ordered) {
  if (state.options.host_memory) {
    std::memset(data, 0xFF, bytes);
    return;
  }
  if (ordered) {
    LOOPGAUGE_CUDA_CHECK(cudaMemsetAsync(data, 0xFF, bytes, state.ordered->stream()));
    return;
  }
  LOOPGAUGE_CUDA_CHECK(cudaMemset(data, 0xFF, bytes));
  LOOPGAUGE_CUDA_CHECK(cudaDeviceSynchronize());  // non-blocking streams do not wait for the default stream
}

}  // namespace

DeviceBuffer::DeviceBuffer(DeviceBuffer&& other) noexcept
    : state_(std::move(other.state_)),
      data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)),
      category_(other.category_),
      ordered_(other.ordered_) {}

DeviceBuffer& DeviceBuffer::operator=(DeviceBuffer&& other) noexcept {
  if (this != &other) {
    reset();
    state_ = std::move(other.state_);
    data_ = std::exchange(other.data_, nullptr);
    bytes_ = std::exchange(other.bytes_, 0);
    category_ = other.category_;
    ordered_ = other.ordered_;
  }
  return *this;
}

void DeviceBuffer::reset() noexcept {
  if (data_ == nullptr) return;
  if (state_->options.host_memory) {
    ::operator delete(data_, kHostAlignment);
  } else {
    // A failure here is the sticky fault of earlier work, which the next checked call reports; a destructor has nobody to tell.
    static_cast<void>(ordered_ ? cudaFreeAsync(data_, state_->ordered->stream()) : cudaFree(data_));
  }
  state_->usage.in_use[static_cast<std::size_t>(category_)] -= bytes_;
  state_->usage.total_in_use -= bytes_;
  --state_->usage.live_buffers;
  data_ = nullptr;
  bytes_ = 0;
  state_.reset();
}

DeviceAllocator::DeviceAllocator(AllocatorOptions options) : state_(std::make_shared<detail::AllocatorState>()) {
  state_->options = options;
  if (options.stream_ordered && !options.host_memory) state_->ordered.emplace();
}

const Stream& DeviceAllocator::stream() const {
  if (!state_->ordered) throw InternalError("the allocator hands out memory in no stream's order");
  return state_->ordered->stream();
}

DeviceBuffer DeviceAllocator::allocate(MemoryCategory category, std::size_t bytes) { return allocate(category, bytes, state_->ordered.has_value()); }

DeviceBuffer DeviceAllocator::allocate_shareable(MemoryCategory category, std::size_t bytes) { return allocate(category, bytes, false); }

DeviceBuffer DeviceAllocator::allocate(MemoryCategory category, std::size_t bytes, bool ordered) {
  if (bytes == 0) return {};
  MemoryUsage& usage = state_->usage;
  const auto refuse = [&](const std::string& have) {
    return DeviceMemoryError("out of device memory: " + std::to_string(bytes) + " bytes for " + std::string(to_string(category)) +
                             " do not fit, " + std::to_string(usage.total_in_use) + " bytes are in use and " + have +
                             "; use fewer requests, a shorter prompt or a smaller model");
  };
  const AllocatorOptions& options = state_->options;
  const auto room = [&] { return options.limit_bytes - std::min(options.limit_bytes, usage.total_in_use); };
  const auto relieved = [&](std::size_t missing) { return state_->on_pressure && state_->on_pressure(missing); };
  if (bytes > room() && !(relieved(bytes - room()) && bytes <= room())) throw refuse("the limit is " + std::to_string(options.limit_bytes));
  void* data = obtain(bytes, *state_, ordered);
  if (data == nullptr && relieved(bytes)) data = obtain(bytes, *state_, ordered);
  if (data == nullptr) {
    if (options.host_memory) throw refuse("the host has no more");
    std::size_t free_bytes = 0;
    std::size_t total_bytes = 0;
    LOOPGAUGE_CUDA_CHECK(cudaMemGetInfo(&free_bytes, &total_bytes));
    throw refuse(std::to_string(free_bytes) + " of the device's " + std::to_string(total_bytes) + " are free");
  }

  const auto index = static_cast<std::size_t>(category);
  usage.in_use[index] += bytes;
  usage.total_in_use += bytes;
  ++usage.live_buffers;
  usage.peak[index] = std::max(usage.peak[index], usage.in_use[index]);
  usage.total_peak = std::max(usage.total_peak, usage.total_in_use);
  DeviceBuffer buffer(state_, data, bytes, category, ordered);
  if (options.poison) poison(data, bytes, *state_, ordered);
  return buffer;
}

void DeviceAllocator::on_pressure(MemoryPressureHandler handler) { state_->on_pressure = std::move(handler); }

std::size_t kept_bytes(int device) {
  const std::lock_guard lock(pools().mutex);
  std::uint64_t kept = 0;
  for (const PoolOfDevice& each : pools().live) {
    if (each.device != device) continue;
    // Used first: another thread may be allocating, and the two are not read at once.
    const std::uint64_t used = attribute(each.pool, cudaMemPoolAttrUsedMemCurrent), reserved = attribute(each.pool, cudaMemPoolAttrReservedMemCurrent);
    kept += reserved - std::min(reserved, used);
  }
  return static_cast<std::size_t>(kept);
}

MemoryUsage DeviceAllocator::usage() const { return state_->usage; }

void DeviceAllocator::reset_peak() {
  state_->usage.peak = state_->usage.in_use;
  state_->usage.total_peak = state_->usage.total_in_use;
}

}  // namespace loopgauge::optimized
