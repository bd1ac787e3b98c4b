// SPDX-License-Identifier: Apache-2.0
// The split-KV reader behind attention_decode, reference_statistics, reference_contribution and sparse_correction.
// A CTA reads one split (a range of absolute positions) of one query row and head; a warp owns whole pages of it. BF16 rows are read plane
// by plane and encoded ones stream by stream: q·X_hat = sum over streams of q·dec, and the same for p·X_hat; a row that is absent from a
// stream does not occur in its list. Eight lanes share a BF16 K row, four a V row; packed K goes through tensor cores, 16 rows at a time.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "models/fault.hpp"
#include "optimized/kv/kv_layout.hpp"
#include "optimized/kv/numeric_fault.hpp"
#include "optimized/kv/reference_store.hpp"

namespace loopgauge::optimized::split {

inline constexpr int kWarps = 4;
inline constexpr int kThreads = 32 * kWarps;
inline constexpr int kRowLanes = 8;  // lanes of one K/V row
inline constexpr int kRowsPerStep = 32 / kRowLanes;
inline constexpr int kValueLanes = 4;  // lanes of one V row, and of one row of packed K
inline constexpr int kValueRows = 32 / kValueLanes;
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
  // Lists rows of several planes at once; the place of an entry is its plane.
  __device__ __forceinline__ int list_planes(std::uint64_t rows, RowEntry* list, int lane) const {
    __syncwarp();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int bit = lane + 32 * half;
      if ((rows >> bit) & 1u) {
        const int plane = resident_loop(*map, bit, (own_row >> bit) & 1u ? loop : history_loop());
        list[bits_below(rows, bit)] = static_cast<RowEntry>(bit | plane << 8);
      }
    }
    __syncwarp();
    return __popcll(rows);
  }
  __device__ __forceinline__ const __nv_bfloat16* plane_tile(int plane, KvTensor tensor) const {
    return reinterpret_cast<const __nv_bfloat16*>(entry->bf16[plane - 1]) + page_tile_offset(shape, layer, tensor, head);
  }

  // Lists the rows of `encoded` that stream `stream` contributes to.
  __device__ __forceinline__ int list_stream(std::uint64_t encoded, int stream, KvTensor tensor, RowEntry* list, int lane) const {
    const std::uint64_t active = map->active[stream - 1];
    const int last_place = static_cast<int>(map->rows[stream - 1]) - 1 - static_cast<int>(map->rank[stream - 1]);
    const bool absent_too = fault == Fault::absent_residual_as_code_zero && tensor == KvTensor::k && map->rows[stream - 1] > 0;
    return list_rows(absent_too ? encoded : encoded & active, active, max(last_place, 0), fault == Fault::wrong_compact_rank, list, lane);
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

// Where the listed BF16 rows lie: one plane's tile [64, head_dim], or the plane that each entry names.
struct OnePlane {
  const __nv_bfloat16* tile;
  __device__ __forceinline__ const __nv_bfloat16* operator()(RowEntry) const { return tile; }
};
struct NamedPlanes {
  const PageReader& page;
  KvTensor tensor;
  __device__ __forceinline__ const __nv_bfloat16* operator()(RowEntry entry) const { return page.plane_tile(entry_place(entry), tensor); }
};

// dots[row] = q·K for the listed rows.
template <int kHeadDim, class Planes>
__device__ __forceinline__ void dot_bf16(const Planes& planes, const float (&q)[kHeadDim / kRowLanes], const RowEntry* list, int count,
                                         float* dots, int lane) {
  constexpr int kVectors = kHeadDim / kRowLanes / 8;
  const int part = lane % kRowLanes, slot = lane / kRowLanes;
  for (int base = 0; base < count; base += kRowsPerStep * kUnroll) {
    uint4 data[kUnroll][kVectors];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int i = base + u * kRowsPerStep + slot;
      const RowEntry entry = i < count ? list[i] : RowEntry{0};
      const auto* source =
          i < count ? reinterpret_cast<const uint4*>(planes(entry)) + entry_row(entry) * (kHeadDim / 8) + part * kVectors : nullptr;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        data[u][v] = i < count ? __ldg(source + v) : make_uint4(0, 0, 0, 0);
      }
    }
    float sums[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      sums[u] = 0.0f;
      if (base + u * kRowsPerStep >= count) continue;  // the same in the whole warp
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

// c[16x8] += a[16x16] * b[16x8], FP16 operands, FP32 accumulation.
__device__ __forceinline__ void multiply_accumulate_half(float (&c)[4], std::uint32_t a0, std::uint32_t a1, std::uint32_t a2,
                                                         std::uint32_t a3, std::uint32_t b0, std::uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Words 4 * i.. of 16 or 8 bytes.
template <int kWords>
__device__ __forceinline__ void load_words(std::uint32_t (&words)[kWords], const std::uint32_t* source, bool load) {
  static_assert(kWords == 2 || kWords == 4);
  if constexpr (kWords == 4) {
    const uint4 data = load ? __ldg(reinterpret_cast<const uint4*>(source)) : make_uint4(0, 0, 0, 0);
    words[0] = data.x;
    words[1] = data.y;
    words[2] = data.z;
    words[3] = data.w;
  } else {
    const uint2 data = load ? __ldg(reinterpret_cast<const uint2*>(source)) : make_uint2(0, 0);
    words[0] = data.x;
    words[1] = data.y;
  }
}

// q * scale of one K group as FP16 high and low parts, in the order in which packed words meet them: word w holds channels 8w..8w+7, and
// its half words give the pairs (0, 4), (1, 5), (2, 6), (3, 7).
template <int kHeadDim>
struct FoldedQuery {
  __half parts[2][kHeadDim];
};

// dots[row] += q·dec(K) of one stream for the listed rows, on tensor cores: codes are the rows (code << 4 read as FP16 is code * 2^-20,
// exact), q * scale times a power of two are two columns, high and low part. The contraction order is that of the packed words, so nothing
// is permuted.
template <int kHeadDim>
__device__ __forceinline__ void dot_stream(const PageReader& page, int stream, const float (&q)[kHeadDim / 32],
                                           FoldedQuery<kHeadDim>& folded, const RowEntry* list, int count, float* dots, int lane) {
  constexpr int kOwn = kHeadDim / 32;                 // channels that a lane folds
  constexpr int kWords = kHeadDim / 8 / kValueLanes;  // packed words of a lane
  constexpr int kTiles = 2;                           // of 16 rows whose loads are issued together
  const int row_lane = lane / kValueLanes, part = lane % kValueLanes;
  const StreamTile tile = stream_tile(page.shape, *page.entry, *page.map, page.layer, stream, KvTensor::k, page.head);
  const int rank = static_cast<int>(page.map->rank[stream - 1]);
  const auto* payload =
      reinterpret_cast<const std::uint32_t*>(tile.payload + static_cast<std::size_t>(rank) * (kHeadDim / 2)) + part * kWords;

  for (int begin = 0; begin < count;) {
    // The rows of one group: a page's rows lie in at most two.
    const int group = (rank + entry_place(list[begin])) / kGroupSize;
    int end = count;
    if ((rank + entry_place(list[count - 1])) / kGroupSize != group) {
      for (end = begin + 1; (rank + entry_place(list[end])) / kGroupSize == group;) ++end;
    }

    float scaled[kOwn];
    float bias = 0.0f, largest = 0.0f;
    {
      const std::uint32_t* source = tile.parameters + static_cast<std::size_t>(group) * kHeadDim + lane * kOwn;
      std::uint32_t pairs[kOwn];
      load_words<kOwn>(pairs, source, true);
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const float2 minimum_scale = parameter(pairs[i]);
        scaled[i] = __fmul_rn(q[i], minimum_scale.y);  // exact: 8 + 11 bits
        bias = __fmaf_rn(q[i], minimum_scale.x, bias);
        largest = fmaxf(largest, fabsf(scaled[i]));
      }
    }
    bias = warp_sum(bias);
    largest = warp_max(largest);
    const int exponent = min(max(13 - (static_cast<int>(__float_as_uint(largest) >> 23) - 127), -100), 100);  // largest * 2^exponent < 2^14
    const float up = __uint_as_float(static_cast<std::uint32_t>(127 + exponent) << 23);
    const float down = __uint_as_float(static_cast<std::uint32_t>(127 + 20 - exponent) << 23);  // undoes it and the codes' 2^-20
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int channel = lane * kOwn + i, nibble = channel % 8;
      const int target = channel / 8 * 8 + nibble % 4 * 2 + nibble / 4;
      const float value = __fmul_rn(scaled[i], up);
      const __half high = __float2half_rn(value);
      folded.parts[0][target] = high;
      folded.parts[1][target] = __float2half_rn(__fsub_rn(value, __half2float(high)));
    }
    __syncwarp();
    std::uint32_t columns[kWords][4] = {};  // B fragments; columns beyond the two parts are zero
    if (row_lane < 2) {
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        const uint4 data = *reinterpret_cast<const uint4*>(&folded.parts[row_lane][(part * kWords + w) * 8]);
        columns[w][0] = data.x;
        columns[w][1] = data.y;
        columns[w][2] = data.z;
        columns[w][3] = data.w;
      }
    }

    for (int base = begin; base < end; base += 16 * kTiles) {
      std::uint32_t words[kTiles][2][kWords];
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int i = base + 16 * t + 8 * half + row_lane;
          const RowEntry entry = i < end ? list[i] : kAbsent;
          load_words<kWords>(words[t][half], payload + entry_place(entry) * (kHeadDim / 8), !(entry & kAbsent));
        }
      }
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        if (base + 16 * t >= end) break;  // the same in the whole warp
        float sums[4] = {};
#pragma unroll
        for (int w = 0; w < kWords; ++w) {
          constexpr std::uint32_t kNibbles = 0x00F000F0u;
          const std::uint32_t top = words[t][0][w], bottom = words[t][1][w];
          multiply_accumulate_half(sums, (top << 4) & kNibbles, (bottom << 4) & kNibbles, top & kNibbles, bottom & kNibbles, columns[w][0],
                                   columns[w][1]);
          multiply_accumulate_half(sums, (top >> 4) & kNibbles, (bottom >> 4) & kNibbles, (top >> 8) & kNibbles, (bottom >> 8) & kNibbles,
                                   columns[w][2], columns[w][3]);
        }
        if (part == 0) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int i = base + 16 * t + 8 * half + row_lane;
            if (i < end) {
              float dot = __fmul_rn(__fadd_rn(sums[2 * half], sums[2 * half + 1]), down);
              if (page.fault == Fault::half_precision_stream_dots) dot = __half2float(__float2half_rn(dot));
              float& target = dots[entry_row(list[i])];
              target = __fadd_rn(target, __fadd_rn(dot, bias));
            }
          }
        }
      }
    }
    begin = end;
  }
}

