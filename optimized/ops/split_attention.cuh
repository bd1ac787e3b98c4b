// SPDX-License-Identifier: Apache-2.0
// The split-KV reader behind attention_decode, reference_statistics, reference_contribution and sparse_correction.
// A CTA reads one split (a range of absolute positions) of one query row and head; a warp owns whole pages of it. Eight lanes share a K/V
// row, each with head_dim / 8 consecutive channels, so a warp has four rows in flight per step. Encoded K is read stream by stream: q·X_hat
// = sum over streams of q·dec, and an absent row simply does not occur in its stream's list. Encoded V is reconstructed value by value.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "models/fault.hpp"
#include "optimized/kv/kernel_fault.hpp"
#include "optimized/kv/kv_layout.hpp"
#include "optimized/kv/numeric_fault.hpp"
#include "optimized/kv/reference_store.hpp"

namespace loopgauge::optimized::split {

inline constexpr int kWarps = 4;
inline constexpr int kThreads = 32 * kWarps;
inline constexpr int kRowLanes = 8;  // lanes of one K/V row
inline constexpr int kRowsPerStep = 32 / kRowLanes;
inline constexpr int kUnroll = 4;  // steps whose loads are issued together

// What a launch of the reader is for.
enum class Purpose {
  attention,     // all keys 0..position
  statistics,    // the same, and the logits row is written
  correction,    // the selected keys
  contribution,  // the selected keys; probabilities come from the logits row and the reference maximum
};

// Partial results: [rows][heads][splits] of {O[head_dim], maximum, sum}, unnormalised.
struct Partials {
  float* output;       // [rows][heads][splits][head_dim]
  float2* statistics;  // [rows][heads][splits] (maximum, sum)
  int splits;          // of the launch
};
inline std::size_t partial_bytes(const KvShape& shape, int row_count, int splits) {
  return static_cast<std::size_t>(row_count) * shape.heads * splits * (shape.head_dim + 2) * sizeof(float);
}
inline Partials partials_at(void* workspace, const KvShape& shape, int row_count, int splits) {
  auto* output = static_cast<float*>(workspace);
  return {output, reinterpret_cast<float2*>(output + static_cast<std::size_t>(row_count) * shape.heads * splits * shape.head_dim), splits};
}

struct Arguments {
  KvView kv;
  int layer;
  const __nv_bfloat16* q;
  std::int64_t q_row_stride;
  const QueryRow* rows;
  ReferenceView reference;
  float* logits;
  std::int64_t logit_stride;
  std::uint64_t* numeric_fault;
  Partials partials;
  Fault fault;
  KernelFault kernel_fault;
};

#ifdef __CUDACC__

template <int kHeadDim>
__device__ __forceinline__ constexpr float score_scale() {
  static_assert(kHeadDim == 64 || kHeadDim == 128);
  return kHeadDim == 64 ? 0.125f : static_cast<float>(0.08838834764831844055);  // RN32(1 / sqrt(D)) from double
}

__device__ __forceinline__ float bf16_low(std::uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float bf16_high(std::uint32_t pair) { return __uint_as_float(pair & 0xFFFF0000u); }

// Nibble j % 4 of a 16-bit half word in bits 4j..4j+3 of `half`, as code * 2^(4j), exactly: 2^23 + n is representable.
template <int kNibble>
__device__ __forceinline__ float shifted_code(std::uint32_t half) {
  return __fsub_rn(__uint_as_float((half & (0xFu << (4 * kNibble))) | 0x4B000000u), 8388608.0f);
}

__device__ __forceinline__ float2 parameter(std::uint32_t word) {  // (minimum, scale)
  return __half22float2(*reinterpret_cast<const __half2*>(&word));
}

__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
  for (int width = 16; width > 0; width /= 2) value = fmaxf(value, __shfl_xor_sync(~0u, value, width));
  return value;
}
__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int width = 16; width > 0; width /= 2) value = __fadd_rn(value, __shfl_xor_sync(~0u, value, width));
  return value;
}

