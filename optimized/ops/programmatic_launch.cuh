// SPDX-License-Identifier: Apache-2.0
// Kernels that begin before the kernel in front of them in the stream has ended (programmatic dependent launch).
//
// The kernels of a decode layer take turns: projections P, attention A (one kernel a kind of row), projections Q, ... What a kernel may do before it has
// waited for the one in front of it follows from three rules that each of them keeps:
// 1. Every thread waits (wait_for_previous_kernel) before it writes global memory and before it ends.
// 2. A block lets the next kernel begin (let_next_kernel_begin, by any of its threads) only after that thread has waited, or by its end.
// 3. Before it has waited, a kernel reads nothing that the kernel directly in front writes.
// A begins once every block of P has let it, so after a thread of P has waited: what lies in front of P is complete and visible, and A may read it at
// once. The same holds for Q and what lies in front of A, P included, and for one kernel of A behind another. By rule 1 the end of A comes after that of
// P, so that a kernel that has waited for A, or is launched behind A in the ordinary way (select_keys, reference_contribution, a copy), sees everything in
// front; and nobody in front still reads what a kernel writes after its wait.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <utility>

#include "optimized/runtime/cuda_check.hpp"

namespace loopgauge::optimized {

#ifdef __CUDACC__

// What a kernel may take of shared memory, up to `bytes` (always the same of a kernel: other threads launch it too, with more or fewer). A kernel begins
// beside another only where the split of the first-level cache that the other one runs with has room for it, so that split is the largest.
template <class Kernel>
void let_share_multiprocessors(Kernel kernel, int bytes) {
  LOOPGAUGE_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  LOOPGAUGE_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared));
}

// A launch of a kernel that keeps the rules. `early`: it may begin before the kernel in front has ended.
template <class... Parameters, class... Arguments>
void launch_in_turn(bool early, void (*kernel)(Parameters...), dim3 grid, int threads, int shared_bytes, cudaStream_t stream, Arguments&&... arguments) {
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = static_cast<unsigned>(threads);
  config.dynamicSmemBytes = static_cast<std::size_t>(shared_bytes);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = early ? 1 : 0;
  LOOPGAUGE_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...));
}

__device__ __forceinline__ void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void let_next_kernel_begin() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

#endif  // __CUDACC__

}  // namespace loopgauge::optimized
