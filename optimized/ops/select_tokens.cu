// SPDX-License-Identifier: Apache-2.0
#include "optimized/ops/select_tokens.cuh"

#include <cub/block/block_scan.cuh>
#include <cub/device/device_select.cuh>

#include "optimized/runtime/cuda_check.hpp"

namespace loopgauge::optimized {
namespace {

constexpr int kThreads = 1024;
constexpr int kDigitBits = 8;
constexpr int kDigits = 1 << kDigitBits;

// Unsigned order of the keys is numeric order of the scores; -0 is made +0 first.
__device__ __forceinline__ std::uint32_t ordered_key(float score) {
  const std::uint32_t bits = __float_as_uint(score == 0.0f ? 0.0f : score);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

constexpr std::uint32_t kFirstKey = 0xffffffffu;  // above the key of every number

// flags[i] = 1 for the `budget` candidates of highest score, ties to the lower index; the one at position `reserved` comes first.
__global__ void __launch_bounds__(kThreads)
    flag_top_scores_kernel(const std::int32_t* __restrict__ candidates, const float* __restrict__ scores, int count, int budget,
                           int reserved, std::uint8_t* __restrict__ flags) {
  const auto key_of = [&](int i) { return candidates[i] == reserved ? kFirstKey : ordered_key(scores[i]); };
  using Scan = cub::BlockScan<int, kThreads>;
  __shared__ typename Scan::TempStorage scan_storage;
  __shared__ int histogram[kDigits];
  __shared__ std::uint32_t prefix;  // leading bits of the threshold key
  __shared__ int wanted;            // how many keys with that prefix are still to be taken
  if (threadIdx.x == 0) {
    prefix = 0;
    wanted = budget;
  }
  for (int shift = 32 - kDigitBits; shift >= 0; shift -= kDigitBits) {
    if (threadIdx.x < kDigits) histogram[threadIdx.x] = 0;
    __syncthreads();
    const std::uint32_t leading = prefix;
    for (int i = threadIdx.x; i < count; i += kThreads) {
      const std::uint32_t key = key_of(i);
      const bool matches = shift == 32 - kDigitBits || (key >> (shift + kDigitBits)) == leading;
      if (matches) atomicAdd(&histogram[(key >> shift) & (kDigits - 1)], 1);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      int left = wanted;
      int digit = kDigits - 1;
      while (histogram[digit] < left) left -= histogram[digit--];
      wanted = left;
      prefix = leading << kDigitBits | static_cast<std::uint32_t>(digit);
    }
    __syncthreads();
  }
  const std::uint32_t threshold = prefix;
  const int ties_wanted = wanted;
  int ties_before = 0;
  for (int base = 0; base < count; base += kThreads) {
    const int i = base + threadIdx.x;
    const std::uint32_t key = i < count ? key_of(i) : 0;
    const int tie = i < count && key == threshold;
    int rank = 0;
    int ties = 0;
    Scan(scan_storage).ExclusiveSum(tie, rank, ties);
    if (i < count) flags[i] = key > threshold || (tie && ties_before + rank < ties_wanted);
    ties_before += ties;
    __syncthreads();  // the scan's storage is used again
  }
}

std::size_t aligned(std::size_t bytes) { return (bytes + 255) / 256 * 256; }

std::size_t compaction_bytes(int candidates) {
  std::size_t bytes = 0;
  LOOPGAUGE_CUDA_CHECK(cub::DeviceSelect::Flagged(nullptr, bytes, static_cast<const std::int32_t*>(nullptr),
                                                  static_cast<const std::uint8_t*>(nullptr), static_cast<std::int32_t*>(nullptr),
                                                  static_cast<int*>(nullptr), candidates));
  return bytes;
}

}  // namespace

std::size_t select_tokens_scratch_bytes(int candidates) {
  return aligned(candidates) + aligned(sizeof(int)) + aligned(compaction_bytes(candidates));
}

void select_tokens(const std::int32_t* candidates, const float* scores, int count, int budget, int reserved, std::int32_t* selected,
                   void* scratch, cudaStream_t stream) {
  if (budget < 1 || budget > count) throw InternalError("select_tokens: the budget is outside [1, count]");
  auto* flags = static_cast<std::uint8_t*>(scratch);
  auto* selected_count = reinterpret_cast<int*>(flags + aligned(count));
  void* compaction = reinterpret_cast<std::uint8_t*>(selected_count) + aligned(sizeof(int));
  flag_top_scores_kernel<<<1, kThreads, 0, stream>>>(candidates, scores, count, budget, reserved, flags);
  LOOPGAUGE_CUDA_CHECK_LAUNCH("select_tokens");
  std::size_t bytes = compaction_bytes(count);
  LOOPGAUGE_CUDA_CHECK(cub::DeviceSelect::Flagged(compaction, bytes, candidates, flags, selected, selected_count, count, stream));
}

}  // namespace loopgauge::optimized