// Writes the positions of the set bits of `mask`, ascending; returns their number. All lanes of the warp call it.
__device__ __forceinline__ int list_bits(std::uint64_t mask, std::uint8_t* list, int lane) {
  __syncwarp();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int bit = lane + 32 * half;
    if ((mask >> bit) & 1u) list[bits_below(mask, bit)] = static_cast<std::uint8_t>(bit);
  }
  __syncwarp();
  return __popcll(mask);
}

// One page of one request as one query sees it.
struct PageReader {
  const PageTableEntry* entry;
  const ActivityMap* map;
  KvShape shape;
  int layer;
  int head;
  int loop;
  int own_row;  // row of the query's own position in this page, or -1
  Fault fault;
  KernelFault kernel_fault;

  __device__ __forceinline__ int plane(int row) const {
    return fault == Fault::loop_off_by_one && row != own_row && loop > 1 ? loop - 1 : loop;
  }
  __device__ __forceinline__ const __nv_bfloat16* bf16_row(KvTensor tensor, int row) const {
    const int resident = resident_loop(*map, row, plane(row));
    return reinterpret_cast<const __nv_bfloat16*>(entry->bf16[resident - 1]) + page_row_offset(shape, layer, tensor, head, row);
  }
  __device__ __forceinline__ int last_stream() const { return fault == Fault::loop_off_by_one && loop > 1 ? loop - 1 : loop; }
  // Rows of `encoded` whose K has a part in stream `stream`.
  __device__ __forceinline__ std::uint64_t stream_rows(std::uint64_t encoded, int stream) const {
    if (fault == Fault::absent_residual_as_code_zero && map->rows[stream - 1] > 0) return encoded;
    return encoded & map->active[stream - 1];
  }
  __device__ __forceinline__ bool present(int row, int stream) const { return (map->active[stream - 1] >> row) & 1u; }
  __device__ __forceinline__ int compact_row(int row, int stream) const {
    const int place = kernel_fault == KernelFault::wrong_compact_rank ? row : bits_below(map->active[stream - 1], row);
    const int compact = static_cast<int>(map->rank[stream - 1]) + place;
    return min(compact, static_cast<int>(map->rows[stream - 1]) - 1);  // the bound matters to a planted fault only
  }
};

// dots[row] = q·K for the listed rows of a BF16 page.
template <int kHeadDim>
__device__ __forceinline__ void dot_bf16(const PageReader& page, const float (&q)[kHeadDim / kRowLanes], const std::uint8_t* list,
                                         int count, float* dots, int lane) {
  constexpr int kVectors = kHeadDim / kRowLanes / 8;
  const int part = lane % kRowLanes, slot = lane / kRowLanes;
  for (int base = 0; base < count; base += kRowsPerStep * kUnroll) {
    uint4 data[kUnroll][kVectors];
    int row[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (base + u * kRowsPerStep >= count) break;
      const int i = base + u * kRowsPerStep + slot;
      row[u] = i < count ? list[i] : -1;
      if (row[u] >= 0) {
        const auto* source = reinterpret_cast<const uint4*>(page.bf16_row(KvTensor::k, row[u])) + part * kVectors;
#pragma unroll
        for (int v = 0; v < kVectors; ++v) data[u][v] = __ldg(source + v);
      } else {
#pragma unroll
        for (int v = 0; v < kVectors; ++v) data[u][v] = make_uint4(0, 0, 0, 0);
      }
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (base + u * kRowsPerStep >= count) break;
      float dot = 0.0f;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const std::uint32_t pairs[4] = {data[u][v].x, data[u][v].y, data[u][v].z, data[u][v].w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          dot = __fmaf_rn(q[8 * v + 2 * i], bf16_low(pairs[i]), dot);
          dot = __fmaf_rn(q[8 * v + 2 * i + 1], bf16_high(pairs[i]), dot);
        }
      }
#pragma unroll
      for (int width = kRowLanes / 2; width > 0; width /= 2) dot = __fadd_rn(dot, __shfl_xor_sync(~0u, dot, width));
      if (part == 0 && row[u] >= 0) dots[row[u]] = dot;
    }
  }
}

