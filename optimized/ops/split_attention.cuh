// SPDX-License-Identifier: Apache-2.0
// The split-KV reader behind attention_decode, reference_statistics, reference_contribution and sparse_correction.
// A CTA reads one split (a range of absolute positions) of one query row and head; a warp owns whole pages of it. Eight lanes share a K/V
// row, each with head_dim / 8 consecutive channels, so a warp has four rows in flight per step. BF16 rows are read plane by plane and
// encoded ones stream by stream: q·X_hat = sum over streams of q·dec, and the same for p·X_hat; a row that is absent from a stream does not
// occur in its list.
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

// Rows of one page that one pass reads, in ascending order: entry = row in page | place << 8, where place counts the rows of the stream
// before it in this page. kAbsent marks a row that is not in the stream (a planted fault lists those).
using RowEntry = std::uint16_t;
inline constexpr RowEntry kAbsent = 0x8000;
__device__ __forceinline__ int entry_row(RowEntry entry) { return entry & 63; }
__device__ __forceinline__ int entry_place(RowEntry entry) { return entry >> 8 & 127; }

// Lists the set bits of `mask`; places count the set bits of `active`. Returns their number. All lanes of the warp call it.
__device__ __forceinline__ int list_rows(std::uint64_t mask, std::uint64_t active, int last_place, bool place_is_row, RowEntry* list,
                                         int lane) {
  __syncwarp();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int bit = lane + 32 * half;
    if ((mask >> bit) & 1u) {
      const int place = min(place_is_row ? bit : bits_below(active, bit), last_place);  // the bound matters to planted faults only
      list[bits_below(mask, bit)] = static_cast<RowEntry>(bit | place << 8 | ((active >> bit) & 1u ? 0 : kAbsent));
    }
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
  std::uint64_t own_row;  // bit of the query's own position, if it lies in this page
  Fault fault;
  KernelFault kernel_fault;

  __device__ __forceinline__ int history_loop() const { return fault == Fault::loop_off_by_one && loop > 1 ? loop - 1 : loop; }

  // Calls pass(plane, rows) for the BF16 planes that hold the logical versions of `rows`, deepest first.
  template <class Pass>
  __device__ __forceinline__ void for_each_plane(std::uint64_t rows, Pass&& pass) const {
    std::uint64_t remaining = rows;
    for (int plane = loop; plane >= 1 && remaining != 0; --plane) {
      std::uint64_t resident = plane == 1 ? remaining : remaining & map->active[plane - 1];
      if (plane > history_loop()) resident &= own_row;
      if (resident != 0) pass(plane, resident);
      remaining &= ~resident;
    }
  }
  __device__ __forceinline__ const __nv_bfloat16* plane_tile(int plane, KvTensor tensor) const {
    return reinterpret_cast<const __nv_bfloat16*>(entry->bf16[plane - 1]) + page_tile_offset(shape, layer, tensor, head);
  }

  // Lists the rows of `encoded` that stream `stream` contributes to.
  __device__ __forceinline__ int list_stream(std::uint64_t encoded, int stream, KvTensor tensor, RowEntry* list, int lane) const {
    const std::uint64_t active = map->active[stream - 1];
    const int last_place = static_cast<int>(map->rows[stream - 1]) - 1 - static_cast<int>(map->rank[stream - 1]);
    const bool absent_too = fault == Fault::absent_residual_as_code_zero && tensor == KvTensor::k && map->rows[stream - 1] > 0;
    return list_rows(absent_too ? encoded : encoded & active, active, max(last_place, 0), kernel_fault == KernelFault::wrong_compact_rank,
                     list, lane);
  }
};

// The sum over the eight lanes of a row, for kUnroll rows at once: every exchange halves the values a lane holds. Lane part p ends with the
// row of step reduced_step(p).
static_assert(kUnroll == 4 && kRowLanes == 8);
__device__ __forceinline__ int reduced_step(int part) { return (part & 4) / 2 + (part & 2) / 2; }
__device__ __forceinline__ float reduce_rows(const float (&dots)[kUnroll], int part) {
  const bool upper = part & 4, odd = part & 2;
  const float first = __fadd_rn(upper ? dots[2] : dots[0], __shfl_xor_sync(~0u, upper ? dots[0] : dots[2], 4));
  const float second = __fadd_rn(upper ? dots[3] : dots[1], __shfl_xor_sync(~0u, upper ? dots[1] : dots[3], 4));
  const float sum = __fadd_rn(odd ? second : first, __shfl_xor_sync(~0u, odd ? first : second, 2));
  return __fadd_rn(sum, __shfl_xor_sync(~0u, sum, 1));
}

