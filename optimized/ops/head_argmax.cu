// SPDX-License-Identifier: Apache-2.0
#include "optimized/ops/head_argmax.cuh"

#include <climits>

#include "optimized/runtime/cuda_check.hpp"

namespace loopgauge::optimized {
namespace {

constexpr int kThreads = 512;
constexpr unsigned kWholeWarp = 0xFFFFFFFFu;

struct Candidate {
  float logit;
  std::int32_t token;          // INT_MAX: none
  std::int32_t non_finite;     // INT_MAX: none
};

__device__ Candidate better(Candidate a, Candidate b) {
  const std::int32_t non_finite = min(a.non_finite, b.non_finite);
  const bool take_b = b.token != INT_MAX && (a.token == INT_MAX || b.logit > a.logit || (b.logit == a.logit && b.token < a.token));
  return {take_b ? b.logit : a.logit, take_b ? b.token : a.token, non_finite};
}

__device__ Candidate reduce_warp(Candidate value) {
#pragma unroll
  for (int width = 16; width > 0; width /= 2) {
    value = better(value, {__shfl_xor_sync(kWholeWarp, value.logit, width), __shfl_xor_sync(kWholeWarp, value.token, width),
                           __shfl_xor_sync(kWholeWarp, value.non_finite, width)});
  }
  return value;
}

__global__ void __launch_bounds__(kThreads) head_argmax_kernel(const float* __restrict__ logits, HeadChoice* __restrict__ choices, int vocab) {
  const float* row = logits + static_cast<std::size_t>(blockIdx.x) * vocab;
  Candidate best{0.0f, INT_MAX, INT_MAX};
  for (int i = threadIdx.x; i < vocab; i += kThreads) best = better(best, {row[i], i, isfinite(row[i]) ? INT_MAX : i});
  best = reduce_warp(best);
  __shared__ Candidate warps[kThreads / 32];
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = best;
  __syncthreads();
  if (threadIdx.x < 32) {
    best = reduce_warp(threadIdx.x < kThreads / 32 ? warps[threadIdx.x] : Candidate{0.0f, INT_MAX, INT_MAX});
    if (threadIdx.x == 0) choices[blockIdx.x] = {best.token, best.non_finite == INT_MAX ? -1 : best.non_finite};
  }
}

__global__ void keep_tokens_kernel(const HeadChoice* choices, const std::int32_t* slots, std::int32_t* tokens, int rows) {
  const int row = blockIdx.x * blockDim.x + threadIdx.x;
  if (row < rows && slots[row] >= 0) tokens[slots[row]] = choices[row].token;
}

}  // namespace

void keep_tokens(const HeadChoice* choices, const std::int32_t* slots, std::int32_t* tokens, int rows, cudaStream_t stream) {
  if (rows == 0) return;
  keep_tokens_kernel<<<(rows + 127) / 128, 128, 0, stream>>>(choices, slots, tokens, rows);
  LOOPGAUGE_CUDA_CHECK_LAUNCH("keep_tokens");
}

void head_argmax(const float* logits, HeadChoice* choices, int rows, int vocab, cudaStream_t stream) {
  if (rows == 0) return;
  head_argmax_kernel<<<rows, kThreads, 0, stream>>>(logits, choices, vocab);
  LOOPGAUGE_CUDA_CHECK_LAUNCH("head_argmax");
}

}  // namespace loopgauge::optimized
