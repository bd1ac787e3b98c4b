// SPDX-License-Identifier: Apache-2.0
#include "optimized/ops/residual_encode.cuh"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <limits>
#include <string>
#include <type_traits>

#include "models/error.hpp"
#include "optimized/kv/numeric_fault.hpp"
#include "optimized/kv/reconstruct.cuh"
#include "optimized/ops/numeric.cuh"
#include "optimized/runtime/cuda_check.hpp"

namespace loopgauge::optimized {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int kValues = 8;  // neighbouring channels of a thread: 16 bytes of BF16, one word of codes

struct Group {
  float minimum, scale;      // FP32, what codes are made with
  std::uint32_t parameters;  // half2 (minimum, scale) as stored
  bool constant;
  bool encodable;
};

__device__ __forceinline__ Group make_group(float minimum, float maximum, bool finite) {
  if (minimum == 0.0f) minimum = 0.0f;  // S-KVQ-6: never -0
  Group group;
  group.minimum = minimum;
  group.scale = __fdiv_rn(__fsub_rn(maximum, minimum), 15.0f);
  const __half minimum16 = __float2half_rn(minimum);
  __half scale16 = __float2half_rn(group.scale);
  group.encodable = finite && !__hisinf(minimum16) && !__hisinf(scale16) && isfinite(group.scale);
  group.constant = minimum == maximum || __half_as_ushort(scale16) == 0;
  if (group.constant) scale16 = __ushort_as_half(0);
  group.parameters = static_cast<std::uint32_t>(__half_as_ushort(minimum16)) | static_cast<std::uint32_t>(__half_as_ushort(scale16)) << 16;
  return group;
}

__device__ __forceinline__ std::uint32_t encode(const Group& group, float value) {
  if (group.constant || !group.encodable) return 0u;
  const float quotient = rintf(__fdiv_rn(__fsub_rn(value, group.minimum), group.scale));
  return static_cast<std::uint32_t>(fminf(fmaxf(quotient, 0.0f), 15.0f));
}

// What values of a group become codes with.
struct Coder {
  float minimum, scale;
  float inverse;  // of the scale; 0 where all codes are 0
};

__device__ __forceinline__ Coder coder_of(const Group& group) {
  const bool zero = group.constant || !group.encodable;
  return {group.minimum, group.scale, zero ? 0.0f : __frcp_rn(group.scale)};
}

// Codes of the thread's values as a word, and the codes as numbers. The inverse is finite, since a scale of 2^-25 or less makes a group constant; quotients
// are at most 15, so that a product with it is within 3e-6 of the rounded quotient, and only what lies within 1e-5 of the middle between two codes has to be
// divided. No code is outside 0..15: the values are those that the extremes were taken of, and rounding keeps their order.
__device__ __forceinline__ std::uint32_t encode_word(const float (&values)[kValues], const Coder (&coders)[kValues], float (&codes)[kValues]) {
  constexpr float kInteger = 8388608.0f;  // 2^23: a sum with it is rounded to an integer, half to even
  float farthest = 0.0f;
#pragma unroll
  for (int k = 0; k < kValues; ++k) {
    const float quotient = __fmul_rn(__fsub_rn(values[k], coders[k].minimum), coders[k].inverse);
    codes[k] = __fsub_rn(__fadd_rn(quotient, kInteger), kInteger);
    farthest = fmaxf(farthest, fabsf(__fsub_rn(quotient, codes[k])));
  }
  if (farthest > 0.49999f) {
#pragma unroll
    for (int k = 0; k < kValues; ++k) {
      if (coders[k].inverse != 0.0f) codes[k] = rintf(__fdiv_rn(__fsub_rn(values[k], coders[k].minimum), coders[k].scale));
    }
  }
  std::uint32_t word = 0;
#pragma unroll
  for (int k = 0; k < kValues; ++k) word |= (__float_as_uint(__fadd_rn(codes[k], kInteger)) & 0xFu) << (4 * k);
  return word;
}

// Adds the eight values of a word of codes; the first stream replaces. code * scale has 15 bits and is exact, so one rounding is that of dec().
__device__ __forceinline__ void add_decoded(float (&sums)[kValues], std::uint32_t word, const float2 (&parameters)[kValues], bool first) {
#pragma unroll
  for (int k = 0; k < kValues; ++k) {
    const float code = __fsub_rn(__uint_as_float(0x4B000000u | (word >> (4 * k) & 0xFu)), 8388608.0f);
    const float decoded = __fmaf_rn(code, parameters[k].y, parameters[k].x);
    sums[k] = first ? decoded : __fadd_rn(sums[k], decoded);
  }
}

struct Extremes {
  float minimum = kInfinity, maximum = -kInfinity;

