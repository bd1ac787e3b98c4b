// SPDX-License-Identifier: Apache-2.0
#include "optimized/ops/select_keys.cuh"

#include <string>

#include "models/error.hpp"
#include "optimized/kv/numeric_fault.hpp"
#include "optimized/ops/numeric.cuh"
#include "optimized/runtime/cuda_check.hpp"

namespace loopgauge::optimized {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kDigits = 3;
constexpr int kDigitBits = 11;                     // the last digit repeats a bit of the one before, which is the same in all keys that are left then
constexpr int kBins = 1 << kDigitBits;
constexpr int kCandidates = 4096;                  // keys of one leading digit that shared memory holds: of 65,536 random ones some 2,500 share the threshold's
constexpr int kBatch = 8;                          // logits that a thread has on their way

__device__ __forceinline__ int digit_shift(int digit) { return max(32 - kDigitBits * (digit + 1), 0); }

struct Candidate {
  std::uint32_t key;
  std::int32_t position;
};

// Behind the candidates, for every page: masks as words of 32 positions, and how many equal keys stand in the pages before.
struct PageMasks {
  std::uint32_t* above;         // [pages][2]: keys above the threshold
  std::uint32_t* equal;         // [pages][2]
  std::uint32_t* equal_before;  // [pages]
};
constexpr std::size_t kPageMaskBytes = 5 * sizeof(std::uint32_t);
constexpr std::size_t kCandidateBytes = kCandidates * sizeof(Candidate);

struct Selection {
  std::uint32_t histogram[kBins];
  std::uint32_t warp_totals[kWarps];
  std::uint32_t digit, above, count;  // chosen: the digit, how many keys have a larger one, how many have this one
  std::uint32_t candidates;
};

// All threads: the digit of the `remaining`-th largest of the keys in the histogram. Begins and ends with a barrier.
__device__ __forceinline__ void choose_digit(Selection& shared, std::uint32_t remaining) {
  constexpr int kOwn = kBins / kThreads;
  static_assert(kOwn == 4);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  __syncthreads();
  const uint4 bins = reinterpret_cast<const uint4*>(shared.histogram)[threadIdx.x];
  const std::uint32_t own[kOwn] = {bins.x, bins.y, bins.z, bins.w}, sum = bins.x + bins.y + bins.z + bins.w;
  std::uint32_t above = sum;  // inclusive suffix sum over lanes
#pragma unroll
  for (int width = 1; width < 32; width *= 2) {
    const std::uint32_t other = __shfl_down_sync(~0u, above, width);
    if (lane + width < 32) above += other;
  }
  if (lane == 0) shared.warp_totals[warp] = above;
  above -= sum;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    if (w > warp) above += shared.warp_totals[w];
  }
  if (above < remaining && above + sum >= remaining) {  // exactly one thread
#pragma unroll
    for (int i = kOwn - 1; i >= 0; --i) {
      if (above < remaining && above + own[i] >= remaining) {
        shared.digit = static_cast<std::uint32_t>(threadIdx.x * kOwn + i);
        shared.above = above;
        shared.count = own[i];
      }
      above += own[i];
    }
  }
  __syncthreads();
}

__device__ __forceinline__ void clear_histogram(Selection& shared) {
  reinterpret_cast<uint4*>(shared.histogram)[threadIdx.x] = make_uint4(0, 0, 0, 0);
  __syncthreads();
}

// work(logit) for all positions below n, some of them on their way at a time.
template <class Work>
__device__ __forceinline__ void each_logit(const float* logits, int n, const Work& work) {
  for (int base = threadIdx.x; base < n; base += kBatch * kThreads) {
    float values[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) values[i] = base + i * kThreads < n ? logits[base + i * kThreads] : 0.0f;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (base + i * kThreads < n) work(values[i]);
    }
  }
}

