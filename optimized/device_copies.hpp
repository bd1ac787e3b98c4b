// SPDX-License-Identifier: Apache-2.0
// What transports of handoffs do with device memory: copies that are begun and reported when they have ended, and memory of one process in another
// of the same host. Every function but device_count() throws UnsupportedError in a build without CUDA.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "models/handoff/transfer.hpp"

namespace loopgauge::optimized {

// Copies within a device or between devices of this host, on streams of their own. Not thread-safe. Destruction waits for what is under way.
class DeviceCopies {
 public:
  virtual ~DeviceCopies() = default;
  // Begins to copy source.bytes bytes, which must be final, to `target`; both on devices. A copy that cannot be begun or followed ends without
  // success; no Error is thrown.
  virtual void begin(std::uint64_t ticket, const handoff::Memory& source, const handoff::Memory& target) = 0;
  // Copies that have ended since the last call: nothing of them is under way any more. The bytes of those with success are visible to whatever the
  // device is given to do from now on.
  virtual std::vector<handoff::WriteResult> ended() = 0;
};
std::unique_ptr<DeviceCopies> make_device_copies();

// Names device memory for other processes of this host (CUDA IPC). The memory must stay until nobody has it open.
struct DeviceMemoryName {
  std::array<std::byte, 64> handle{};   // of the allocation
  std::array<std::byte, 16> device{};   // UUID: processes may count devices in different orders
  std::uint64_t offset = 0;             // in the allocation
  std::uint64_t bytes = 0;
  bool operator==(const DeviceMemoryName&) const = default;
};
// Throws DeviceError when the driver does not share the memory.
DeviceMemoryName name_device_memory(const handoff::Memory& memory);

// Allocations of another process, each open once however many regions lie in it, until the last of them is closed.
class OpenedDeviceMemory {
 public:
  virtual ~OpenedDeviceMemory() = default;
  // Throws DeviceError when it cannot be opened, because the process is gone or this one does not see the device.
  virtual handoff::Memory open(const DeviceMemoryName& name) = 0;
  // No copy to or from it may be under way.
  virtual void close(const DeviceMemoryName& name) = 0;
};
std::unique_ptr<OpenedDeviceMemory> make_opened_device_memory();

// Devices that the process sees; 0 without any. Never throws.
int device_count();

}  // namespace loopgauge::optimized
