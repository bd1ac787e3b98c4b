// SPDX-License-Identifier: Apache-2.0
// Addresses of shared memory, the barriers there that count arrivals of threads and bytes of copies, the bulk copies that arrive at them, and groups of
// asynchronous copies.
#pragma once

#include <cstdint>

namespace loopgauge::optimized {

#ifdef __CUDACC__

__device__ __forceinline__ std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}
__device__ __forceinline__ void barrier_init(std::uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
// Orders what the thread and, after a __syncwarp, its warp did before. compute-sanitizer racecheck counts the arriving thread's own accesses only, so
// where other threads write to what a warp has read, or read what it has written, every lane arrives. (Reads by wgmma it does not see, and of bulk copies
// it takes the first lane of the warp for the writer, whichever has waited and issued them.)
__device__ __forceinline__ void barrier_arrive(std::uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
__device__ __forceinline__ void barrier_arrive_expecting(std::uint64_t* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
}
// From global memory; both and the number of bytes multiples of 16.
__device__ __forceinline__ void bulk_copy(void* target, const void* source, int bytes, std::uint64_t* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(target)),
               "l"(source), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}
// Until the phase of that parity is over; a new barrier is in phase 0, and the phase before it is over.
__device__ __forceinline__ void barrier_wait(std::uint64_t* barrier, std::uint32_t parity) {
  std::uint32_t done = 0;
  while (done == 0) {
    asm volatile(
        "{\n"
        ".reg .pred complete;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 complete, [%1], %2;\n"
        "selp.u32 %0, 1, 0, complete;\n"
        "}\n"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
  }
}

// The thread's asynchronous copies since the last call become a group.
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until no more than kPending groups of this thread are on their way.
template <int kPending>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

#endif  // __CUDACC__

}  // namespace loopgauge::optimized