// dots[row] = q·K for the listed rows of a BF16 tile [64, head_dim].
template <int kHeadDim>
__device__ __forceinline__ void dot_bf16(const __nv_bfloat16* tile, const float (&q)[kHeadDim / kRowLanes], const RowEntry* list, int count,
                                         float* dots, int lane) {
  constexpr int kVectors = kHeadDim / kRowLanes / 8;
  const int part = lane % kRowLanes, slot = lane / kRowLanes;
  const auto* source = reinterpret_cast<const uint4*>(tile) + part * kVectors;
  for (int base = 0; base < count; base += kRowsPerStep * kUnroll) {
    uint4 data[kUnroll][kVectors];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int i = base + u * kRowsPerStep + slot;
      const int row = i < count ? entry_row(list[i]) : 0;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        data[u][v] = i < count ? __ldg(source + row * (kHeadDim / 8) + v) : make_uint4(0, 0, 0, 0);
      }
    }
    float sums[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
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
      sums[u] = dot;
    }
    const float dot = reduce_rows(sums, part);
    const int i = base + reduced_step(part) * kRowsPerStep + slot;
    if (part % 2 == 0 && i < count) dots[entry_row(list[i])] = dot;
  }
}

// dots[row] += q·dec(K) of one stream for the listed rows. The scale is folded into q: q * scale and q * minimum are exact (8 + 11 bits).
template <int kHeadDim>
__device__ __forceinline__ void dot_stream(const PageReader& page, int stream, const float (&q)[kHeadDim / kRowLanes], const RowEntry* list,
                                           int count, float* dots, int lane) {
  constexpr int kChannels = kHeadDim / kRowLanes;
  constexpr int kWords = kChannels / 8;
  const int part = lane % kRowLanes, slot = lane / kRowLanes;
  const StreamTile tile = stream_tile(page.shape, *page.entry, *page.map, page.layer, stream, KvTensor::k, page.head);
  const int rank = static_cast<int>(page.map->rank[stream - 1]);
  const bool half_precision = page.kernel_fault == KernelFault::half_precision_stream_dots;
  const auto* payload =
      reinterpret_cast<const std::uint32_t*>(tile.payload + static_cast<std::size_t>(rank) * (kHeadDim / 2)) + part * kWords;
  float folded[kChannels] = {};  // of the group in hand, times 2^(-4 (j mod 4)) for channel j
  float bias = 0.0f;             // sum of q * minimum over this lane's channels
  int group = -1;
  for (int base = 0; base < count; base += kRowsPerStep * kUnroll) {
    std::uint32_t words[kUnroll][kWords];
    int place[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int i = base + u * kRowsPerStep + slot;
      const RowEntry entry = i < count ? list[i] : kAbsent;
      place[u] = i < count ? entry_place(entry) : -1;
      const bool load = !(entry & kAbsent);
      if constexpr (kWords == 2) {
        const uint2 data = load ? __ldg(reinterpret_cast<const uint2*>(payload + place[u] * (kHeadDim / 8))) : make_uint2(0, 0);
        words[u][0] = data.x;
        words[u][1] = data.y;
      } else {
        words[u][0] = load ? __ldg(payload + place[u] * (kHeadDim / 8)) : 0u;
      }
    }
    float sums[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      sums[u] = 0.0f;
      if (base + u * kRowsPerStep >= count) continue;  // the same in the whole warp
      if (place[u] >= 0 && (rank + place[u]) / kGroupSize != group) {
        group = (rank + place[u]) / kGroupSize;
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
        const std::uint32_t low = words[u][w], high = words[u][w] >> 16;
        dot = __fmaf_rn(folded[8 * w + 0], shifted_code<0>(low), dot);
        dot = __fmaf_rn(folded[8 * w + 1], shifted_code<1>(low), dot);
        dot = __fmaf_rn(folded[8 * w + 2], shifted_code<2>(low), dot);
        dot = __fmaf_rn(folded[8 * w + 3], shifted_code<3>(low), dot);
        dot = __fmaf_rn(folded[8 * w + 4], shifted_code<0>(high), dot);
        dot = __fmaf_rn(folded[8 * w + 5], shifted_code<1>(high), dot);
        dot = __fmaf_rn(folded[8 * w + 6], shifted_code<2>(high), dot);
        dot = __fmaf_rn(folded[8 * w + 7], shifted_code<3>(high), dot);
        if (half_precision) dot = __half2float(__float2half_rn(dot));
      }
      sums[u] = dot;
    }
    const float dot = reduce_rows(sums, part);
    const int i = base + reduced_step(part) * kRowsPerStep + slot;
    if (part % 2 == 0 && i < count) {
      float& target = dots[entry_row(list[i])];
      target = __fadd_rn(target, dot);
    }
  }
}

