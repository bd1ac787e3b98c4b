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
#include "optimized/kv/kv_storage.hpp"
#include "optimized/runtime/device_allocator.hpp"
#include "optimized/runtime/pinned_arena.hpp"

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

// Rows that are about to be written: the pages of plane `loop` that hold one of `positions`.
struct PageReservation {
  int request = 0;
  int loop = 1;
  std::span<const std::int32_t> positions;
};

// Whole pages of one request's K/V, held so that other requests can read them too.
struct KvExtent {
  PositionRange positions;        // whole pages
  std::vector<ActivityMap> maps;  // one per page
  std::vector<std::array<PageHandle, kLoops>>
      pages;                        // one per page, index loop - 1; null where the page is encoded or no row executed the loop
  std::vector<BlockHandle> blocks;  // that cover `positions`, as far as they are encoded

  // Holders beside this one read it.
  bool shared() const;
  // Device bytes that are free when this extent is dropped and nobody else holds it.
  std::size_t size_bytes() const;
};

// What must be allocated for a request before the bytes of its regions() can be put back: all of a request but those bytes.
struct KvLayout {
  struct Block {
    PositionRange positions;
    std::array<std::uint32_t, kLoops> rows{};
    bool operator==(const Block&) const = default;
  };
  int max_positions = 0;
  std::vector<ActivityMap> maps;       // one per page
  std::vector<std::uint8_t> resident;  // one per page: bit loop - 1 is set where the BF16 page exists
  std::vector<Block> blocks;           // in position order from 0
};

enum class KvRegionKind : std::uint32_t { base_payload, residual_payload, parameters, bf16_page };

// One contiguous range of device memory that belongs to a request.
struct KvRegion {
  KvRegionKind kind = KvRegionKind::bf16_page;
  std::int32_t index = 0;  // block or page
  std::int32_t loop = 0;   // of a BF16 page: 1..4
  void* data = nullptr;
  std::size_t bytes = 0;
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
  bool quantized() const { return storage_.quantized(); }

  // A slot for a request of at most `max_positions` positions. Closing frees pages, blocks and tables.
  int open_request(int max_positions);
  // A slot with the pages and blocks of `layout`, whose bytes are the caller's to write: regions() of the result lists them in the order
  // and sizes that it had for the request that the layout is of. All or nothing. Throws InternalError for a layout that no request can
  // have.
  int open_request(const KvLayout& layout);
  void close_request(int request);
  int live_requests() const;

  // The pages exist afterwards (fresh, or taken from the free list) and have no other holder. Call before the rows are written. All or
  // nothing: a refused reservation leaves every request, mask and count as it was.
  void reserve(std::span<const PageReservation> reservations);
  void reserve(int request, int loop, std::span<const std::int32_t> positions);
  void reserve(int request, int loop, PositionRange positions);
  // The next reservation fails with DeviceMemoryError when all its pages but one are taken: a planned failure.
  void refuse_next_reservation() { refuse_next_ = true; }
  // Rows that execute `loop` (1..4). Call before attention of that loop; idempotent. At loop 1 this makes the rows exist.
  void set_active(int request, int loop, PositionRange positions);
  void set_active(int request, int loop, std::span<const std::int32_t> positions);
  // The same for rows whose bits a kernel sets on the device: the host's copy follows.
  void note_active(int request, int loop, PositionRange positions);
  void note_active(int request, int loop, std::span<const std::int32_t> positions);
  // The host's copy has no rows from `position` on; what the device has there it takes away itself.
  void forget_noted(int request, int position);
  // Pages of plane `loop` without an active row go back to the free list: they were reserved before the rows were known.
  void release_unused(int request, int loop, PositionRange positions);
  // Positions >= `position` become invalid in every plane (their masks are cleared; pages stay). None of them may be encoded, unless `sealed`
  // says that blocks which reach beyond stay as they are: whoever comes to stand there is read from its pages until it is encoded again.
  enum class Sealed { refused, kept };
  void truncate(int request, int position, Sealed sealed = Sealed::refused);
  // Back to a frontier below which everything is complete: rows from `position` on do not exist any more, in no representation. Blocks that
  // begin there are dropped whatever streams they have; a block that reaches over it is an InternalError.
  void rewind(int request, int position);

