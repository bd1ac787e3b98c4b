// SPDX-License-Identifier: Apache-2.0
// The factory of a build without a CUDA toolkit: it says so.
#include "models/error.hpp"
#include "optimized/bench/step_bench.hpp"
#include "optimized/cuda_executor.hpp"
#include "optimized/device_copies.hpp"

namespace loopgauge::optimized {

DeviceStatus device_status() { return {false, false, "built without CUDA"}; }

std::unique_ptr<CudaExecutor> make_cuda_executor(const Checkpoint&, const CudaExecutorOptions&) {
  throw UnsupportedError("the CUDA runtime cannot run: " + device_status().description);
}

DeviceMemory device_memory(int) { throw UnsupportedError("the CUDA runtime cannot run: " + device_status().description); }

std::unique_ptr<CudaExecutor> make_random_cuda_executor(const ModelConfig&, std::uint32_t, const CudaExecutorOptions&) {
  throw UnsupportedError("the CUDA runtime cannot run: " + device_status().description);
}

void run_step_bench(const ModelConfig&, const StepBenchOptions&, const StepBenchObserver&) {
  throw UnsupportedError("the device bench cannot run: " + device_status().description);
}

int device_count() { return 0; }

namespace {
[[noreturn]] void refuse_device_memory() { throw UnsupportedError("device memory cannot be handed off: " + device_status().description); }
}  // namespace

std::unique_ptr<DeviceCopies> make_device_copies() { refuse_device_memory(); }
std::unique_ptr<OpenedDeviceMemory> make_opened_device_memory() { refuse_device_memory(); }
DeviceMemoryName name_device_memory(const handoff::Memory&) { refuse_device_memory(); }

}  // namespace loopgauge::optimized
