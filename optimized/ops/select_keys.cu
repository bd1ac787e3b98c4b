// SPDX-License-Identifier: Apache-2.0
#include "optimized/ops/select_keys.cuh"

#include <string>

#include "models/error.hpp"
#include "optimized/kv/numeric_fault.hpp"
#include "optimized/runtime/cuda_check.hpp"

namespace loopgauge::optimized {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kDigitBits = 8;
constexpr int kBins = 1 << kDigitBits;

// Unsigned order of the key == numeric order of the logit; -0 and +0 share a key.
__device__ __forceinline__ std::uint32_t ordered_key(float logit) {
  const std::uint32_t bits = logit == 0.0f ? 0u : __float_as_uint(logit);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// grid (heads, rows, layers), kThreads threads; shared memory: per page one 64-bit mask of the keys equal to the threshold and their running count.
__global__ void __launch_bounds__(kThreads) select_keys_kernel(SelectKeysArguments arguments) {
  extern __shared__ std::uint64_t equal_masks[];
  __shared__ std::uint32_t histogram[kBins];
  __shared__ std::uint32_t chosen_digit, chosen_above;
  __shared__ std::uint32_t warp_totals[kWarps];

  const int head = blockIdx.x, row_index = blockIdx.y, layer = arguments.layer + static_cast<int>(blockIdx.z);
  const QueryRow row = arguments.rows[row_index];
  if (row.request < 0) return;
  const int n = row.position + 1, pages = page_count(n);
  auto* equal_before = reinterpret_cast<std::uint32_t*>(equal_masks + pages);
  const float* logits = arguments.logits + ((static_cast<std::int64_t>(blockIdx.z) * gridDim.y + row_index) * arguments.shape.heads + head) * arguments.logit_stride;
  const std::size_t state = reference_index(arguments.shape, row.reference, layer, head);
  std::uint64_t* selected = arguments.reference.selected + state * arguments.reference.mask_pages;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  const std::uint64_t scaled = static_cast<std::uint64_t>(arguments.key_fraction_bp) * static_cast<std::uint64_t>(n);
  const auto budget = static_cast<std::uint32_t>((scaled + kBasisPoints - 1) / kBasisPoints);
  const std::uint32_t k = budget > 0 ? budget : 1;

  // Threshold: the k-th largest key, digit by digit from the top.
  std::uint32_t prefix = 0, prefix_mask = 0, remaining = k;
  bool finite = true;
  for (int shift = 32 - kDigitBits; shift >= 0; shift -= kDigitBits) {
    for (int bin = threadIdx.x; bin < kBins; bin += kThreads) histogram[bin] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += kThreads) {
      const float logit = logits[i];
      finite = finite && isfinite(logit);
      const std::uint32_t key = ordered_key(logit);
      if ((key & prefix_mask) == prefix) atomicAdd(&histogram[(key >> shift) & (kBins - 1)], 1u);
    }
    __syncthreads();
    if (warp == 0) {  // suffix sums: lane owns 8 consecutive bins, highest bins in the last lane
      constexpr int kLaneBins = kBins / 32;
      std::uint32_t own = 0;
#pragma unroll
      for (int i = 0; i < kLaneBins; ++i) own += histogram[lane * kLaneBins + i];
      std::uint32_t above = own;  // inclusive suffix sum over lanes
#pragma unroll
      for (int width = 1; width < 32; width *= 2) {
        const std::uint32_t other = __shfl_down_sync(~0u, above, width);
        if (lane + width < 32) above += other;
      }
      above -= own;
      if (above < remaining && above + own >= remaining) {  // exactly one lane
        for (int i = kLaneBins - 1; i >= 0; --i) {
          const std::uint32_t count = histogram[lane * kLaneBins + i];
          if (above + count >= remaining) {
            chosen_digit = static_cast<std::uint32_t>(lane * kLaneBins + i);
            chosen_above = above;
            break;
          }
          above += count;
        }
      }
    }
    __syncthreads();
    prefix |= chosen_digit << shift;
    prefix_mask |= static_cast<std::uint32_t>(kBins - 1) << shift;
    remaining -= chosen_above;
    __syncthreads();
  }
  if (!finite && arguments.numeric_fault != nullptr) {
    atomicMin(reinterpret_cast<unsigned long long*>(arguments.numeric_fault),
              static_cast<unsigned long long>(
                  pack_numeric_fault({NumericFaultKind::logit, row.loop, row.request, layer, row.position, head, 0})));
  }

  // Keys above the threshold are in; of those equal to it the first `remaining` by position.
  for (int page = warp; page < pages; page += kWarps) {
    std::uint64_t above_mask = 0, equal_mask = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int position = page * kPageTokens + half * 32 + lane;
      const std::uint32_t key = position < n ? ordered_key(logits[position]) : 0u;
      const bool valid = position < n;
      above_mask |= static_cast<std::uint64_t>(__ballot_sync(~0u, valid && key > prefix)) << (32 * half);
      equal_mask |= static_cast<std::uint64_t>(__ballot_sync(~0u, valid && key == prefix)) << (32 * half);
    }
    if (lane == 0) {
      selected[page] = above_mask;
      equal_masks[page] = equal_mask;
    }
  }
  __syncthreads();
  // Exclusive running count of equal keys in page order: chunks of kThreads pages.
  std::uint32_t carried = 0;
  for (int base = 0; base < pages; base += kThreads) {
    const int page = base + static_cast<int>(threadIdx.x);
    const std::uint32_t own = page < pages ? static_cast<std::uint32_t>(__popcll(equal_masks[page])) : 0u;
    std::uint32_t inclusive = own;
#pragma unroll
    for (int width = 1; width < 32; width *= 2) {
      const std::uint32_t other = __shfl_up_sync(~0u, inclusive, width);
      if (lane >= width) inclusive += other;
    }
    if (lane == 31) warp_totals[warp] = inclusive;
    __syncthreads();
    std::uint32_t before = carried, total = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      if (w < warp) before += warp_totals[w];
      total += warp_totals[w];
    }
    if (page < pages) equal_before[page] = before + inclusive - own;
    carried += total;
    __syncthreads();
  }
  for (int page = threadIdx.x; page < pages; page += kThreads) {
    std::uint64_t equal = equal_masks[page];
    std::uint32_t before = equal_before[page];
    std::uint64_t taken = 0;
    if (arguments.fault == Fault::threshold_tie_by_arrival)
      before = carried - before - static_cast<std::uint32_t>(__popcll(equal));
    for (std::uint32_t i = before; i < remaining && equal != 0; ++i) {
      const std::uint64_t lowest = equal & (~equal + 1);
      taken |= lowest;
      equal ^= lowest;
    }
    if (taken != 0) selected[page] |= taken;
  }
}

}  // namespace

void select_keys(const SelectKeysArguments& arguments, cudaStream_t stream) {
  if (arguments.row_count == 0 || arguments.layer_count == 0) return;
  const std::size_t shared_bytes =
      static_cast<std::size_t>(arguments.reference.mask_pages) * (sizeof(std::uint64_t) + sizeof(std::uint32_t));
  constexpr std::size_t kSharedLimit = 200 * 1024;
  if (shared_bytes > kSharedLimit) {
    throw UnsupportedError("select_keys: rows of up to " + std::to_string(arguments.reference.mask_pages) + " pages need " +
                           std::to_string(shared_bytes) + " bytes of shared memory, at most " + std::to_string(kSharedLimit));
  }
  if (shared_bytes > 40 * 1024) {  // always the same value: other threads launch the kernel too, with more or fewer bytes
    LOOPGAUGE_CUDA_CHECK(cudaFuncSetAttribute(select_keys_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kSharedLimit)));
  }
  select_keys_kernel<<<dim3(arguments.shape.heads, arguments.row_count, arguments.layer_count), kThreads, shared_bytes, stream>>>(arguments);
  LOOPGAUGE_CUDA_CHECK_LAUNCH("select_keys");
}

}  // namespace loopgauge::optimized