  __device__ __forceinline__ void add(float low, float high) {
    minimum = fminf(minimum, low);
    maximum = fmaxf(maximum, high);
  }
};

// One CTA's work: the chain of one (block, layer, head) of K or V.
template <int kHeadDim>
struct EncodeTile {
  static constexpr int kRowThreads = kHeadDim / kValues;   // threads of a row
  static constexpr int kSlots = kThreads / kRowThreads;    // rows at a time
  static constexpr int kRows = kGroupSize / kSlots;        // of a thread, in a group of K
  static constexpr int kHalves = kHeadDim / kGroupSize;

  struct Shared {
    std::uint64_t source[kGroupSize];                // of the compact rows in hand: the BF16 plane of the stream, as an address
    std::uint64_t unreconstructed[kGroupSize];       // under the planted fault: the plane that the predecessor is taken from
    std::int32_t position[kGroupSize];
    std::int32_t earlier[kLoops - 1][kGroupSize];    // compact row in the streams before; negative: it has none there
    StreamTile tile[kLoops];
    Extremes extremes[kWarps][kHeadDim];
    Coder coders[kHeadDim];
  };

  const KvShape& shape;
  const EncodeTask& task;
  const RequestTable& request;
  std::uint64_t* numeric_fault;
  Fault fault;
  int layer, head;
  Shared& shared;

  __device__ __forceinline__ static int channel() { return static_cast<int>(threadIdx.x) % kRowThreads * kValues; }
  __device__ __forceinline__ static int slot() { return static_cast<int>(threadIdx.x) / kRowThreads; }
  __device__ __forceinline__ uint4 load(std::uint64_t plane, KvTensor tensor, int position) const {
    return *reinterpret_cast<const uint4*>(reinterpret_cast<const __nv_bfloat16*>(plane) +
                                           page_row_offset(shape, layer, tensor, head, position % kPageTokens) + channel());
  }
  __device__ __forceinline__ void report(NumericFaultKind kind, int stream, int position, int detail) const {
    if (numeric_fault == nullptr) return;
    atomicMin(reinterpret_cast<unsigned long long*>(numeric_fault),
              static_cast<unsigned long long>(pack_numeric_fault({kind, stream, task.request, layer, position, head, detail})));
  }
  __device__ __forceinline__ std::uint32_t* codes(int stream, int compact) const {
    auto* const payload = const_cast<std::uint8_t*>(shared.tile[stream - 1].payload);
    return reinterpret_cast<std::uint32_t*>(payload + static_cast<std::size_t>(compact) * (kHeadDim / 2) + channel() / 2);
  }
  __device__ __forceinline__ std::uint32_t* parameters(int stream, std::size_t index) const {
    return const_cast<std::uint32_t*>(shared.tile[stream - 1].parameters) + index;
  }

  // A group is a channel of 64 compact rows. Stream r of the block is complete before r + 1 begins: residuals are taken against reconstructed rows
  // that this CTA wrote.
  __device__ __forceinline__ void encode_k() const {
    const int page_begin = task.begin / kPageTokens, page_end = page_count(task.end);
    for (int stream = task.loop_first; stream <= task.loop_last; ++stream) {
      const ActivityMap& last_map = request.maps[page_end - 1];
      const std::uint64_t last_active = last_map.active[stream - 1] & page_mask(page_end - 1, task.begin, task.end);
      const int count = static_cast<int>(last_map.rank[stream - 1]) + __popcll(last_active);
      for (int base = 0; base < count; base += kGroupSize) {
        __syncthreads();  // the rows before have been read, the stream before is written
        find_rows(stream, base, page_begin, page_end);
        __syncthreads();
        encode_k_group(stream, base, min(kGroupSize, count - base));
      }
    }
  }