// dots[row] += q·dec(K) of one stream for the listed rows.
template <int kHeadDim>
__device__ __forceinline__ void dot_stream(const PageReader& page, int stream, const float (&q)[kHeadDim / kRowLanes],
                                           const std::uint8_t* list, int count, float* dots, int lane) {
  constexpr int kChannels = kHeadDim / kRowLanes;
  constexpr int kWords = kChannels / 8;
  const int part = lane % kRowLanes, slot = lane / kRowLanes;
  const StreamTile tile = stream_tile(page.shape, *page.entry, *page.map, page.layer, stream, KvTensor::k, page.head);
  float folded[kChannels];  // q * scale * 2^(-4 (j mod 4)) of the group in hand: exact, 8 + 11 significant bits
  float bias = 0.0f;        // sum of q * minimum over this lane's channels
  int group = -1;
  for (int base = 0; base < count; base += kRowsPerStep * kUnroll) {
    std::uint32_t words[kUnroll][kWords];
    int row[kUnroll], compact[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (base + u * kRowsPerStep >= count) break;
      const int i = base + u * kRowsPerStep + slot;
      row[u] = i < count ? list[i] : -1;
      compact[u] = row[u] >= 0 ? page.compact_row(row[u], stream) : 0;
      const bool load = row[u] >= 0 && page.present(row[u], stream);
      const auto* source =
          reinterpret_cast<const std::uint32_t*>(tile.payload + static_cast<std::size_t>(compact[u]) * (kHeadDim / 2)) + part * kWords;
#pragma unroll
      for (int w = 0; w < kWords; ++w) words[u][w] = load ? __ldg(source + w) : 0u;
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (base + u * kRowsPerStep >= count) break;
      if (row[u] >= 0 && compact[u] / kGroupSize != group) {
        group = compact[u] / kGroupSize;
        const auto* source =
            reinterpret_cast<const uint4*>(tile.parameters + static_cast<std::size_t>(group) * kHeadDim + part * kChannels);
        bias = 0.0f;
#pragma unroll
        for (int v = 0; v < kChannels / 4; ++v) {
          const uint4 data = __ldg(source + v);
          const std::uint32_t pairs[4] = {data.x, data.y, data.z, data.w};
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float2 minimum_scale = parameter(pairs[i]);
            constexpr float kShift[4] = {1.0f, 1.0f / 16, 1.0f / 256, 1.0f / 4096};
            folded[4 * v + i] = __fmul_rn(__fmul_rn(q[4 * v + i], minimum_scale.y), kShift[i]);
            bias = __fmaf_rn(q[4 * v + i], minimum_scale.x, bias);
          }
        }
      }
      float dot = bias;
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        const std::uint32_t low = words[u][w] & 0xFFFFu, high = words[u][w] >> 16;
        dot = __fmaf_rn(folded[8 * w + 0], shifted_code<0>(low), dot);
        dot = __fmaf_rn(folded[8 * w + 1], shifted_code<1>(low), dot);
        dot = __fmaf_rn(folded[8 * w + 2], shifted_code<2>(low), dot);
        dot = __fmaf_rn(folded[8 * w + 3], shifted_code<3>(low), dot);
        dot = __fmaf_rn(folded[8 * w + 4], shifted_code<0>(high), dot);
        dot = __fmaf_rn(folded[8 * w + 5], shifted_code<1>(high), dot);
        dot = __fmaf_rn(folded[8 * w + 6], shifted_code<2>(high), dot);
        dot = __fmaf_rn(folded[8 * w + 7], shifted_code<3>(high), dot);
        if (page.kernel_fault == KernelFault::half_precision_stream_dots) dot = __half2float(__float2half_rn(dot));
      }
#pragma unroll
      for (int width = kRowLanes / 2; width > 0; width /= 2) dot = __fadd_rn(dot, __shfl_xor_sync(~0u, dot, width));
      if (part == 0 && row[u] >= 0) dots[row[u]] = __fadd_rn(dots[row[u]], dot);
    }
  }
}