// accumulator[channel] += sum of weights[row] * V over the listed rows that fall to this lane's row slot.
template <int kHeadDim, class Planes>
__device__ __forceinline__ void add_bf16(const Planes& planes, const RowEntry* list, int count, const float* weights,
                                         float (&accumulator)[kHeadDim / kValueLanes], int lane) {
  constexpr int kVectors = kHeadDim / kValueLanes / 8;
  constexpr int kSteps = 8 / kVectors;  // steps whose loads are issued together: eight 16-byte loads
  const int part = lane % kValueLanes, slot = lane / kValueLanes;
  for (int base = 0; base < count; base += kValueRows * kSteps) {
    uint4 data[kSteps][kVectors];
    float weight[kSteps];
#pragma unroll
    for (int u = 0; u < kSteps; ++u) {
      const int i = base + u * kValueRows + slot;
      const RowEntry entry = i < count ? list[i] : RowEntry{0};
      const auto* source = i < count ? reinterpret_cast<const uint4*>(planes(entry)) + entry_row(entry) * (kHeadDim / 8) + part : nullptr;
      weight[u] = i < count ? weights[entry_row(entry)] : 0.0f;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        data[u][v] = i < count ? __ldg(source + v * kValueLanes) : make_uint4(0, 0, 0, 0);
      }
    }
#pragma unroll
    for (int u = 0; u < kSteps; ++u) {
      if (base + u * kValueRows >= count) break;  // the same in the whole warp
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
                                           float (&accumulator)[kHeadDim / kValueLanes], int lane) {
  constexpr int kWords = kHeadDim / kValueLanes / 8;
  constexpr int kHalves = kHeadDim / kGroupSize;
  constexpr int kSteps = 2;
  const int part = lane % kValueLanes, slot = lane / kValueLanes;
  const StreamTile tile = stream_tile(page.shape, *page.entry, *page.map, page.layer, stream, KvTensor::v, page.head);
  const std::size_t rank = page.map->rank[stream - 1];
  // Word v of a lane is word part + 4 v of the row, as in add_bf16: the first half of a lane's words lies in the first 64 channels.
  const auto* payload = reinterpret_cast<const std::uint32_t*>(tile.payload + rank * (kHeadDim / 2)) + part;
  const std::uint32_t* parameters = tile.parameters + rank * kHalves;
  for (int base = 0; base < count; base += kValueRows * kSteps) {
    std::uint32_t words[kSteps][kWords], minimum_scale[kSteps][kHalves];
    float weight[kSteps];
#pragma unroll
    for (int u = 0; u < kSteps; ++u) {
      const int i = base + u * kValueRows + slot;
      const bool load = i < count;
      const RowEntry entry = load ? list[i] : RowEntry{0};
      const int place = entry_place(entry);
      weight[u] = load ? weights[entry_row(entry)] : 0.0f;
#pragma unroll
      for (int h = 0; h < kHalves; ++h) minimum_scale[u][h] = load ? __ldg(parameters + place * kHalves + h) : 0u;
#pragma unroll
      for (int w = 0; w < kWords; ++w) words[u][w] = load ? __ldg(payload + place * (kHeadDim / 8) + w * kValueLanes) : 0u;
    }
#pragma unroll
    for (int u = 0; u < kSteps; ++u) {
      if (base + u * kValueRows >= count) break;  // the same in the whole warp
#pragma unroll
      for (int h = 0; h < kHalves; ++h) {
        const float2 pair = parameter(minimum_scale[u][h]);
        const float scale[4] = {pair.y, pair.y * (1.0f / 16), pair.y * (1.0f / 256), pair.y * (1.0f / 4096)};
#pragma unroll
        for (int w = h * kWords / kHalves; w < (h + 1) * kWords / kHalves; ++w) {
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
}

// The sum over the eight row slots of a warp: exchanges halve the channels a lane holds, 8, 4, then 2 apart. `result` holds the lane's last
// head_dim / 32 values; they are values of channel reduced_channel(lane, i).
template <int kHeadDim>
__device__ __forceinline__ int reduced_channel(int lane, int i) {
  constexpr int kOwn = kHeadDim / 32, kAll = kHeadDim / kValueLanes;
  const int index = (lane & 16 ? kAll / 2 : 0) + (lane & 8 ? kAll / 4 : 0) + (lane & 4 ? kOwn : 0) + i;
  return index / 8 * 8 * kValueLanes + lane % kValueLanes * 8 + index % 8;
}
template <int kCount>
__device__ __forceinline__ void halve(float (&values)[kCount], int lane, int distance) {
  const bool upper = lane & distance;
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) {
    const float given = upper ? values[i] : values[i + kCount / 2], kept = upper ? values[i + kCount / 2] : values[i];
    values[i] = __fadd_rn(kept, __shfl_xor_sync(~0u, given, distance));
  }
}
template <int kHeadDim>
__device__ __forceinline__ void reduce_slots(float (&values)[kHeadDim / kValueLanes], int lane, float (&result)[kHeadDim / 32]) {
  constexpr int kAll = kHeadDim / kValueLanes;
  halve(values, lane, 16);
  float half[kAll / 2];
#pragma unroll
  for (int i = 0; i < kAll / 2; ++i) half[i] = values[i];
  halve(half, lane, 8);
  float quarter[kAll / 4];
#pragma unroll
  for (int i = 0; i < kAll / 4; ++i) quarter[i] = half[i];
  halve(quarter, lane, 4);
#pragma unroll
  for (int i = 0; i < kAll / 8; ++i) result[i] = quarter[i];
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
  __shared__ __align__(16) FoldedQuery<kHeadDim> folded[kWarps];

  const int split_index = blockIdx.x, head = blockIdx.y, row_index = blockIdx.z;
  const QueryRow row = arguments.rows[row_index];
  if (row.request < 0 || split_index * kSplitPages * kPageTokens > row.position) return;
  const KvShape& shape = arguments.kv.shape;
  const RequestTable request = arguments.kv.requests[row.request];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int part = lane % kRowLanes;
  RowEntry* list = lists[warp];

  const std::size_t state =
      kSelected || kPurpose == Purpose::statistics ? reference_index(shape, row.reference, arguments.layer, head) : 0;
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
                      arguments.fault};
  };

  const auto encoded_rows = [&](int page) {
    int frontier = row.encoded_frontier;
    if (arguments.fault == Fault::tail_read_as_encoded && request.pages[page].base_payload != 0) frontier += kPageTokens;
    return page_mask(page, 0, frontier);
  };

  float maximum = kMinusInfinity;
  if constexpr (kPurpose != Purpose::contribution) {
    float q[kChannels];          // of the lane's part of a BF16 row
    float own_q[kHeadDim / 32];  // of the channels that the lane folds
    {
      const __nv_bfloat16* row_q = arguments.q + row_index * arguments.q_row_stride + head * kHeadDim;
#pragma unroll
      for (int i = 0; i < kHeadDim / 32; ++i) own_q[i] = __bfloat162float(row_q[lane * (kHeadDim / 32) + i]);
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
        if constexpr (kSelected) {  // few rows: one list for all planes
          if (tail != 0) {
            const int count = reader.list_planes(tail, list, lane);
            dot_bf16<kHeadDim>(NamedPlanes{reader, KvTensor::k}, q, list, count, dots, lane);
          }
        } else {
          reader.for_each_plane(tail, [&](int plane, std::uint64_t rows) {
            const int count = list_rows(rows, rows, kPageTokens - 1, false, list, lane);
            dot_bf16<kHeadDim>(OnePlane{reader.plane_tile(plane, KvTensor::k)}, q, list, count, dots, lane);
          });
        }
        if (encoded != 0) {
          for (int stream = 1; stream <= reader.history_loop(); ++stream) {
            const int count = reader.list_stream(encoded, stream, KvTensor::k, list, lane);
            if (count > 0) dot_stream<kHeadDim>(reader, stream, own_q, folded[warp], list, count, dots, lane);
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
  float accumulator[kHeadDim / kValueLanes] = {};
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
    if constexpr (kSelected) {
      if (tail != 0) {
        const int count = reader.list_planes(tail, list, lane);
        add_bf16<kHeadDim>(NamedPlanes{reader, KvTensor::v}, list, count, weights, accumulator, lane);
      }
    } else {
      reader.for_each_plane(tail, [&](int plane, std::uint64_t rows) {
        const int count = list_rows(rows, rows, kPageTokens - 1, false, list, lane);
        add_bf16<kHeadDim>(OnePlane{reader.plane_tile(plane, KvTensor::v)}, list, count, weights, accumulator, lane);
      });
    }
  }
  sum = warp_sum(sum);
  float reduced[kHeadDim / 32];
  reduce_slots<kHeadDim>(accumulator, lane, reduced);
#pragma unroll
  for (int i = 0; i < kHeadDim / 32; ++i) outputs[warp][reduced_channel<kHeadDim>(lane, i)] = reduced[i];
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
