// SPDX-License-Identifier: Apache-2.0
#include "optimized/ops/residual_encode.cuh"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <string>
#include <type_traits>

#include "models/error.hpp"
#include "optimized/kv/numeric_fault.hpp"
#include "optimized/kv/reconstruct.cuh"
#include "optimized/runtime/cuda_check.hpp"

namespace loopgauge::optimized {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;

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

// grid (layers, 2 * heads, tasks), kThreads threads: one CTA makes the whole chain of one (block, layer, head, K|V), 64 compact rows at a
// time. Stream r of the block is complete before r + 1 starts: residuals are taken against reconstructed rows that this CTA wrote.
template <int kHeadDim>
__global__ void __launch_bounds__(kThreads)
    residual_encode_kernel(KvView view, const EncodeTask* tasks, std::uint64_t* numeric_fault, Fault fault) {
  constexpr int kHalves = kHeadDim / kGroupSize;
  constexpr int kRowsPerStep = kThreads / kHeadDim;
  __shared__ float values[kGroupSize][kHeadDim];  // X[r] - X_hat[r-1] of the compact rows in hand
  __shared__ std::int32_t positions[kGroupSize];  // absolute positions of those rows
  __shared__ Group groups[kHeadDim > kGroupSize * kHalves ? kHeadDim : kGroupSize * kHalves];

  const EncodeTask task = tasks[blockIdx.z];
  const int layer = blockIdx.x, head = blockIdx.y / 2;
  const auto tensor = static_cast<KvTensor>(blockIdx.y % 2);
  const KvShape& shape = view.shape;
  const RequestTable request = view.requests[task.request];
  if (task.begin >= task.end) return;
  const int page_begin = task.begin / kPageTokens, page_end = page_count(task.end);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int channel = threadIdx.x % kHeadDim, row_step = threadIdx.x / kHeadDim;

  for (int stream = task.loop_first; stream <= task.loop_last; ++stream) {
    const ActivityMap& last_map = request.maps[page_end - 1];
    const std::uint64_t last_active = last_map.active[stream - 1] & page_mask(page_end - 1, task.begin, task.end);
    const int count = static_cast<int>(last_map.rank[stream - 1]) + __popcll(last_active);
    if (count == 0) continue;
    // The tile is that of the block: the same for all its pages.
    const StreamTile tile = stream_tile(shape, request.pages[page_begin], request.maps[page_begin], layer, stream, tensor, head);
    auto* payload = const_cast<std::uint8_t*>(tile.payload);
    auto* parameters = const_cast<std::uint32_t*>(tile.parameters);

    for (int base = 0; base < count; base += kGroupSize) {
      const int rows = min(kGroupSize, count - base);
      __syncthreads();
      for (int page = page_begin + warp; page < page_end; page += kWarps) {
        const ActivityMap& map = request.maps[page];
        const std::uint64_t active = map.active[stream - 1] & page_mask(page, task.begin, task.end);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int bit = lane + 32 * half;
          const int compact = static_cast<int>(map.rank[stream - 1]) + bits_below(active, bit) - base;
          if (((active >> bit) & 1u) && compact >= 0 && compact < kGroupSize) positions[compact] = page * kPageTokens + bit;
        }
      }
      __syncthreads();
      for (int i = row_step; i < rows; i += kRowsPerStep) {
        const int page = positions[i] / kPageTokens, row = positions[i] % kPageTokens;
        const PageTableEntry& entry = request.pages[page];
        const ActivityMap& map = request.maps[page];
        const std::size_t offset = page_row_offset(shape, layer, tensor, head, row) + channel;
        float value = __bfloat162float(reinterpret_cast<const __nv_bfloat16*>(entry.bf16[stream - 1])[offset]);
        if (stream > 1) {
          const float predecessor =
              fault == Fault::unreconstructed_predecessor
                  ? __bfloat162float(reinterpret_cast<const __nv_bfloat16*>(entry.bf16[resident_loop(map, row, stream - 1) - 1])[offset])
                  : reconstruct(shape, entry, map, layer, stream - 1, tensor, head, row, channel);
          value = __fsub_rn(value, predecessor);
        }
        values[i][channel] = value;
      }
      __syncthreads();
      if (tensor == KvTensor::k) {  // a group is one channel of the compact rows
        if (threadIdx.x < kHeadDim) {
          float minimum = values[0][channel], maximum = minimum;
          bool finite = isfinite(minimum);
          for (int i = 1; i < rows; ++i) {
            const float value = values[i][channel];
            finite = finite && isfinite(value);
            if (value < minimum) minimum = value;
            if (value > maximum) maximum = value;
          }
          const Group group = make_group(minimum, maximum, finite);
          groups[channel] = group;
          parameters[static_cast<std::size_t>(base / kGroupSize) * kHeadDim + channel] = group.parameters;
          if (!group.encodable && numeric_fault != nullptr) {
            atomicMin(reinterpret_cast<unsigned long long*>(numeric_fault),
                      static_cast<unsigned long long>(
                          pack_numeric_fault({NumericFaultKind::k_group, stream, task.request, layer, positions[0], head, channel})));
          }
        }
      } else {  // a group is one row's 64 channels of one half
        for (int g = threadIdx.x; g < rows * kHalves; g += kThreads) {
          const int i = g / kHalves, half = g % kHalves;
          float minimum = values[i][half * kGroupSize], maximum = minimum;
          bool finite = isfinite(minimum);
          for (int c = 1; c < kGroupSize; ++c) {
            const float value = values[i][half * kGroupSize + c];
            finite = finite && isfinite(value);
            if (value < minimum) minimum = value;
            if (value > maximum) maximum = value;
          }
          const Group group = make_group(minimum, maximum, finite);
          groups[g] = group;
          parameters[static_cast<std::size_t>(base + i) * kHalves + half] = group.parameters;
          if (!group.encodable && numeric_fault != nullptr) {
            atomicMin(reinterpret_cast<unsigned long long*>(numeric_fault),
                      static_cast<unsigned long long>(
                          pack_numeric_fault({NumericFaultKind::v_group, stream, task.request, layer, positions[i], head, half})));
          }
        }
      }
      __syncthreads();
      constexpr int kWords = kHeadDim / 8;
      for (int w = threadIdx.x; w < rows * kWords; w += kThreads) {
        const int i = w / kWords, word = w % kWords;
        std::uint32_t packed = 0;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const int c = 8 * word + j;
          const Group& group = tensor == KvTensor::k ? groups[c] : groups[i * kHalves + c / kGroupSize];
          packed |= encode(group, values[i][c]) << (4 * j);
        }
        reinterpret_cast<std::uint32_t*>(payload + static_cast<std::size_t>(base + i) * (kHeadDim / 2))[word] = packed;
      }
    }
    __syncthreads();  // the next stream reads what this one wrote
  }
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
        const float minimum = __half2float(__ushort_as_half(static_cast<unsigned short>(stored & 0xFFFFu)));
        const float scale = __half2float(__ushort_as_half(static_cast<unsigned short>(stored >> 16)));
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