  __device__ __forceinline__ void find_rows(int stream, int base, int page_begin, int page_end) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int page = page_begin + warp; page < page_end; page += kWarps) {
      const ActivityMap& map = request.maps[page];
      const PageTableEntry& entry = request.pages[page];
      const std::uint64_t active = map.active[stream - 1] & page_mask(page, task.begin, task.end);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int bit = lane + 32 * half;
        const int compact = static_cast<int>(map.rank[stream - 1]) + bits_below(active, bit) - base;
        if (((active >> bit) & 1u) == 0 || compact < 0 || compact >= kGroupSize) continue;
        shared.position[compact] = page * kPageTokens + bit;
        shared.source[compact] = entry.bf16[stream - 1];
        if (fault == Fault::unreconstructed_predecessor && stream > 1) shared.unreconstructed[compact] = entry.bf16[resident_loop(map, bit, stream - 1) - 1];
        for (int s = 1; s < stream; ++s) {
          const std::uint64_t earlier = map.active[s - 1];
          shared.earlier[s - 1][compact] = (earlier >> bit) & 1u ? static_cast<int>(map.rank[s - 1]) + bits_below(earlier, bit) : -1;
        }
      }
    }
  }

  __device__ __forceinline__ void encode_k_group(int stream, int base, int rows) const {
    // The rows are on their way while their predecessors are put together.
    uint4 loaded[kRows];
    float values[kRows][kValues];
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      const int row = slot() + j * kSlots;
      loaded[j] = row < rows ? load(shared.source[row], KvTensor::k, shared.position[row]) : make_uint4(0, 0, 0, 0);
#pragma unroll
      for (int k = 0; k < kValues; ++k) values[j][k] = 0.0f;
    }
    // For all rows a stream at a time: most have the parameters of the row before.
#pragma unroll
    for (int s = 1; s < kLoops; ++s) {
      if (s >= stream) break;
      int compact[kRows];
      std::uint32_t words[kRows];
#pragma unroll
      for (int j = 0; j < kRows; ++j) {
        const int row = slot() + j * kSlots;
        compact[j] = row < rows ? shared.earlier[s - 1][row] : -1;
        words[j] = compact[j] < 0 ? 0 : *codes(s, compact[j]);
      }
      int group = -1;
      float2 of_group[kValues];
#pragma unroll
      for (int j = 0; j < kRows; ++j) {
        if (compact[j] < 0) continue;
        if (compact[j] / kGroupSize != group) {
          group = compact[j] / kGroupSize;
          const auto* const all = reinterpret_cast<const uint4*>(parameters(s, static_cast<std::size_t>(group) * kHeadDim + channel()));
          const uint4 low = all[0], high = all[1];
          const std::uint32_t each[kValues] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
          for (int k = 0; k < kValues; ++k) of_group[k] = minimum_and_scale(each[k]);
        }
        add_decoded(values[j], words[j], of_group, s == 1);
      }
    }
    Extremes extremes[kValues];
    float finite = 0.0f;  // NaN where a value is not
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      const int row = slot() + j * kSlots;
      if (row >= rows) continue;
      float x[kValues];
      widen_eight(loaded[j], x);
      if (fault == Fault::unreconstructed_predecessor && stream > 1) widen_eight(load(shared.unreconstructed[row], KvTensor::k, shared.position[row]), values[j]);
#pragma unroll
      for (int k = 0; k < kValues; ++k) {
        values[j][k] = stream == 1 ? x[k] : __fsub_rn(x[k], values[j][k]);
        extremes[k].add(values[j][k], values[j][k]);
        finite = __fmaf_rn(values[j][k], 0.0f, finite);
      }
    }
    // A value that is not finite may stand in any of the thread's channels: then all of them look for theirs.
    if (finite != 0.0f) {
#pragma unroll
      for (int k = 0; k < kValues; ++k) {
        bool all = true;
#pragma unroll
        for (int j = 0; j < kRows; ++j) all = all && (slot() + j * kSlots >= rows || isfinite(values[j][k]));
        if (!all) extremes[k].maximum = kInfinity;  // an infinite scale: not encodable
      }
    }
#pragma unroll
    for (int k = 0; k < kValues; ++k) {
#pragma unroll
      for (int width = kRowThreads; width < 32; width *= 2) {
        extremes[k].add(__shfl_xor_sync(~0u, extremes[k].minimum, width), __shfl_xor_sync(~0u, extremes[k].maximum, width));
      }
    }
    const int warp = threadIdx.x / 32;
    if (threadIdx.x % 32 < kRowThreads) {
#pragma unroll
      for (int k = 0; k < kValues; ++k) shared.extremes[warp][channel() + k] = extremes[k];
    }
    __syncthreads();
    if (threadIdx.x < kHeadDim) {
      Extremes of_channel;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) of_channel.add(shared.extremes[w][threadIdx.x].minimum, shared.extremes[w][threadIdx.x].maximum);
      const Group group = make_group(of_channel.minimum, of_channel.maximum, true);
      shared.coders[threadIdx.x] = coder_of(group);
      *parameters(stream, static_cast<std::size_t>(base / kGroupSize) * kHeadDim + threadIdx.x) = group.parameters;
      if (!group.encodable) report(NumericFaultKind::k_group, stream, shared.position[0], static_cast<int>(threadIdx.x));
    }
    __syncthreads();
    Coder coders[kValues];
