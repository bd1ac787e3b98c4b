// SPDX-License-Identifier: Apache-2.0
#include "optimized/device_copies.hpp"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstring>
#include <deque>
#include <map>
#include <set>
#include <utility>

#include "models/error.hpp"
#include "optimized/runtime/cuda_check.hpp"
#include "optimized/runtime/device_guard.hpp"
#include "optimized/runtime/stream.hpp"

namespace loopgauge::optimized {
namespace {

// Direct access where the hardware has it; without it the driver takes another way, with the same result.
void let_reach(int from, int to) {
  int can = 0;
  if (from == to || cudaDeviceCanAccessPeer(&can, from, to) != cudaSuccess || can == 0) return;
  const DeviceGuard guard(from);
  if (cudaDeviceEnablePeerAccess(to, 0) != cudaSuccess) cudaGetLastError();  // it is enabled already, or the other way is taken
}

class Copies final : public DeviceCopies {
 public:
  ~Copies() override {
    for (const auto& [_, lane] : lanes_) static_cast<void>(cudaStreamSynchronize(lane.stream));
  }

  void begin(std::uint64_t ticket, const handoff::Memory& source, const handoff::Memory& target) override {
    if (source.on_host() || target.on_host() || source.bytes > target.bytes) {
      finished_.push_back({ticket, false});
      return;
    }
    Lane* lane = nullptr;
    try {
      const DeviceGuard guard(source.device);
      Lane& of_device = lanes_[source.device];
      if (reached_.insert({source.device, target.device}).second) let_reach(source.device, target.device);
      // What can fail for want of room comes before the copy.
      of_device.under_way.emplace_back(ticket, Event());
      lane = &of_device;
      if (source.bytes > 0)
        LOOPGAUGE_CUDA_CHECK(cudaMemcpyPeerAsync(target.data, target.device, source.data, source.device, source.bytes, lane->stream));
      lane->under_way.back().second.record(lane->stream);
    } catch (const Error&) {
      if (lane != nullptr) {
        // The copy may be under way all the same: it is reported when it cannot be any more.
        static_cast<void>(cudaStreamSynchronize(lane->stream));
        lane->under_way.pop_back();
      }
      cudaGetLastError();
      finished_.push_back({ticket, false});
    }
  }

  std::vector<handoff::WriteResult> ended() override {
    for (auto& [_, lane] : lanes_) {
      while (!lane.under_way.empty()) {
        const cudaError_t status = cudaEventQuery(lane.under_way.front().second.get());
        if (status == cudaErrorNotReady) break;
        if (status != cudaSuccess) cudaGetLastError();
        finished_.push_back({lane.under_way.front().first, status == cudaSuccess});
        lane.under_way.pop_front();
      }
    }
    return std::exchange(finished_, {});
  }

 private:
  struct Lane {  // of a source device
    Stream stream;
    std::deque<std::pair<std::uint64_t, Event>> under_way;  // in order
  };
  std::map<int, Lane> lanes_;
  std::set<std::pair<int, int>> reached_;
  std::vector<handoff::WriteResult> finished_;
};

// The allocation that `data` lies in.
std::pair<CUdeviceptr, std::size_t> allocation_of(const void* data) {
  using AddressRange = CUresult (*)(CUdeviceptr*, std::size_t*, CUdeviceptr);
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  LOOPGAUGE_CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuMemGetAddressRange", &function, 12000, cudaEnableDefault, &found));
  if (found != cudaDriverEntryPointSuccess) throw UnsupportedError("the CUDA driver does not say which allocation an address lies in");
  CUdeviceptr base = 0;
  std::size_t bytes = 0;
  if (reinterpret_cast<AddressRange>(function)(&base, &bytes, reinterpret_cast<CUdeviceptr>(data)) != CUDA_SUCCESS)
    throw DeviceError("memory to be shared is no device memory of this process");
  return {base, bytes};
}

std::array<std::byte, 16> uuid_of(int device) {
  cudaDeviceProp properties{};
  LOOPGAUGE_CUDA_CHECK(cudaGetDeviceProperties(&properties, device));
  std::array<std::byte, 16> uuid;
  static_assert(sizeof properties.uuid == sizeof uuid);
  std::memcpy(uuid.data(), &properties.uuid, sizeof uuid);
  return uuid;
}

int device_with(const std::array<std::byte, 16>& uuid) {
  for (int device = 0; device < device_count(); ++device) {
    if (uuid_of(device) == uuid) return device;
  }
  throw DeviceError("the other process has its memory on a device that this one does not see");
}

class Opened final : public OpenedDeviceMemory {
 public:
  ~Opened() override {
    for (const auto& [_, allocation] : allocations_) static_cast<void>(cudaIpcCloseMemHandle(allocation.base));
  }

  handoff::Memory open(const DeviceMemoryName& name) override {
    const auto [entry, is_new] = allocations_.try_emplace(name.handle);
    if (is_new) {
      cudaIpcMemHandle_t handle;
      static_assert(sizeof handle == sizeof name.handle);
      std::memcpy(&handle, name.handle.data(), sizeof handle);
      void* base = nullptr;
      try {
        entry->second.device = device_with(name.device);
        const DeviceGuard guard(entry->second.device);
        LOOPGAUGE_CUDA_CHECK(cudaIpcOpenMemHandle(&base, handle, cudaIpcMemLazyEnablePeerAccess));
      } catch (...) {
        allocations_.erase(entry);
        throw;
      }
      entry->second.base = static_cast<std::byte*>(base);
    }
    ++entry->second.users;
    return {entry->second.base + name.offset, static_cast<std::size_t>(name.bytes), entry->second.device};
  }

  void close(const DeviceMemoryName& name) override {
    const auto found = allocations_.find(name.handle);
    if (found == allocations_.end()) throw InternalError("device memory of another process is closed that is not open");
    if (--found->second.users > 0) return;
    static_cast<void>(cudaIpcCloseMemHandle(found->second.base));
    allocations_.erase(found);
  }

 private:
  struct Allocation {
    std::byte* base = nullptr;
    int device = 0;
    int users = 0;
  };
  std::map<std::array<std::byte, 64>, Allocation> allocations_;
};

}  // namespace

std::unique_ptr<DeviceCopies> make_device_copies() { return std::make_unique<Copies>(); }

std::unique_ptr<OpenedDeviceMemory> make_opened_device_memory() { return std::make_unique<Opened>(); }

DeviceMemoryName name_device_memory(const handoff::Memory& memory) {
  const DeviceGuard guard(memory.device);
  const auto [base, _] = allocation_of(memory.data);
  cudaIpcMemHandle_t handle;
  LOOPGAUGE_CUDA_CHECK(cudaIpcGetMemHandle(&handle, reinterpret_cast<void*>(base)));
  DeviceMemoryName name;
  std::memcpy(name.handle.data(), &handle, sizeof handle);
  name.offset = reinterpret_cast<CUdeviceptr>(memory.data) - base;
  name.bytes = memory.bytes;
  name.device = uuid_of(memory.device);
  return name;
}

int device_count() {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
  cudaGetLastError();  // an absent device is an answer, not an error of the next call
  return 0;
}

}  // namespace loopgauge::optimized
