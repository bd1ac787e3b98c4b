// SPDX-License-Identifier: Apache-2.0
// What K/V is made of on the device: BF16 pages and sealed blocks. Both are held by any number of requests and published windows, are never
// written while more than one holds them, and are free with their last holder.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "models/algorithm_config.hpp"
#include "optimized/kv/kv_layout.hpp"
#include "optimized/runtime/device_allocator.hpp"

namespace loopgauge::optimized {

struct KvCacheOptions {
  bool quantized = false;  // pages hold a tail that will be encoded (category bf16_tail) instead of planes that stay (bf16_planes)
  bool poison_reused_pages = false;  // fill a page with NaN patterns when it leaves the free list
};

struct SealedBlock {
  PositionRange positions;
  std::array<std::uint32_t, kLoops> rows{};  // capacity of each stream
  DeviceBuffer base_payload, residual_payload, parameters;
};

using PageHandle = std::shared_ptr<DeviceBuffer>;  // null: no page
using BlockHandle = std::shared_ptr<SealedBlock>;

// Owner of the pages' memory. Handles may outlive it. Not thread-safe.
class KvStorage {
 public:
  KvStorage(const KvShape& shape, DeviceAllocator& allocator, cudaStream_t stream, const KvCacheOptions& options);

  bool quantized() const { return options_.quantized; }

  // From the free list, or fresh. Throws DeviceMemoryError; nothing changes then.
  PageHandle take_page();
  BlockHandle make_block(PositionRange positions, const std::array<std::uint32_t, kLoops>& rows);
  // Gives free pages back to the allocator until at most `keep` are left.
  void trim(std::size_t keep = 0);

  // A page or block with several holders counts once.
  std::size_t pages_in_use() const { return shelf_->pages_in_use; }
  std::size_t blocks_in_use() const { return shelf_->blocks_in_use; }
  std::size_t free_pages() const { return shelf_->free_pages.size(); }
  std::size_t bytes_per_page() const { return page_bytes(shape_); }

 private:
  // Shared with the handles, which bring pages back to it.
  struct Shelf {
    std::vector<DeviceBuffer> free_pages;
    std::size_t pages_in_use = 0, blocks_in_use = 0;
  };

  KvShape shape_;
  DeviceAllocator& allocator_;
  cudaStream_t stream_;
  KvCacheOptions options_;
  std::shared_ptr<Shelf> shelf_ = std::make_shared<Shelf>();
};

}  // namespace loopgauge::optimized