#pragma unroll
    for (int k = 0; k < kValues; ++k) coders[k] = shared.coders[channel() + k];
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      const int row = slot() + j * kSlots;
      if (row >= rows) continue;
      float numbers[kValues];
      *codes(stream, base + row) = encode_word(values[j], coders, numbers);
    }
  }

  // A group is 64 channels of one row, so that a row's chain stays with its threads.
  __device__ __forceinline__ void encode_v() const {
    constexpr int kHalfThreads = kGroupSize / kValues;
    const int half = channel() / kGroupSize;
    for (int first = task.begin; first < task.end; first += kSlots) {
      const int position = min(first + slot(), task.end - 1), page = position / kPageTokens, row = position % kPageTokens;
      const bool exists = first + slot() < task.end;
      const ActivityMap& map = request.maps[page];
      const PageTableEntry& entry = request.pages[page];
      std::uint32_t active = 0;
      uint4 loaded[kLoops];
#pragma unroll
      for (int s = 1; s <= kLoops; ++s) {
        active |= exists && ((map.active[s - 1] >> row) & 1u) != 0 ? 1u << s : 0u;
        loaded[s - 1] = make_uint4(0, 0, 0, 0);
        if (s >= task.loop_first && s <= task.loop_last && (active >> s & 1u) != 0) loaded[s - 1] = load(entry.bf16[s - 1], KvTensor::v, position);
      }
      float reconstructed[kValues] = {};
#pragma unroll
      for (int s = 1; s <= kLoops; ++s) {
        const bool here = (active >> s & 1u) != 0 && s <= task.loop_last;
        if (!__any_sync(~0u, here)) continue;
        const int compact = static_cast<int>(map.rank[s - 1]) + bits_below(map.active[s - 1], row);
        std::uint32_t* const group_parameters = here ? parameters(s, static_cast<std::size_t>(compact) * kHalves + half) : nullptr;
        if (s < task.loop_first) {
          if (!here) continue;
          const float2 of_group = minimum_and_scale(*group_parameters);
          float2 of_values[kValues];
#pragma unroll
          for (int k = 0; k < kValues; ++k) of_values[k] = of_group;
          add_decoded(reconstructed, *codes(s, compact), of_values, s == 1);
          continue;
        }
        float values[kValues];
        widen_eight(loaded[s - 1], values);
        if (s > 1) {
          if (fault == Fault::unreconstructed_predecessor && here) {
            widen_eight(load(entry.bf16[resident_loop(map, row, s - 1) - 1], KvTensor::v, position), reconstructed);
          }
#pragma unroll
          for (int k = 0; k < kValues; ++k) values[k] = __fsub_rn(values[k], reconstructed[k]);
        }
        Extremes extremes;
        float finite = 0.0f;
#pragma unroll
        for (int k = 0; k < kValues; ++k) {
          extremes.add(values[k], values[k]);
          finite = __fmaf_rn(values[k], 0.0f, finite);
        }
        if (finite != 0.0f) extremes.maximum = kInfinity;  // likewise
#pragma unroll
        for (int width = 1; width < kHalfThreads; width *= 2) {
          extremes.add(__shfl_xor_sync(~0u, extremes.minimum, width), __shfl_xor_sync(~0u, extremes.maximum, width));
        }
        if (!here) continue;
        const Group group = make_group(extremes.minimum, extremes.maximum, true);
        const Coder coder = coder_of(group);
        Coder coders[kValues];
        float numbers[kValues];
#pragma unroll
        for (int k = 0; k < kValues; ++k) coders[k] = coder;
        *codes(s, compact) = encode_word(values, coders, numbers);
        if (threadIdx.x % kHalfThreads == 0) {
          *group_parameters = group.parameters;
          if (!group.encodable) report(NumericFaultKind::v_group, s, position, half);
        }
        const float2 of_group = minimum_and_scale(group.parameters);
#pragma unroll
        for (int k = 0; k < kValues; ++k) {
          const float decoded = __fmaf_rn(numbers[k], of_group.y, of_group.x);
          reconstructed[k] = s == 1 ? decoded : __fadd_rn(reconstructed[k], decoded);
        }
      }
    }
  }
};

