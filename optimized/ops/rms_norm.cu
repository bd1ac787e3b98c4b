// SPDX-License-Identifier: Apache-2.0
#include "optimized/ops/rms_norm.cuh"

#include <string>

#include "optimized/ops/row_norm.cuh"
#include "optimized/runtime/cuda_check.hpp"

namespace loopgauge::optimized {
namespace {

enum class Form { norm, norm_and_add, norm_add_and_norm };

constexpr int kFewPieces = 2;
constexpr int kMostPieces = kMaxNormWidth / 8 / kRowThreads;

// kPieces: 16-byte pieces of a row that a thread has at most. `output` is the residual where there is one.
template <Form kForm, int kPieces>
__global__ void __launch_bounds__(kRowThreads) rms_norm_kernel(const Bfloat16* input, const Bfloat16* __restrict__ weight, Bfloat16* output,
                                                               const Bfloat16* __restrict__ next_weight, Bfloat16* __restrict__ next_output,
                                                               int hidden, float epsilon) {
  extern __shared__ __align__(16) Bfloat16 row[];
  union Piece {
    uint4 vector;
    std::uint32_t pairs[4];
  };
  const std::size_t offset = static_cast<std::size_t>(blockIdx.x) * hidden;
  auto* const pieces = reinterpret_cast<uint4*>(row);
  const auto each_piece = [&](auto&& work) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int piece = threadIdx.x + i * kRowThreads;
      if (piece < hidden / 8) work(i, piece);
    }
  };
  const auto normed = [&](int piece, float inverse, const Bfloat16* weights) {
    Piece w, r;
    w.vector = reinterpret_cast<const uint4*>(weights)[piece];
    r.vector = pieces[piece];
#pragma unroll
    for (int k = 0; k < 4; ++k) r.pairs[k] = normalized_pair(r.pairs[k], inverse, w.pairs[k]);
    return r;
  };
  Piece kept[kPieces];
  each_piece([&](int i, int piece) {
    pieces[piece] = reinterpret_cast<const uint4*>(input + offset)[piece];
    if constexpr (kForm != Form::norm) kept[i].vector = reinterpret_cast<const uint4*>(output + offset)[piece];
  });
  __syncthreads();
  const float inverse = inverse_rms(row, hidden, epsilon);
  each_piece([&](int i, int piece) {
    Piece result = normed(piece, inverse, weight);
    if constexpr (kForm != Form::norm) {
#pragma unroll
      for (int k = 0; k < 4; ++k) result.pairs[k] = added_pair(kept[i].pairs[k], result.pairs[k]);
    }
    reinterpret_cast<uint4*>(output + offset)[piece] = result.vector;
    if constexpr (kForm == Form::norm_add_and_norm) pieces[piece] = result.vector;
  });
  if constexpr (kForm == Form::norm_add_and_norm) {
    __syncthreads();
    const float next_inverse = inverse_rms(row, hidden, epsilon);
    each_piece([&](int, int piece) { reinterpret_cast<uint4*>(next_output + offset)[piece] = normed(piece, next_inverse, next_weight).vector; });
  }
}

template <Form kForm>
void launch(const Bfloat16* input, const Bfloat16* weight, Bfloat16* output, const Bfloat16* next_weight, Bfloat16* next_output, int rows, int hidden,
            float epsilon, cudaStream_t stream) {
  const auto kernel = hidden / 8 <= kFewPieces * kRowThreads ? rms_norm_kernel<kForm, kFewPieces> : rms_norm_kernel<kForm, kMostPieces>;
  kernel<<<rows, kRowThreads, hidden * sizeof(Bfloat16), stream>>>(input, weight, output, next_weight, next_output, hidden, epsilon);
  LOOPGAUGE_CUDA_CHECK_LAUNCH("rms_norm");
}

void require_width(int hidden) {
  if (hidden <= 0 || hidden % 8 != 0 || hidden > kMaxNormWidth) {
    throw UnsupportedError("rms_norm: hidden = " + std::to_string(hidden) + " is not a multiple of 8 of at most " + std::to_string(kMaxNormWidth));
  }
}

}  // namespace

void rms_norm(const Bfloat16* input, const Bfloat16* weight, Bfloat16* output, int rows, int hidden, float epsilon, cudaStream_t stream) {
  require_width(hidden);
  if (rows == 0) return;
  launch<Form::norm>(input, weight, output, nullptr, nullptr, rows, hidden, epsilon, stream);
}

void rms_norm_residual_add(const Bfloat16* input, const Bfloat16* weight, Bfloat16* residual, int rows, int hidden, float epsilon,
                           cudaStream_t stream) {
  require_width(hidden);
  if (rows == 0) return;
  launch<Form::norm_and_add>(input, weight, residual, nullptr, nullptr, rows, hidden, epsilon, stream);
}

void rms_norm_residual_add_rms_norm(const Bfloat16* input, const Bfloat16* weight, Bfloat16* residual, const Bfloat16* next_weight, Bfloat16* output,
                                    int rows, int hidden, float epsilon, cudaStream_t stream) {
  require_width(hidden);
  if (rows == 0) return;
  launch<Form::norm_add_and_norm>(input, weight, residual, next_weight, output, rows, hidden, epsilon, stream);
}

}  // namespace loopgauge::optimized
