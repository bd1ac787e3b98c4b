// SPDX-License-Identifier: Apache-2.0
#include "optimized/kv/kv_storage.hpp"

#include <algorithm>

#include "optimized/runtime/cuda_check.hpp"

namespace loopgauge::optimized {

KvStorage::KvStorage(const KvShape& shape, DeviceAllocator& allocator, cudaStream_t stream, const KvCacheOptions& options)
    : shape_(shape), allocator_(allocator), stream_(stream), options_(options) {}

PageHandle KvStorage::take_page() {
  Shelf& shelf = *shelf_;
  shelf.free_pages.reserve(shelf.free_pages.size() + shelf.pages_in_use + 1);  // so that bringing a page back cannot fail
  DeviceBuffer buffer;
  if (shelf.free_pages.empty()) {
    buffer = allocator_.allocate(options_.quantized ? MemoryCategory::bf16_tail : MemoryCategory::bf16_planes, bytes_per_page());
  } else {
    buffer = std::move(shelf.free_pages.back());
    shelf.free_pages.pop_back();
    if (options_.poison_reused_pages) LOOPGAUGE_CUDA_CHECK(cudaMemsetAsync(buffer.data(), 0xFF, buffer.size_bytes(), stream_));
  }
  ++shelf.pages_in_use;
  return PageHandle(new DeviceBuffer(std::move(buffer)), [owner = shelf_](DeviceBuffer* page) {
    owner->free_pages.push_back(std::move(*page));
    --owner->pages_in_use;
    delete page;
  });
}

BlockHandle KvStorage::make_block(PositionRange positions, const std::array<std::uint32_t, kLoops>& rows) {
  SealedBlock block;
  block.positions = positions;
  block.rows = rows;
  block.base_payload = allocator_.allocate(MemoryCategory::base_payload, base_payload_bytes(shape_, rows.data()));
  block.residual_payload = allocator_.allocate(MemoryCategory::residual_payload, residual_payload_bytes(shape_, rows.data()));
  block.parameters = allocator_.allocate(MemoryCategory::parameters, parameter_bytes(shape_, rows.data()));
  ++shelf_->blocks_in_use;
  return BlockHandle(new SealedBlock(std::move(block)), [owner = shelf_](SealedBlock* done) {
    --owner->blocks_in_use;
    delete done;
  });
}

void KvStorage::trim(std::size_t keep) {
  std::vector<DeviceBuffer>& free_pages = shelf_->free_pages;
  free_pages.resize(std::min(keep, free_pages.size()));
}

}  // namespace loopgauge::optimized