// accumulator[channel] += sum of weights[row] * V over the listed rows of a BF16 page that fall to this lane's row slot.
template <int kHeadDim>
__device__ __forceinline__ void add_bf16(const PageReader& page, const std::uint8_t* list, int count, const float* weights,
                                         float (&accumulator)[kHeadDim / kRowLanes], int lane) {
  constexpr int kVectors = kHeadDim / kRowLanes / 8;
  const int part = lane % kRowLanes, slot = lane / kRowLanes;
  for (int base = 0; base < count; base += kRowsPerStep * kUnroll) {
    uint4 data[kUnroll][kVectors];
    float weight[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int i = base + u * kRowsPerStep + slot;
      weight[u] = 0.0f;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) data[u][v] = make_uint4(0, 0, 0, 0);
      if (i < count) {
        const int row = list[i];
        weight[u] = weights[row];
        const auto* source = reinterpret_cast<const uint4*>(page.bf16_row(KvTensor::v, row)) + part * kVectors;
#pragma unroll
        for (int v = 0; v < kVectors; ++v) data[u][v] = __ldg(source + v);
      }
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const std::uint32_t pairs[4] = {data[u][v].x, data[u][v].y, data[u][v].z, data[u][v].w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          accumulator[8 * v + 2 * i] = __fmaf_rn(weight[u], bf16_low(pairs[i]), accumulator[8 * v + 2 * i]);
          accumulator[8 * v + 2 * i + 1] = __fmaf_rn(weight[u], bf16_high(pairs[i]), accumulator[8 * v + 2 * i + 1]);
        }
      }
    }
  }
}