// accumulator[channel] += sum of weights[row] * V over the listed rows of a BF16 tile that fall to this lane's row slot.
template <int kHeadDim>
__device__ __forceinline__ void add_bf16(const __nv_bfloat16* tile, const RowEntry* list, int count, const float* weights,
                                         float (&accumulator)[kHeadDim / kRowLanes], int lane) {
  constexpr int kVectors = kHeadDim / kRowLanes / 8;
  const int part = lane % kRowLanes, slot = lane / kRowLanes;
  const auto* source = reinterpret_cast<const uint4*>(tile) + part * kVectors;
  for (int base = 0; base < count; base += kRowsPerStep * kUnroll) {
    uint4 data[kUnroll][kVectors];
    float weight[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int i = base + u * kRowsPerStep + slot;
      const int row = i < count ? entry_row(list[i]) : 0;
      weight[u] = i < count ? weights[row] : 0.0f;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        data[u][v] = i < count ? __ldg(source + row * (kHeadDim / 8) + v) : make_uint4(0, 0, 0, 0);
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

// The same for weights[row] * dec(V) of one stream. dec is the specification's value: folding the scale into the weight would save an
// operation a value but leave the rounding of sum weight * minimum in channels where V is small.
template <int kHeadDim>
__device__ __forceinline__ void add_stream(const PageReader& page, int stream, const RowEntry* list, int count, const float* weights,
                                           float (&accumulator)[kHeadDim / kRowLanes], int lane) {
  constexpr int kChannels = kHeadDim / kRowLanes;
  constexpr int kWords = kChannels / 8;
  constexpr int kHalves = kHeadDim / kGroupSize;
  const int part = lane % kRowLanes, slot = lane / kRowLanes;
  const StreamTile tile = stream_tile(page.shape, *page.entry, *page.map, page.layer, stream, KvTensor::v, page.head);
  const std::size_t rank = page.map->rank[stream - 1];
  const auto* payload = reinterpret_cast<const std::uint32_t*>(tile.payload + rank * (kHeadDim / 2)) + part * kWords;
  const std::uint32_t* parameters = tile.parameters + rank * kHalves + part * kChannels / kGroupSize;
  for (int base = 0; base < count; base += kRowsPerStep * kUnroll) {
    std::uint32_t words[kUnroll][kWords], minimum_scale[kUnroll];
    float weight[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int i = base + u * kRowsPerStep + slot;
      const bool load = i < count;
      const RowEntry entry = load ? list[i] : RowEntry{0};
      const int place = entry_place(entry);
      weight[u] = load ? weights[entry_row(entry)] : 0.0f;
      minimum_scale[u] = load ? __ldg(parameters + place * kHalves) : 0u;
      if constexpr (kWords == 2) {
        const uint2 data = load ? __ldg(reinterpret_cast<const uint2*>(payload + place * (kHeadDim / 8))) : make_uint2(0, 0);
        words[u][0] = data.x;
        words[u][1] = data.y;
      } else {
        words[u][0] = load ? __ldg(payload + place * (kHeadDim / 8)) : 0u;
      }
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (base + u * kRowsPerStep >= count) continue;  // the same in the whole warp
      const float2 pair = parameter(minimum_scale[u]);
      const float scale[4] = {pair.y, pair.y * (1.0f / 16), pair.y * (1.0f / 256), pair.y * (1.0f / 4096)};
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        const std::uint32_t low = words[u][w], high = words[u][w] >> 16;
        // code * scale is exact, so the fused addition rounds as the specification's product and sum do.
        const float decoded[8] = {__fmaf_rn(shifted_code<0>(low), scale[0], pair.x),  __fmaf_rn(shifted_code<1>(low), scale[1], pair.x),
                                  __fmaf_rn(shifted_code<2>(low), scale[2], pair.x),  __fmaf_rn(shifted_code<3>(low), scale[3], pair.x),
                                  __fmaf_rn(shifted_code<0>(high), scale[0], pair.x), __fmaf_rn(shifted_code<1>(high), scale[1], pair.x),
                                  __fmaf_rn(shifted_code<2>(high), scale[2], pair.x), __fmaf_rn(shifted_code<3>(high), scale[3], pair.x)};
#pragma unroll
        for (int j = 0; j < 8; ++j) accumulator[8 * w + j] = __fmaf_rn(weight[u], decoded[j], accumulator[8 * w + j]);
      }
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
  __shared__ RowEntry lists[kWarps][kPageTokens];

  const int split_index = blockIdx.x, head = blockIdx.y, row_index = blockIdx.z;
  const QueryRow row = arguments.rows[row_index];
  if (row.request < 0 || split_index * kSplitPages * kPageTokens > row.position) return;
  const KvShape& shape = arguments.kv.shape;
  const RequestTable request = arguments.kv.requests[row.request];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int part = lane % kRowLanes;
  RowEntry* list = lists[warp];

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
                      page_mask(page, row.position, row.position + 1),
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
        reader.for_each_plane(tail, [&](int plane, std::uint64_t rows) {
          const int count = list_rows(rows, rows, kPageTokens - 1, false, list, lane);
          dot_bf16<kHeadDim>(reader.plane_tile(plane, KvTensor::k), q, list, count, dots, lane);
        });
        if (encoded != 0) {
          for (int stream = 1; stream <= reader.history_loop(); ++stream) {
            const int count = reader.list_stream(encoded, stream, KvTensor::k, list, lane);
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
      for (int stream = 1; stream <= reader.history_loop(); ++stream) {
        const int count = reader.list_stream(encoded, stream, KvTensor::v, list, lane);
        if (count > 0) add_stream<kHeadDim>(reader, stream, list, count, weights, accumulator, lane);
      }
    }
    reader.for_each_plane(tail, [&](int plane, std::uint64_t rows) {
      const int count = list_rows(rows, rows, kPageTokens - 1, false, list, lane);
      add_bf16<kHeadDim>(reader.plane_tile(plane, KvTensor::v), list, count, weights, accumulator, lane);
    });
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
