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
  std::int32_t token;  // INT_MAX: none
};

__device__ Candidate better(Candidate a, Candidate b) {
  if (b.token == INT_MAX) return a;
  if (a.token == INT_MAX) return b;
  if (a.logit != b.logit) return a.logit > b.logit ? a : b;
  return a.token < b.token ? a : b;
}

__device__ Candidate reduce_warp(Candidate value) {
#pragma unroll
  for (int width = 16; width > 0; width /= 2) {
    const Candidate other{__shfl_xor_sync(kWholeWarp, value.logit, width), __shfl_xor_sync(kWholeWarp, value.token, width)};
    value = better(value, other);
  }
  return value;
}

__global__ void __launch_bounds__(kThreads) head_argmax_kernel(const float* __restrict__ logits, std::int32_t* __restrict__ tokens, int vocab) {
  const float* row = logits + static_cast<std::size_t>(blockIdx.x) * vocab;
  Candidate best{0.0f, INT_MAX};
  for (int i = threadIdx.x; i < vocab; i += kThreads) {
    if (row[i] == row[i]) best = better(best, {row[i], i});
  }
  best = reduce_warp(best);
  __shared__ Candidate warps[kThreads / 32];
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = best;
  __syncthreads();
  if (threadIdx.x < 32) {
    best = reduce_warp(threadIdx.x < kThreads / 32 ? warps[threadIdx.x] : Candidate{0.0f, INT_MAX});
    if (threadIdx.x == 0) tokens[blockIdx.x] = best.token == INT_MAX ? 0 : best.token;
  }
}

}  // namespace

void head_argmax(const float* logits, std::int32_t* tokens, int rows, int vocab, cudaStream_t stream) {
  if (rows == 0) return;
  head_argmax_kernel<<<rows, kThreads, 0, stream>>>(logits, tokens, vocab);
  LOOPGAUGE_CUDA_CHECK_LAUNCH("head_argmax");
}

}  // namespace loopgauge::optimized