  // Blocks that begin at or after `position` are no more. Nobody reads them encoded, or will.
  void drop_blocks(int request, int position);

  // Holds [begin, end) for other readers: whole pages, which must not be written after. What is encoded there lies in whole blocks.
  KvExtent share(int request, PositionRange positions) const;
  // The request reads the extent's pages and blocks in place; its activity maps are its own. It has no rows at or after the extent's begin.
  void adopt(int request, const KvExtent& extent);

  // Makes (or finds) the block of exactly `positions` and the ranks of streams loop_first..loop_last from the masks as they are now.
  // `capacity`: rows reserved for each stream when the block is made; 0 = the count that the masks give (streams not yet known need it).
  // Without `members_known` the masks lack rows that only the device knows, and rank_rows() must count the ranks before the encoder runs.
  EncodeTask prepare_encode(int request, PositionRange positions, int loop_first, int loop_last,
                            const std::array<std::uint32_t, kLoops>& capacity = {}, bool members_known = true);
  // Returns to the free list the BF16 pages of plane `loop` whose 64 positions all lie in `positions`.
  void release_planes(int request, int loop, PositionRange positions);
  // Gives the free list back to the allocator down to `keep` pages.
  void trim(std::size_t keep = 0) { storage_.trim(keep); }

  // Copies the changed table entries to the device, ordered on the stream. Call after changes and before the kernels that read them.
  void upload(PinnedArena& arena);
  void upload();  // waits for the device
  // The other way: the host's copy of the request's maps is what the device has. Waits for the device.
  void read_maps(int request);
  KvView view() const;

  // Host mirrors, for dumps, accounting and tests.
  std::span<const PageTableEntry> pages(int request) const;
  std::span<const ActivityMap> maps(int request) const;
  std::span<const BlockHandle> blocks(int request) const;
  KvLayout layout(int request) const;
  // Everything that the request's tables point to: blocks in position order (base payload, residual payload, parameters; no empty ones),
  // then BF16 pages by position and loop.
  std::vector<KvRegion> regions(int request) const;
  // Whoever holds them; what several hold counts once.
  std::size_t pages_in_use() const { return storage_.pages_in_use(); }
  std::size_t blocks_in_use() const { return storage_.blocks_in_use(); }
  std::size_t free_pages() const { return storage_.free_pages(); }

 private:
  struct Request {
    bool live = false;
    int max_positions = 0;
    std::vector<PageTableEntry> pages;
    std::vector<ActivityMap> maps;
    std::vector<std::array<PageHandle, kLoops>> handles;  // of pages[].bf16
    std::vector<BlockHandle> blocks;
    std::vector<std::uint8_t> map_flags;  // of maps: kReplaceActivity, kKeepRanks
    DeviceBuffer device_pages, device_maps;
    int dirty_begin = 0, dirty_end = 0;  // pages to upload
  };
  Request& live(int request);
  const Request& live(int request) const;
  void check_range(const Request& slot, PositionRange positions, const char* what) const;
  void check_position(const Request& slot, int position, const char* what) const;
  void mark_dirty(Request& slot, int page_begin, int page_end);
  void set_page(Request& slot, int loop, int page, PageHandle handle);
  void enter_block(Request& slot, const BlockHandle& block);
  SealedBlock& block_of(Request& slot, PositionRange positions, const std::array<std::uint32_t, kLoops>& capacity);

  KvShape shape_;
  DeviceAllocator& allocator_;
  cudaStream_t stream_;
  KvStorage storage_;
  bool refuse_next_ = false;
  std::array<Request, kMaxRequests> requests_;
  std::array<RequestTable, kMaxRequests> tables_{};
  DeviceBuffer device_tables_;
  bool tables_dirty_ = true;
};

}  // namespace loopgauge::optimized