// The same for encoded rows: weight * X_hat, with X_hat as the specification rounds it (kv/reconstruct.cuh). Folding the scale into the
// weight would save an operation a value but leave the rounding of sum p * minimum in channels where X_hat itself is small.
template <int kHeadDim>
__device__ __forceinline__ void add_encoded(const PageReader& page, const std::uint8_t* list, int count, const float* weights,
                                            float (&accumulator)[kHeadDim / kRowLanes], int lane) {
  constexpr int kChannels = kHeadDim / kRowLanes;
  constexpr int kRows = 2;  // steps in flight: reconstructed values take registers
  constexpr int kWords = kChannels / 8;
  constexpr int kHalves = kHeadDim / kGroupSize;
  const int part = lane % kRowLanes, slot = lane / kRowLanes;
  const int half = part * kChannels / kGroupSize;
  for (int base = 0; base < count; base += kRowsPerStep * kRows) {
    float weight[kRows];
    float value[kRows][kChannels];
#pragma unroll 1
    for (int stream = 1; stream <= page.last_stream(); ++stream) {
      const StreamTile tile = stream_tile(page.shape, *page.entry, *page.map, page.layer, stream, KvTensor::v, page.head);
      std::uint32_t words[kRows][kWords];
      float2 minimum_scale[kRows];
      bool add[kRows];
#pragma unroll
      for (int u = 0; u < kRows; ++u) {
        const int i = base + u * kRowsPerStep + slot;
        const int row = i < count ? list[i] : 0;
        add[u] = i < count && page.present(row, stream);
        if (stream == 1) weight[u] = i < count ? weights[row] : 0.0f;
        minimum_scale[u] = make_float2(0.0f, 0.0f);
#pragma unroll
        for (int w = 0; w < kWords; ++w) words[u][w] = 0u;
        if (add[u]) {
          const int compact = page.compact_row(row, stream);
          minimum_scale[u] = parameter(__ldg(tile.parameters + static_cast<std::size_t>(compact) * kHalves + half));
          const auto* source =
              reinterpret_cast<const std::uint32_t*>(tile.payload + static_cast<std::size_t>(compact) * (kHeadDim / 2)) + part * kWords;
#pragma unroll
          for (int w = 0; w < kWords; ++w) words[u][w] = __ldg(source + w);
        }
      }
#pragma unroll
      for (int u = 0; u < kRows; ++u) {
        if (stream > 1 && !add[u]) continue;
        const float scale = minimum_scale[u].y, scale1 = scale * (1.0f / 16), scale2 = scale * (1.0f / 256), scale3 = scale * (1.0f / 4096);
#pragma unroll
        for (int w = 0; w < kWords; ++w) {
          const std::uint32_t low = words[u][w] & 0xFFFFu, high = words[u][w] >> 16;
          // code * scale is exact, so the fused addition rounds as the specification's product and sum do.
          const float decoded[8] = {
              __fmaf_rn(shifted_code<0>(low), scale, minimum_scale[u].x),   __fmaf_rn(shifted_code<1>(low), scale1, minimum_scale[u].x),
              __fmaf_rn(shifted_code<2>(low), scale2, minimum_scale[u].x),  __fmaf_rn(shifted_code<3>(low), scale3, minimum_scale[u].x),
              __fmaf_rn(shifted_code<0>(high), scale, minimum_scale[u].x),  __fmaf_rn(shifted_code<1>(high), scale1, minimum_scale[u].x),
              __fmaf_rn(shifted_code<2>(high), scale2, minimum_scale[u].x), __fmaf_rn(shifted_code<3>(high), scale3, minimum_scale[u].x)};
#pragma unroll
          for (int j = 0; j < 8; ++j) value[u][8 * w + j] = stream == 1 ? decoded[j] : __fadd_rn(value[u][8 * w + j], decoded[j]);
        }
      }
    }
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
#pragma unroll
      for (int c = 0; c < kChannels; ++c) accumulator[c] = __fmaf_rn(weight[u], value[u][c], accumulator[c]);
    }
  }
}