// grid (heads, rows, layers), kThreads threads; shared memory: candidates, then PageMasks of the reference's pages.
__global__ void __launch_bounds__(kThreads, 3) select_keys_kernel(SelectKeysArguments arguments) {
  extern __shared__ Candidate candidates[];
  __shared__ __align__(16) Selection shared;

  const int head = blockIdx.x, row_index = blockIdx.y, layer = arguments.layer + static_cast<int>(blockIdx.z);
  const QueryRow row = arguments.rows[row_index];
  if (row.request < 0) return;
  const int n = row.position + 1, pages = page_count(n);
  PageMasks masks;
  masks.above = reinterpret_cast<std::uint32_t*>(candidates + kCandidates);
  masks.equal = masks.above + 2 * pages;
  masks.equal_before = masks.equal + 2 * pages;
  const std::int64_t logit_row = (static_cast<std::int64_t>(blockIdx.z) * gridDim.y + row_index) * arguments.shape.heads + head;
  const float* logits = arguments.logits + logit_row * arguments.logit_stride;
  const std::size_t state = reference_index(arguments.shape, row.reference, layer, head);
  std::uint64_t* selected = arguments.reference.selected + state * arguments.reference.mask_pages;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  const std::uint64_t scaled = static_cast<std::uint64_t>(arguments.key_fraction_bp) * static_cast<std::uint64_t>(n);
  const auto budget = static_cast<std::uint32_t>((scaled + kBasisPoints - 1) / kBasisPoints);

  // Threshold: the k-th largest key, digit by digit from the top, over the row until few enough keys share its digits.
  std::uint32_t prefix = 0, prefix_mask = 0, remaining = budget > 0 ? budget : 1;
  const auto decide = [&](int shift) {
    choose_digit(shared, remaining);
    prefix |= shared.digit << shift;
    prefix_mask = ~0u << shift;
    remaining -= shared.above;
  };
  int digit = 0;
  bool finite = true;
  do {
    const int shift = digit_shift(digit);
    clear_histogram(shared);
    each_logit(logits, n, [&](float logit) {
      finite = finite && isfinite(logit);
      const std::uint32_t key = ordered_key(logit);
      if ((key & prefix_mask) == prefix) atomicAdd(&shared.histogram[(key >> shift) & (kBins - 1)], 1u);
    });
    decide(shift);
    ++digit;
  } while (digit < kDigits && shared.count > kCandidates);
  if (!finite && arguments.numeric_fault != nullptr) {
    atomicMin(reinterpret_cast<unsigned long long*>(arguments.numeric_fault),
              static_cast<unsigned long long>(
                  pack_numeric_fault({NumericFaultKind::logit, row.loop, row.request, layer, row.position, head, 0})));
  }

  // Keys above the decided digits are in; those that share them are candidates, or equal to the threshold where all digits are decided.
  const bool decided = digit == kDigits;
  if (threadIdx.x == 0) shared.candidates = 0;
  __syncthreads();
  constexpr int kPagesAtATime = kBatch / 2;
  for (int first = warp * kPagesAtATime; first < pages; first += kWarps * kPagesAtATime) {
    float values[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int position = first * kPageTokens + i * 32 + lane;
      values[i] = position < n ? logits[position] : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int position = first * kPageTokens + i * 32 + lane;
      const std::uint32_t key = ordered_key(values[i]);
      const bool shares = position < n && (key & prefix_mask) == prefix;
      const std::uint32_t above = __ballot_sync(~0u, position < n && (key & prefix_mask) > prefix);
      const std::uint32_t equal = __ballot_sync(~0u, shares && decided);
      if (lane == 0 && first + i / 2 < pages) {
        masks.above[2 * first + i] = above;
        masks.equal[2 * first + i] = equal;
      }
      if (shares && !decided) candidates[atomicAdd(&shared.candidates, 1u)] = {key, position};
    }
  }
  if (!decided) {
    __syncthreads();
    const int count = static_cast<int>(shared.candidates);
    for (; digit < kDigits; ++digit) {
      const int shift = digit_shift(digit);
      clear_histogram(shared);
      for (int i = threadIdx.x; i < count; i += kThreads) {
        const std::uint32_t key = candidates[i].key;
        if ((key & prefix_mask) == prefix) atomicAdd(&shared.histogram[(key >> shift) & (kBins - 1)], 1u);
      }
      decide(shift);
    }
    for (int i = threadIdx.x; i < count; i += kThreads) {
      const Candidate candidate = candidates[i];
      const std::uint32_t bit = 1u << candidate.position % 32;
      if (candidate.key > prefix) atomicOr(&masks.above[candidate.position / 32], bit);
      if (candidate.key == prefix) atomicOr(&masks.equal[candidate.position / 32], bit);
    }
  }
  __syncthreads();

  // Of the equal keys the first `remaining` by position. Exclusive running count of them in page order: chunks of kThreads pages.
  const auto equal_of = [&](int page) { return static_cast<std::uint64_t>(masks.equal[2 * page + 1]) << 32 | masks.equal[2 * page]; };
  std::uint32_t carried = 0;
  for (int base = 0; base < pages; base += kThreads) {
    const int page = base + static_cast<int>(threadIdx.x);
    const std::uint32_t own = page < pages ? static_cast<std::uint32_t>(__popcll(equal_of(page))) : 0u;
    std::uint32_t inclusive = own;
#pragma unroll
    for (int width = 1; width < 32; width *= 2) {
      const std::uint32_t other = __shfl_up_sync(~0u, inclusive, width);
      if (lane >= width) inclusive += other;
    }
    if (lane == 31) shared.warp_totals[warp] = inclusive;
    __syncthreads();
    std::uint32_t before = carried, total = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      if (w < warp) before += shared.warp_totals[w];
      total += shared.warp_totals[w];
    }
    if (page < pages) masks.equal_before[page] = before + inclusive - own;
    carried += total;
    __syncthreads();
  }
  for (int page = threadIdx.x; page < pages; page += kThreads) {
    std::uint64_t equal = equal_of(page);
    std::uint32_t before = masks.equal_before[page];
    std::uint64_t taken = static_cast<std::uint64_t>(masks.above[2 * page + 1]) << 32 | masks.above[2 * page];
    if (arguments.fault == Fault::threshold_tie_by_arrival)
      before = carried - before - static_cast<std::uint32_t>(__popcll(equal));
    for (std::uint32_t i = before; i < remaining && equal != 0; ++i) {
      const std::uint64_t lowest = equal & (~equal + 1);
      taken |= lowest;
      equal ^= lowest;
    }
    selected[page] = taken;
  }
}

}  // namespace

void select_keys(const SelectKeysArguments& arguments, cudaStream_t stream) {
  if (arguments.row_count == 0 || arguments.layer_count == 0) return;
  const std::size_t shared_bytes =
      kCandidateBytes + static_cast<std::size_t>(arguments.reference.mask_pages) * kPageMaskBytes;
  constexpr std::size_t kSharedLimit = 200 * 1024;
  if (shared_bytes > kSharedLimit) {
    throw UnsupportedError("select_keys: rows of up to " + std::to_string(arguments.reference.mask_pages) + " pages need " +
                           std::to_string(shared_bytes) + " bytes of shared memory, at most " + std::to_string(kSharedLimit));
  }
  if (shared_bytes + sizeof(Selection) > 48 * 1024) {  // always the same value: other threads launch the kernel too, with more or fewer bytes
    LOOPGAUGE_CUDA_CHECK(cudaFuncSetAttribute(select_keys_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kSharedLimit)));
  }
  select_keys_kernel<<<dim3(arguments.shape.heads, arguments.row_count, arguments.layer_count), kThreads, shared_bytes, stream>>>(arguments);
  LOOPGAUGE_CUDA_CHECK_LAUNCH("select_keys");
}

}  // namespace loopgauge::optimized
