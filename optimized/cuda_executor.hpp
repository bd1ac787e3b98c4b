// SPDX-License-Identifier: Apache-2.0
// The optimized CUDA runtime behind the Executor interface.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>

#include "models/checkpoint.hpp"
#include "models/executor.hpp"
#include "optimized/runtime/device_allocator.hpp"

namespace loopgauge::optimized {

struct DeviceStatus {
  bool compiled = false;           // this binary contains the CUDA runtime
  bool available = false;          // a usable device is present
  std::string description;         // device name and driver, or why it cannot be used ("no CUDA device", "built without CUDA")
};

// Of the current device. Never throws.
DeviceStatus device_status();

// Bytes of a device's memory; free is also what this process keeps for its next buffers. Throws UnsupportedError where there is no such device.
struct DeviceMemory {
  std::size_t free = 0, total = 0;
};
DeviceMemory device_memory(int device);

// How projections are computed. Each choice gives a row the same bits whatever the number of rows beside it; they need not equal each other.
enum class LinearImplementation {
  automatic,                       // decode rows and head: split_k; rows of prompts: library for large matrices, tensor_core_tiles for small ones
  library,                         // cuBLASLt without workspace
  tensor_core_tiles,               // own kernel: every output adds its 32-wide products in ascending order
  split_k,                         // own kernels for few rows: the warps of a block share out K. Up to 8 decode rows go through one launch between two attentions
};

struct CudaExecutorOptions {
  LinearImplementation linear = LinearImplementation::automatic;
  std::size_t memory_limit_bytes = std::numeric_limits<std::size_t>::max();  // device bytes that may be live at once
  int device = 0;                  // CUDA ordinal; another thread's or executor's choice of the current device does not matter
  int prefill_step_rows = 4096;    // of a prompt, that go through a loop together where the plan's items have several windows; at least one window does
  bool poison = false;             // fresh and reused memory is filled with NaN patterns: unwritten values then show in the result
};

class CudaExecutor : public Executor {
 public:
  // Device bytes by category: now, and the largest since begin(). Weights are counted from construction on.
  virtual MemoryUsage memory_usage() const = 0;
};

// Throws UnsupportedError with device_status().description, or naming a device that is not there, when the runtime cannot be used, or naming the extent of the model that the
// kernels do not cover; DeviceMemoryError when the weights do not fit. `checkpoint` is copied to the device and need not outlive the call.
std::unique_ptr<CudaExecutor> make_cuda_executor(const Checkpoint& checkpoint, const CudaExecutorOptions& options = {});

// The same with random weights that are made on the device, for measurements at a shape whose weights nobody has at hand. Equal shapes and seeds give equal
// weights on every device. Throws likewise.
std::unique_ptr<CudaExecutor> make_random_cuda_executor(const ModelConfig& shape, std::uint32_t seed, const CudaExecutorOptions& options = {});

}  // namespace loopgauge::optimized
