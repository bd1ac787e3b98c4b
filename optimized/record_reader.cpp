// SPDX-License-Identifier: Apache-2.0
#include "optimized/record_reader.hpp"

#include <cuda_fp16.h>

#include <algorithm>
#include <bit>
#include <string>

#include "models/error.hpp"
#include "optimized/ops/residual_encode.cuh"
#include "optimized/runtime/cuda_check.hpp"

namespace loopgauge::optimized {
namespace {

template <class T>
void copy_to_host(T* target, const void* source, std::size_t count, cudaStream_t stream) {
  if (count != 0) LOOPGAUGE_CUDA_CHECK(cudaMemcpyAsync(target, source, count * sizeof(T), cudaMemcpyDeviceToHost, stream));
}

float half_to_float(std::uint16_t bits) {
  __half_raw raw;
  raw.x = bits;
  return __half2float(__half(raw));
}

// The first `rows` compact rows of one (layer, stream, tensor) of a block whose payload and parameters lie in host memory.
struct UnpackedTensor {
  Tensor<std::uint8_t> codes;
  Tensor<float> min, scale;
};

UnpackedTensor unpack(const KvShape& shape, const PageTableEntry& host, const ActivityMap& map, int layer, int stream, KvTensor tensor,
                      std::int64_t rows) {
  const std::int64_t groups = (rows + kGroupSize - 1) / kGroupSize, halves = shape.head_dim / kGroupSize;
  UnpackedTensor result;
  result.codes = Tensor<std::uint8_t>({shape.heads, rows, shape.head_dim});
  const std::vector<std::int64_t> parameter_shape =
      tensor == KvTensor::k ? std::vector<std::int64_t>{shape.heads, groups, shape.head_dim} : std::vector<std::int64_t>{shape.heads, rows, halves};
  result.min = Tensor<float>(parameter_shape);
  result.scale = Tensor<float>(parameter_shape);
  for (int head = 0; head < shape.heads; ++head) {
    const StreamTile tile = stream_tile(shape, host, map, layer, stream, tensor, head);
    auto codes = result.codes.row(head);
    for (std::size_t i = 0; i < codes.size(); ++i) codes[i] = (tile.payload[i / 2] >> (i % 2 * 4)) & 15u;
    auto min = result.min.row(head), scale = result.scale.row(head);
    for (std::size_t i = 0; i < min.size(); ++i) {
      min[i] = half_to_float(static_cast<std::uint16_t>(tile.parameters[i]));
      scale[i] = half_to_float(static_cast<std::uint16_t>(tile.parameters[i] >> 16));
    }
  }
  return result;
}

}  // namespace

std::vector<KvPlane> read_planes(const KvCache& kv, int request, int length, int encoded_frontier, int loops, DeviceAllocator& allocator,
                                 cudaStream_t stream) {
  const KvShape& shape = kv.shape();
  const std::size_t count = static_cast<std::size_t>(shape.heads) * length * shape.head_dim;
  DeviceBuffer k = allocator.allocate_array<float>(MemoryCategory::transfer_buffers, count);
  DeviceBuffer v = allocator.allocate_array<float>(MemoryCategory::transfer_buffers, count);
  std::vector<KvPlane> planes(static_cast<std::size_t>(shape.layers) * kLoops);
  for (int layer = 0; layer < shape.layers; ++layer) {
    for (int loop = 1; loop <= loops; ++loop) {
      KvPlane& plane = planes[static_cast<std::size_t>(layer * kLoops + loop - 1)];
      plane.k = Tensor<float>({shape.heads, length, shape.head_dim});
      plane.v = Tensor<float>({shape.heads, length, shape.head_dim});
      kv_gather({kv.view(), layer, loop, request, encoded_frontier, 0, length, k.as<float>(), v.as<float>()}, stream);
      copy_to_host(plane.k.data.data(), k.data(), count, stream);
      copy_to_host(plane.v.data.data(), v.data(), count, stream);
    }
  }
  LOOPGAUGE_CUDA_CHECK(cudaStreamSynchronize(stream));
  return planes;
}

std::vector<CodecBlock> read_blocks(const KvCache& kv, int request, cudaStream_t stream) {
  const KvShape& shape = kv.shape();
  std::vector<CodecBlock> result;
  for (const BlockHandle& handle : kv.blocks(request)) {
    const SealedBlock& block = *handle;
    // Words, so that the parameters are aligned as on the device.
    const auto host_copy = [&](const DeviceBuffer& buffer) {
      std::vector<std::uint32_t> bytes((buffer.size_bytes() + 3) / 4);
      if (buffer) LOOPGAUGE_CUDA_CHECK(cudaMemcpyAsync(bytes.data(), buffer.data(), buffer.size_bytes(), cudaMemcpyDeviceToHost, stream));
      return bytes;
    };
    const auto base = host_copy(block.base_payload), residual = host_copy(block.residual_payload), parameters = host_copy(block.parameters);
    LOOPGAUGE_CUDA_CHECK(cudaStreamSynchronize(stream));
    PageTableEntry host{};
    host.base_payload = reinterpret_cast<std::uint64_t>(base.data());
    host.residual_payload = reinterpret_cast<std::uint64_t>(residual.data());
    host.parameters = reinterpret_cast<std::uint64_t>(parameters.data());
    ActivityMap map{};
    for (std::size_t i = 0; i < kLoops; ++i) map.rows[i] = block.rows[i];

    CodecBlock& out = result.emplace_back();
    out.positions = block.positions;
    for (int loop = 1; loop <= kLoops; ++loop) {
      CodecStream& codec = out.streams[static_cast<std::size_t>(loop - 1)];
      for (int position = block.positions.begin; position < block.positions.end; ++position) {
        const ActivityMap& page = kv.maps(request)[static_cast<std::size_t>(position / kPageTokens)];
        if ((page.active[loop - 1] >> (position % kPageTokens)) & 1u) codec.rows.push_back(position);
      }
      // More are reserved where a block was sealed before the host knew its members.
      if (codec.rows.size() > block.rows[static_cast<std::size_t>(loop - 1)]) {
        throw InternalError("block [" + std::to_string(block.positions.begin) + ", " + std::to_string(block.positions.end) + ") reserved " +
                            std::to_string(block.rows[static_cast<std::size_t>(loop - 1)]) + " rows of stream " + std::to_string(loop) + ", " +
                            std::to_string(codec.rows.size()) + " are active");
      }
      if (codec.rows.empty()) continue;
      for (int layer = 0; layer < shape.layers; ++layer) {
        const auto rows = static_cast<std::int64_t>(codec.rows.size());
        UnpackedTensor k = unpack(shape, host, map, layer, loop, KvTensor::k, rows);
        UnpackedTensor v = unpack(shape, host, map, layer, loop, KvTensor::v, rows);
        codec.layers.push_back({std::move(k.codes), std::move(k.min), std::move(k.scale), std::move(v.codes), std::move(v.min), std::move(v.scale)});
      }
    }
  }
  return result;
}

StepKeys read_keys(const KvShape& shape, const std::uint64_t* masks, int mask_pages, const float* mass, int position, int count) {
  StepKeys step;
  step.mass = Tensor<float>({shape.layers, shape.heads});
  std::copy_n(mass, step.mass.data.size(), step.mass.data.begin());
  for (int layer = 0; layer < shape.layers; ++layer) {
    Tensor<std::int32_t> keys({shape.heads, count});
    for (int head = 0; head < shape.heads; ++head) {
      const std::uint64_t* row = masks + (static_cast<std::size_t>(layer) * shape.heads + head) * static_cast<std::size_t>(mask_pages);
      std::size_t found = 0;
      auto out = keys.row(head);
      for (int page = 0; page < page_count(position + 1); ++page) {
        for (std::uint64_t mask = row[page]; mask != 0; mask &= mask - 1, ++found) {
          if (found < out.size()) out[found] = page * kPageTokens + std::countr_zero(mask);
        }
      }
      if (found != out.size()) {
        throw InternalError("layer " + std::to_string(layer) + ", head " + std::to_string(head) + ", position " + std::to_string(position) + ": " +
                            std::to_string(found) + " keys are selected, not " + std::to_string(count));
      }
    }
    step.layers.push_back(std::move(keys));
  }
  return step;
}

}  // namespace loopgauge::optimized
