// SPDX-License-Identifier: Apache-2.0
#include "optimized/ops/select_tokens.cuh"

#include <cub/block/block_scan.cuh>

#include "optimized/ops/numeric.cuh"
#include "optimized/runtime/cuda_check.hpp"

namespace loopgauge::optimized {
namespace {

constexpr int kDigitBits = 8;
constexpr int kDigits = 1 << kDigitBits;
constexpr int kThreads = kDigits;

constexpr std::uint32_t kFirstKey = 0xffffffffu;  // above the key of every number

// The `budget` candidates of highest score, ties to the lower index; the one at position `reserved` comes first.
__global__ void __launch_bounds__(kThreads)
    select_tokens_kernel(const std::int32_t* __restrict__ candidates, const float* __restrict__ scores, int count, int budget, int reserved,
                         std::int32_t* __restrict__ selected) {
  const auto key_of = [&](int i) { return candidates[i] == reserved ? kFirstKey : ordered_key(scores[i]); };
  using Scan = cub::BlockScan<int, kThreads>;
  __shared__ typename Scan::TempStorage scan_storage;
  __shared__ int histogram[kDigits];
  __shared__ std::uint32_t found_threshold;
  __shared__ int found_wanted;
  const int thread = static_cast<int>(threadIdx.x);
  std::uint32_t threshold = 0;  // the leading bits of its key that are known
  int wanted = budget;          // how many keys with these bits are still to be taken
  for (int shift = 32 - kDigitBits; shift >= 0; shift -= kDigitBits) {
    histogram[thread] = 0;
    __syncthreads();
    for (int i = thread; i < count; i += kThreads) {
      const std::uint32_t key = key_of(i);
      const bool matches = shift == 32 - kDigitBits || (key >> (shift + kDigitBits)) == threshold;
      if (matches) atomicAdd(&histogram[(key >> shift) & (kDigits - 1)], 1);
    }
    __syncthreads();
    const int digit = kDigits - 1 - thread, keys = histogram[digit];
    int above = 0;
    Scan(scan_storage).ExclusiveSum(keys, above);
    if (above < wanted && wanted <= above + keys) {
      found_threshold = threshold << kDigitBits | static_cast<std::uint32_t>(digit);
      found_wanted = wanted - above;
    }
    __syncthreads();
    threshold = found_threshold;
    wanted = found_wanted;
  }
  int ties_before = 0, written = 0;
  for (int base = 0; base < count; base += kThreads) {
    const int i = base + thread;
    const std::uint32_t key = i < count ? key_of(i) : 0;
    const int tie = i < count && key == threshold;
    int rank = 0, ties = 0;
    Scan(scan_storage).ExclusiveSum(tie, rank, ties);
    const int taken = i < count && (key > threshold || (tie && ties_before + rank < wanted));
    int place = 0, all_taken = 0;
    __syncthreads();  // the scan's storage is used again, here and below
    Scan(scan_storage).ExclusiveSum(taken, place, all_taken);
    if (taken) selected[written + place] = candidates[i];
    ties_before += ties;
    written += all_taken;
    __syncthreads();
  }
}

}  // namespace

void select_tokens(const std::int32_t* candidates, const float* scores, int count, int budget, int reserved, std::int32_t* selected, cudaStream_t stream) {
  if (budget < 1 || budget > count) throw InternalError("select_tokens: the budget is outside [1, count]");
  select_tokens_kernel<<<1, kThreads, 0, stream>>>(candidates, scores, count, budget, reserved, selected);
  LOOPGAUGE_CUDA_CHECK_LAUNCH("select_tokens");
}

}  // namespace loopgauge::optimized