// grid (layers, 2 * heads, tasks), kThreads threads.
template <int kHeadDim>
__global__ void __launch_bounds__(kThreads, 2)
    residual_encode_kernel(KvView view, const EncodeTask* tasks, std::uint64_t* numeric_fault, Fault fault) {
  using Tile = EncodeTile<kHeadDim>;
  __shared__ typename Tile::Shared shared;
  const EncodeTask task = tasks[blockIdx.z];
  if (task.begin >= task.end) return;
  const int layer = blockIdx.x, head = blockIdx.y / 2, page = task.begin / kPageTokens;
  const auto tensor = static_cast<KvTensor>(blockIdx.y % 2);
  const RequestTable request = view.requests[task.request];
  if (threadIdx.x < kLoops) {  // the tiles of a block are the same for all its pages
    shared.tile[threadIdx.x] = stream_tile(view.shape, request.pages[page], request.maps[page], layer, static_cast<int>(threadIdx.x) + 1, tensor, head);
  }
  __syncthreads();
  const Tile tile{view.shape, task, request, numeric_fault, fault, layer, head, shared};
  if (tensor == KvTensor::k) tile.encode_k();
  else tile.encode_v();
}

// grid (layers, 2 * heads, tasks), head_dim threads: one row at a time, a thread a channel.
template <int kHeadDim>
__global__ void __launch_bounds__(kHeadDim) residual_encode_again_kernel(KvView view, const EncodeTask* tasks, std::uint64_t* numeric_fault) {
  constexpr int kHalves = kHeadDim / kGroupSize;
  __shared__ float values[kHeadDim];
  __shared__ std::uint8_t codes[kHeadDim];
  __shared__ Group groups[kHalves];

  const EncodeTask task = tasks[blockIdx.z];
  const int layer = blockIdx.x, head = blockIdx.y / 2, channel = threadIdx.x;
  const auto tensor = static_cast<KvTensor>(blockIdx.y % 2);
  const KvShape& shape = view.shape;
  const RequestTable request = view.requests[task.request];
  const auto report = [&](NumericFaultKind kind, int stream, int position, int group) {
    if (numeric_fault == nullptr) return;
    atomicMin(reinterpret_cast<unsigned long long*>(numeric_fault),
              static_cast<unsigned long long>(pack_numeric_fault({kind, stream, task.request, layer, position, head, group})));
  };

  for (int stream = task.loop_first; stream <= task.loop_last; ++stream) {
    for (int position = task.begin; position < task.end; ++position) {
      const int page = position / kPageTokens, row = position % kPageTokens;
      const PageTableEntry& entry = request.pages[page];
      const ActivityMap& map = request.maps[page];
      float value = __bfloat162float(
          reinterpret_cast<const __nv_bfloat16*>(entry.bf16[stream - 1])[page_row_offset(shape, layer, tensor, head, row) + channel]);
      if (stream > 1) value = __fsub_rn(value, reconstruct(shape, entry, map, layer, stream - 1, tensor, head, row, channel));
      values[channel] = value;
      const StreamTile tile = stream_tile(shape, entry, map, layer, stream, tensor, head);
      auto* payload = const_cast<std::uint8_t*>(tile.payload);
      auto* parameters = const_cast<std::uint32_t*>(tile.parameters);
      const int compact = static_cast<int>(map.rank[stream - 1]) + bits_below(map.active[stream - 1], row);
      if (tensor == KvTensor::k) {
        const std::uint32_t stored = parameters[static_cast<std::size_t>(compact / kGroupSize) * kHeadDim + channel];
        const auto [minimum, scale] = minimum_and_scale(stored);
        if (!isfinite(value)) report(NumericFaultKind::k_group, stream, position, channel);
        const float quotient = scale == 0.0f ? 0.0f : rintf(__fdiv_rn(__fsub_rn(value, minimum), scale));
        codes[channel] = static_cast<std::uint8_t>(fminf(fmaxf(quotient, 0.0f), 15.0f));
        __syncthreads();
      } else {
        __syncthreads();
        if (channel < kHalves) {
          const float* x = values + channel * kGroupSize;
          float minimum = x[0], maximum = minimum;
          bool finite = isfinite(minimum);
          for (int c = 1; c < kGroupSize; ++c) {
            finite = finite && isfinite(x[c]);
            if (x[c] < minimum) minimum = x[c];
            if (x[c] > maximum) maximum = x[c];
          }
          groups[channel] = make_group(minimum, maximum, finite);
          parameters[static_cast<std::size_t>(compact) * kHalves + channel] = groups[channel].parameters;
          if (!groups[channel].encodable) report(NumericFaultKind::v_group, stream, position, channel);
        }
        __syncthreads();
        codes[channel] = static_cast<std::uint8_t>(encode(groups[channel / kGroupSize], value));
        __syncthreads();
      }
      if (channel < kHeadDim / 2) {
        payload[static_cast<std::size_t>(compact) * (kHeadDim / 2) + channel] =
            static_cast<std::uint8_t>(codes[2 * channel] | codes[2 * channel + 1] << 4);
      }
      __syncthreads();  // the next row uses the arrays again, the next stream reads what this one wrote
    }
  }
}

