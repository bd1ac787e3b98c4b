// SPDX-License-Identifier: Apache-2.0
#include "optimized/ops/draw_tokens.cuh"

#include <cmath>

#include "optimized/ops/elementary.cuh"
#include "optimized/ops/numeric.cuh"
#include "optimized/runtime/cuda_check.hpp"

namespace loopgauge::optimized {
namespace {

constexpr int kThreads = 512;
constexpr unsigned kWholeWarp = 0xFFFFFFFFu;

struct Scratch {
  float values[kThreads];
  float result;
  std::int32_t token, last;
  bool found;
};

__device__ float block_maximum(float value, Scratch& scratch) {
#pragma unroll
  for (int width = 16; width > 0; width /= 2) value = fmaxf(value, __shfl_xor_sync(kWholeWarp, value, width));
  if (threadIdx.x % 32 == 0) scratch.values[threadIdx.x / 32] = value;
  __syncthreads();
  if (threadIdx.x < 32) {
    value = threadIdx.x < kThreads / 32 ? scratch.values[threadIdx.x] : -INFINITY;
#pragma unroll
    for (int width = 16; width > 0; width /= 2) value = fmaxf(value, __shfl_xor_sync(kWholeWarp, value, width));
    if (threadIdx.x == 0) scratch.result = value;
  }
  __syncthreads();
  return scratch.result;
}

// lane_sum (S-SUM-2) of weight(v), v in [0, vocab); every thread gets it.
template <class Weight>
__device__ float lane_sum(int vocab, Weight weight, Scratch& scratch) {
  if (threadIdx.x < 32) {
    float lane = 0.0f;
    if (threadIdx.x < kLanes) {
      for (int v = threadIdx.x; v < vocab; v += kLanes) lane = __fadd_rn(lane, weight(v));
    }
    lane = reduce_lanes(lane, kWholeWarp);
    if (threadIdx.x == 0) scratch.result = lane;
  }
  __syncthreads();
  const float sum = scratch.result;
  __syncthreads();
  return sum;
}

// The first id with level < running sum of the weights, else the last with a weight above 0 (S-SAMP-3). Every thread gets it.
template <class Weight>
__device__ std::int32_t inverse_cdf(int vocab, Weight weight, float level, Scratch& scratch) {
  float running = 0.0f;
  if (threadIdx.x == 0) {
    scratch.found = false;
    scratch.last = 0;
  }
  for (int base = 0; base < vocab; base += kThreads) {
    const int v = base + threadIdx.x;
    scratch.values[threadIdx.x] = v < vocab ? weight(v) : 0.0f;
    __syncthreads();
    if (threadIdx.x == 0) {
      const int count = min(kThreads, vocab - base);
      for (int i = 0; i < count; ++i) {
        const float w = scratch.values[i];
        running = __fadd_rn(running, w);
        if (level < running) {
          scratch.found = true;
          scratch.token = base + i;
          break;
        }
        if (w > 0.0f) scratch.last = base + i;
      }
    }
    __syncthreads();
    if (scratch.found) return scratch.token;
  }
  return scratch.last;
}

__global__ void __launch_bounds__(kThreads)
    draw_tokens_kernel(const float* logits, const TokenDraw* draws, HeadChoice* choices, std::int32_t* confirmed, int vocab) {
  __shared__ Scratch scratch;
  const int row = blockIdx.x;
  const TokenDraw draw = draws[row];
  if (draw.temperature == 0.0f) return;
  const float* z = logits + static_cast<std::size_t>(row) * vocab;
  float* p = draw.distribution;
  float maximum = -INFINITY;
  for (int v = threadIdx.x; v < vocab; v += kThreads) maximum = fmaxf(maximum, __fdiv_rn(z[v], draw.temperature));
  maximum = block_maximum(maximum, scratch);
  for (int v = threadIdx.x; v < vocab; v += kThreads) p[v] = exp_binary32(__fsub_rn(__fdiv_rn(z[v], draw.temperature), maximum));
  __syncthreads();
  const float total = lane_sum(vocab, [p](int v) { return p[v]; }, scratch);
  for (int v = threadIdx.x; v < vocab; v += kThreads) p[v] = __fdiv_rn(p[v], total);
  __syncthreads();

  std::int32_t token;
  bool accepted = false;
  if (draw.candidate < 0) {
    token = inverse_cdf(vocab, [p](int v) { return p[v]; }, draw.draw, scratch);
  } else {
    const float* q = draw.draft;
    const std::int32_t candidate = draw.candidate;
    accepted = __fmul_rn(draw.acceptance, q == nullptr ? 1.0f : q[candidate]) < p[candidate];
    if (accepted) {
      token = candidate;
    } else {
      const auto residual = [p, q, candidate](int v) {
        const float of_draft = q != nullptr ? q[v] : v == candidate ? 1.0f : 0.0f;
        return fmaxf(__fsub_rn(p[v], of_draft), 0.0f);
      };
      const float left = lane_sum(vocab, residual, scratch);
      token = left == 0.0f ? inverse_cdf(vocab, [p](int v) { return p[v]; }, draw.residual, scratch)
                           : inverse_cdf(vocab, residual, __fmul_rn(draw.residual, left), scratch);
    }
  }
  if (threadIdx.x == 0) {
    choices[row].token = token;
    if (confirmed != nullptr) confirmed[row] = accepted;
  }
}

}  // namespace

void draw_tokens(const float* logits, const TokenDraw* draws, HeadChoice* choices, std::int32_t* confirmed, int rows, int vocab, cudaStream_t stream) {
  if (rows == 0) return;
  draw_tokens_kernel<<<rows, kThreads, 0, stream>>>(logits, draws, choices, confirmed, vocab);
  LOOPGAUGE_CUDA_CHECK_LAUNCH("draw_tokens");
}

}  // namespace loopgauge::optimized
