// SPDX-License-Identifier: Apache-2.0
// Every CUDA and cuBLAS status becomes a typed error that names the call and the place.
#pragma once

#include <cublas_v2.h>
#include <cuda_runtime_api.h>

#include "optimized/runtime/device_error.hpp"

namespace loopgauge::optimized {

// Throws DeviceError "<call> failed at <file>:<line>: <name> (<text>)"; DeviceMemoryError for cudaErrorMemoryAllocation, whose
// non-sticky status is cleared first. Returns on cudaSuccess.
void check_cuda(cudaError_t status, const char* call, const char* file, int line);
void check_cublas(cublasStatus_t status, const char* call, const char* file, int line);

}  // namespace loopgauge::optimized

#define LOOPGAUGE_CUDA_CHECK(call) ::loopgauge::optimized::check_cuda((call), #call, __FILE__, __LINE__)
#define LOOPGAUGE_CUBLAS_CHECK(call) ::loopgauge::optimized::check_cublas((call), #call, __FILE__, __LINE__)
// Directly after a <<<>>> launch: configuration errors surface here, faults of the kernel at the next synchronising call.
#define LOOPGAUGE_CUDA_CHECK_LAUNCH(kernel) ::loopgauge::optimized::check_cuda(cudaGetLastError(), "launch of " kernel, __FILE__, __LINE__)