// grid (positions, heads), head_dim threads.
__global__ void kv_gather_kernel(KvGatherArguments arguments) {
  const KvShape& shape = arguments.kv.shape;
  const int position = arguments.begin + static_cast<int>(blockIdx.x), head = blockIdx.y, channel = threadIdx.x;
  const int page = position / kPageTokens, row = position % kPageTokens;
  const RequestTable request = arguments.kv.requests[arguments.request];
  const PageTableEntry& entry = request.pages[page];
  const ActivityMap& map = request.maps[page];
  const std::size_t target = (static_cast<std::size_t>(head) * (arguments.end - arguments.begin) + blockIdx.x) * shape.head_dim + channel;
  for (int t = 0; t < 2; ++t) {
    const auto tensor = static_cast<KvTensor>(t);
    float value;
    if (position < arguments.encoded_frontier) {
      value = reconstruct(shape, entry, map, arguments.layer, arguments.loop, tensor, head, row, channel);
    } else {
      const int resident = resident_loop(map, row, arguments.loop);
      value = __bfloat162float(reinterpret_cast<const __nv_bfloat16*>(
          entry.bf16[resident - 1])[page_row_offset(shape, arguments.layer, tensor, head, row) + channel]);
    }
    (tensor == KvTensor::k ? arguments.k : arguments.v)[target] = value;
  }
}

void check_head_dim(const char* operation, const KvShape& shape) {
  if (shape.head_dim != 64 && shape.head_dim != 128) {
    throw UnsupportedError(std::string(operation) + ": head_dim " + std::to_string(shape.head_dim) + " is not 64 or 128");
  }
}

// launch(head_dim, grid) with a grid of (layers, K|V x heads, tasks), for a kernel that is compiled for the head dimension.
template <class Launch>
void for_each_tile(const char* operation, const ResidualEncodeArguments& arguments, Launch launch) {
  const KvShape& shape = arguments.kv.shape;
  check_head_dim(operation, shape);
  if (arguments.task_count == 0) return;
  const dim3 grid(shape.layers, 2 * shape.heads, arguments.task_count);
  if (shape.head_dim == 128) {
    launch(std::integral_constant<int, 128>{}, grid);
  } else {
    launch(std::integral_constant<int, 64>{}, grid);
  }
}

}  // namespace

void residual_encode(const ResidualEncodeArguments& arguments, cudaStream_t stream) {
  for_each_tile("residual_encode", arguments, [&](auto head_dim, dim3 grid) {
    residual_encode_kernel<head_dim.value><<<grid, kThreads, 0, stream>>>(arguments.kv, arguments.tasks, arguments.numeric_fault, arguments.fault);
    LOOPGAUGE_CUDA_CHECK_LAUNCH("residual_encode");
  });
}

void residual_encode_again(const ResidualEncodeArguments& arguments, cudaStream_t stream) {
  for_each_tile("residual_encode_again", arguments, [&](auto head_dim, dim3 grid) {
    residual_encode_again_kernel<head_dim.value><<<grid, head_dim.value, 0, stream>>>(arguments.kv, arguments.tasks, arguments.numeric_fault);
    LOOPGAUGE_CUDA_CHECK_LAUNCH("residual_encode_again");
  });
}

void kv_gather(const KvGatherArguments& arguments, cudaStream_t stream) {
  check_head_dim("kv_gather", arguments.kv.shape);
  if (arguments.end <= arguments.begin) return;
  kv_gather_kernel<<<dim3(arguments.end - arguments.begin, arguments.kv.shape.heads), arguments.kv.shape.head_dim, 0, stream>>>(arguments);
  LOOPGAUGE_CUDA_CHECK_LAUNCH("kv_gather");
}

}  // namespace loopgauge::optimized
