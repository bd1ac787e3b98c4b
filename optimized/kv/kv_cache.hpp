// SPDX-License-Identifier: Apache-2.0
// K/V storage of all live requests: BF16 pages, sealed INT4 blocks, activity maps. The host owns the tables and mirrors them to the
// device; it never computes on K/V. SPEC.md: "Terms", "KV base and residual quantization".
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "models/algorithm_config.hpp"
#include "optimized/kv/kv_layout.hpp"
#include "optimized/runtime/device_allocator.hpp"

namespace loopgauge::optimized {

// Rows of [begin, end) that loops loop_first..loop_last encode: one block or the streams of it that are due now.
// POD: an array of these goes to the encoder.
struct EncodeTask {
  std::int32_t request;
  std::int32_t begin;  // multiple of 64
  std::int32_t end;
  std::int32_t loop_first;  // 1..4
  std::int32_t loop_last;
};

struct KvCacheOptions {
  bool quantized = false;  // pages hold a tail that will be encoded (category bf16_tail) instead of planes that stay (bf16_planes)
  bool poison_reused_pages = false;  // fill a page with NaN patterns when it leaves the free list
};

struct SealedBlock {
  PositionRange positions;
  std::array<std::uint32_t, kLoops> rows{};  // capacity of each stream
  DeviceBuffer base_payload, residual_payload, parameters;
};

// One owner, one stream: everything is ordered on `stream`. Not thread-safe.
// Errors: UnsupportedError for a shape outside {head_dim 64, 128}, more than kMaxRequests requests or positions beyond what was opened;
// DeviceMemoryError when the device is full (the cache stays usable); InternalError for a violated precondition.
class KvCache {
 public:
  KvCache(const KvShape& shape, DeviceAllocator& allocator, cudaStream_t stream, KvCacheOptions options = {});
  ~KvCache();
  KvCache(const KvCache&) = delete;
  KvCache& operator=(const KvCache&) = delete;

  const KvShape& shape() const { return shape_; }

  // A slot for a request of at most `max_positions` positions. Closing frees pages, blocks and tables.
  int open_request(int max_positions);
  void close_request(int request);
  int live_requests() const;

  // BF16 pages of plane `loop` for [begin, end) exist afterwards (fresh, or taken from the free list). Call before the rows are written.
  // The second form reserves only the pages that hold one of `positions` (compact loops).
  void reserve(int request, int loop, PositionRange positions);
  void reserve(int request, int loop, std::span<const std::int32_t> positions);
  // Rows that execute `loop` (1..4). Call before attention of that loop; idempotent. At loop 1 this makes the rows exist.
  void set_active(int request, int loop, PositionRange positions);
  void set_active(int request, int loop, std::span<const std::int32_t> positions);
  // Positions >= `position` become invalid in every plane (their masks are cleared; pages stay). None of them may be encoded.
  void truncate(int request, int position);

  // Makes (or finds) the block of exactly `positions` and the ranks of streams loop_first..loop_last from the masks as they are now.
  // `capacity`: rows reserved for each stream when the block is made; 0 = the count that the masks give (streams not yet known need it).
  EncodeTask prepare_encode(int request, PositionRange positions, int loop_first, int loop_last,
                            const std::array<std::uint32_t, kLoops>& capacity = {});
  // Returns to the free list the BF16 pages of plane `loop` whose 64 positions all lie in `positions`.
  void release_planes(int request, int loop, PositionRange positions);
  // Gives the free list back to the allocator (waits for the device).
  void trim();

  // Copies the changed table entries to the device, ordered on the stream. Call after changes and before the kernels that read them.
  void upload();
  KvView view() const;

  // Host mirrors, for dumps, accounting and tests.
  std::span<const PageTableEntry> pages(int request) const;
  std::span<const ActivityMap> maps(int request) const;
  std::span<const SealedBlock> blocks(int request) const;
  std::size_t pages_in_use() const { return pages_in_use_; }
  std::size_t free_pages() const { return free_pages_.size(); }

 private:
  struct Request {
    bool live = false;
    int max_positions = 0;
    std::vector<PageTableEntry> pages;
    std::vector<ActivityMap> maps;
    std::vector<std::array<DeviceBuffer, kLoops>> buffers;  // owners of pages[].bf16
    std::vector<SealedBlock> blocks;
    DeviceBuffer device_pages, device_maps;
    int dirty_begin = 0, dirty_end = 0;  // pages to upload
  };
  Request& live(int request);
  const Request& live(int request) const;
  void check_range(const Request& slot, PositionRange positions, const char* what) const;
  void check_position(const Request& slot, int position, const char* what) const;
  void mark_dirty(Request& slot, int page_begin, int page_end);
  void reserve_page(Request& slot, int loop, int page);
  void return_page(Request& slot, int loop, int page);
  SealedBlock& block_of(Request& slot, PositionRange positions, const std::array<std::uint32_t, kLoops>& capacity);
  DeviceBuffer take_page();

  KvShape shape_;
  DeviceAllocator& allocator_;
  cudaStream_t stream_;
  KvCacheOptions options_;
  std::array<Request, kMaxRequests> requests_;
  std::array<RequestTable, kMaxRequests> tables_{};
  DeviceBuffer device_tables_;
  bool tables_dirty_ = true;
  std::vector<DeviceBuffer> free_pages_;
  std::size_t pages_in_use_ = 0;
};

}  // namespace loopgauge::optimized
