// SPDX-License-Identifier: Apache-2.0
#include "optimized/runtime/cuda_check.hpp"

#include <string_view>

namespace loopgauge::optimized {
namespace {

std::string place(const char* call, const char* file, int line) {
  std::string_view path = file;
  if (auto cut = path.rfind("optimized/"); cut != std::string_view::npos) path.remove_prefix(cut);
  return std::string(call) + " failed at " + std::string(path) + ":" + std::to_string(line) + ": ";
}

}  // namespace

void check_cuda(cudaError_t status, const char* call, const char* file, int line) {
  if (status == cudaSuccess) return;
  const std::string message = place(call, file, line) + cudaGetErrorName(status) + " (" + cudaGetErrorString(status) + ")";
  cudaGetLastError();  // clears a non-sticky status, so that the next call reports its own
  if (status == cudaErrorMemoryAllocation) throw DeviceMemoryError(message);
  throw DeviceError(message);
}

void check_cublas(cublasStatus_t status, const char* call, const char* file, int line) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  const std::string message = place(call, file, line) + cublasGetStatusName(status) + " (" + cublasGetStatusString(status) + ")";
  if (status == CUBLAS_STATUS_ALLOC_FAILED) throw DeviceMemoryError(message);
  throw DeviceError(message);
}

}  // namespace loopgauge::optimized