// grid (splits, heads, rows), kThreads threads. A split without keys writes sum 0 and maximum -inf.
template <int kHeadDim, int kSplitPages, Purpose kPurpose>
__global__ void __launch_bounds__(kThreads, 4) split_attention_kernel(Arguments arguments) {
  constexpr int kChannels = kHeadDim / kRowLanes;
  constexpr int kWarpPages = kSplitPages / kWarps;
  constexpr bool kSelected = kPurpose == Purpose::correction || kPurpose == Purpose::contribution;
  const float kMinusInfinity = __int_as_float(0xFF800000);

  __shared__ float scores[kSplitPages * kPageTokens];  // dots, then logits, then exp(logit - maximum)
  __shared__ float outputs[kWarps][kHeadDim];
  __shared__ float warp_maximum[kWarps], warp_sums[kWarps];
  __shared__ std::uint8_t lists[kWarps][kPageTokens];

  const int split_index = blockIdx.x, head = blockIdx.y, row_index = blockIdx.z;
  const QueryRow row = arguments.rows[row_index];
  if (row.request < 0 || split_index * kSplitPages * kPageTokens > row.position) return;
  const KvShape& shape = arguments.kv.shape;
  const RequestTable request = arguments.kv.requests[row.request];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int part = lane % kRowLanes;
  std::uint8_t* list = lists[warp];

  const int reference_slot =
      kPurpose == Purpose::correction && arguments.kernel_fault == KernelFault::stale_reference_slot ? row.reference ^ 1 : row.reference;
  const std::size_t state =
      kSelected || kPurpose == Purpose::statistics ? reference_index(shape, reference_slot, arguments.layer, head) : 0;
  float* logits = nullptr;
  if constexpr (kPurpose == Purpose::statistics || kPurpose == Purpose::contribution) {
    logits = arguments.logits + (static_cast<std::int64_t>(row_index) * shape.heads + head) * arguments.logit_stride;
  }

  const auto keys_of = [&](int page) {
    std::uint64_t keys = page_mask(page, 0, row.position + 1);
    if constexpr (kSelected) {
      if (keys != 0) keys &= arguments.reference.selected[state * arguments.reference.mask_pages + page];
    }
    return keys;
  };
  const auto page_of = [&](int page) {
    return PageReader{request.pages + page,
                      request.maps + page,
                      shape,
                      arguments.layer,
                      head,
                      row.loop,
                      row.position / kPageTokens == page ? row.position % kPageTokens : -1,
                      arguments.fault,
                      arguments.kernel_fault};
  };

  const auto encoded_rows = [&](int page) {
    int frontier = row.encoded_frontier;
    if (arguments.kernel_fault == KernelFault::tail_read_as_encoded && request.pages[page].base_payload != 0) frontier += kPageTokens;
    return page_mask(page, 0, frontier);
  };

  float maximum = kMinusInfinity;
  if constexpr (kPurpose != Purpose::contribution) {
    float q[kChannels];
    {
      const auto* source =
          reinterpret_cast<const uint4*>(arguments.q + row_index * arguments.q_row_stride + head * kHeadDim) + part * (kChannels / 8);
#pragma unroll
      for (int v = 0; v < kChannels / 8; ++v) {
        const uint4 data = source[v];
        const std::uint32_t pairs[4] = {data.x, data.y, data.z, data.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          q[8 * v + 2 * i] = bf16_low(pairs[i]);
          q[8 * v + 2 * i + 1] = bf16_high(pairs[i]);
        }
      }
    }
    for (int i = 0; i < kWarpPages; ++i) {
      const int local = i * kWarps + warp, page = split_index * kSplitPages + local;
      float* dots = scores + local * kPageTokens;
      const std::uint64_t keys = keys_of(page);
      dots[lane] = 0.0f;
      dots[lane + 32] = 0.0f;
      __syncwarp();
      if (keys != 0) {
        const PageReader reader = page_of(page);
        const std::uint64_t encoded = keys & encoded_rows(page);
        const std::uint64_t tail = keys & ~encoded;
        if (tail != 0) {
          const int count = list_bits(tail, list, lane);
          dot_bf16<kHeadDim>(reader, q, list, count, dots, lane);
        }
        if (encoded != 0) {
#pragma unroll 1
          for (int stream = 1; stream <= reader.last_stream(); ++stream) {
            const int count = list_bits(reader.stream_rows(encoded, stream), list, lane);
            if (count > 0) dot_stream<kHeadDim>(reader, stream, q, list, count, dots, lane);
          }
        }
      }
      __syncwarp();
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int key = lane + 32 * half;
        float logit = kMinusInfinity;
        if ((keys >> key) & 1u) {
          logit = __fmul_rn(dots[key], score_scale<kHeadDim>());
          if constexpr (kPurpose == Purpose::statistics) {
            logits[page * kPageTokens + key] = logit;
            if (!isfinite(logit) && arguments.numeric_fault != nullptr) {
              atomicMin(reinterpret_cast<unsigned long long*>(arguments.numeric_fault),
                        static_cast<unsigned long long>(
                            pack_numeric_fault({NumericFaultKind::logit, row.loop, row.request, arguments.layer, row.position, head, 0})));
            }
          }
        }
        dots[key] = logit;
        maximum = fmaxf(maximum, logit);
      }
    }
    maximum = warp_max(maximum);
    if (lane == 0) warp_maximum[warp] = maximum;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < kWarps; ++w) maximum = fmaxf(maximum, warp_maximum[w]);
  } else {
    maximum = arguments.reference.maximum[state];
    for (int i = 0; i < kWarpPages; ++i) {
      const int local = i * kWarps + warp, page = split_index * kSplitPages + local;
      const std::uint64_t keys = keys_of(page);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int key = lane + 32 * half;
        scores[local * kPageTokens + key] = (keys >> key) & 1u ? logits[page * kPageTokens + key] : kMinusInfinity;
      }
    }
  }

  float sum = 0.0f;
  float accumulator[kChannels] = {};
  for (int i = 0; i < kWarpPages; ++i) {
    const int local = i * kWarps + warp, page = split_index * kSplitPages + local;
    float* weights = scores + local * kPageTokens;
    const std::uint64_t keys = keys_of(page);
    if (keys == 0) continue;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int key = lane + 32 * half;
      const float weight = (keys >> key) & 1u ? expf(__fsub_rn(weights[key], maximum)) : 0.0f;
      weights[key] = weight;
      sum = __fadd_rn(sum, weight);
    }
    __syncwarp();
    const PageReader reader = page_of(page);
    const std::uint64_t encoded = keys & encoded_rows(page);
    const std::uint64_t tail = keys & ~encoded;
    if (encoded != 0) {
      const int count = list_bits(encoded, list, lane);
      add_encoded<kHeadDim>(reader, list, count, weights, accumulator, lane);
    }
    if (tail != 0) {
      const int count = list_bits(tail, list, lane);
      add_bf16<kHeadDim>(reader, list, count, weights, accumulator, lane);
    }
  }
  sum = warp_sum(sum);
#pragma unroll
  for (int c = 0; c < kChannels; ++c) {
#pragma unroll
    for (int width = kRowLanes; width < 32; width *= 2)
      accumulator[c] = __fadd_rn(accumulator[c], __shfl_xor_sync(~0u, accumulator[c], width));
  }
  if (lane < kRowLanes) {
#pragma unroll
    for (int c = 0; c < kChannels; ++c) outputs[warp][part * kChannels + c] = accumulator[c];
  }
  if (lane == 0) warp_sums[warp] = sum;
  __syncthreads();

  const std::size_t partial = (static_cast<std::size_t>(row_index) * shape.heads + head) * arguments.partials.splits + split_index;
  for (int channel = threadIdx.x; channel < kHeadDim; channel += kThreads) {
    float total = outputs[0][channel];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) total = __fadd_rn(total, outputs[w][channel]);
    arguments.partials.output[partial * kHeadDim + channel] = total;
  }
  if (threadIdx.x == 0) {
    float total = warp_sums[0];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) total = __fadd_rn(total, warp_sums[w]);
    arguments.partials.statistics[partial] = make_float2(maximum, total);
  }
}

// Ascending combination of the splits of one (row, head): the thread's channel of sum over splits of exp(maximum_s - maximum) * O_s.
// All threads of the CTA call it; `weights` is shared memory of `splits` floats.
template <int kHeadDim>
__device__ __forceinline__ float combine_splits(const Partials& partials, std::size_t first, int splits, float* weights, float& maximum,
                                                float& sum) {
  maximum = __int_as_float(0xFF800000);
  for (int s = 0; s < splits; ++s) maximum = fmaxf(maximum, partials.statistics[first + s].x);
  for (int s = threadIdx.x; s < splits; s += blockDim.x) {
    const float split_maximum = partials.statistics[first + s].x;
    weights[s] = split_maximum == __int_as_float(0xFF800000) ? 0.0f : expf(__fsub_rn(split_maximum, maximum));
  }
  __syncthreads();
  sum = 0.0f;
  float output = 0.0f;
  for (int s = 0; s < splits; ++s) {
    sum = __fmaf_rn(weights[s], partials.statistics[first + s].y, sum);
    if (weights[s] != 0.0f) output = __fmaf_rn(weights[s], partials.output[(first + s) * kHeadDim + threadIdx.x], output);
  }
  return output;
}

#endif  // __CUDACC__

}  // namespace loopgauge::optimized::split
