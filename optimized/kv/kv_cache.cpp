// SPDX-License-Identifier: Apache-2.0
#include "optimized/kv/kv_cache.hpp"

#include <algorithm>
#include <bit>
#include <string>

#include "models/error.hpp"
#include "optimized/runtime/cuda_check.hpp"

namespace loopgauge::optimized {
namespace {

std::string range_text(PositionRange range) { return "[" + std::to_string(range.begin) + ", " + std::to_string(range.end) + ")"; }

void check_loop(int loop, const char* what) {
  if (loop < 1 || loop > kLoops)
    throw InternalError(std::string("K/V cache, ") + what + ": loop " + std::to_string(loop) + " is not in 1..4");
}

std::uint64_t address(DeviceBuffer& buffer) { return reinterpret_cast<std::uint64_t>(buffer.data()); }

}  // namespace

KvCache::KvCache(const KvShape& shape, DeviceAllocator& allocator, cudaStream_t stream, KvCacheOptions options)
    : shape_(shape), allocator_(allocator), stream_(stream), options_(options) {
  if (shape.head_dim != 64 && shape.head_dim != 128) {
    throw UnsupportedError("the CUDA K/V cache supports head_dim 64 and 128, not " + std::to_string(shape.head_dim));
  }
  if (shape.layers < 1 || shape.layers > 1024 || shape.heads < 1 || shape.heads > 1024) {
    throw UnsupportedError("the CUDA K/V cache supports 1..1024 layers and heads, not " + std::to_string(shape.layers) + " layers x " +
                           std::to_string(shape.heads) + " heads");
  }
  device_tables_ = allocator_.allocate_array<RequestTable>(MemoryCategory::workspace, kMaxRequests);
}

KvCache::~KvCache() = default;

int KvCache::open_request(int max_positions) {
  if (max_positions < 1 || max_positions > (1 << 24)) {
    throw UnsupportedError("a request of " + std::to_string(max_positions) + " positions: the CUDA K/V cache supports 1.." +
                           std::to_string(1 << 24));
  }
  const auto slot = std::find_if(requests_.begin(), requests_.end(), [](const Request& request) { return !request.live; });
  if (slot == requests_.end()) {
    throw UnsupportedError("more than " + std::to_string(kMaxRequests) + " live requests: finish or cancel one first");
  }
  const auto count = static_cast<std::size_t>(page_count(max_positions));
  Request fresh;
  fresh.device_pages = allocator_.allocate_array<PageTableEntry>(MemoryCategory::inherited_references, count);
  fresh.device_maps = allocator_.allocate_array<ActivityMap>(MemoryCategory::activity_maps, count);
  fresh.live = true;
  fresh.max_positions = max_positions;
  fresh.pages.assign(count, PageTableEntry{});
  fresh.maps.assign(count, ActivityMap{});
  fresh.buffers.resize(count);
  fresh.dirty_end = static_cast<int>(count);
  *slot = std::move(fresh);
  const auto index = static_cast<std::size_t>(slot - requests_.begin());
  tables_[index] = {slot->device_pages.as<PageTableEntry>(), slot->device_maps.as<ActivityMap>(), static_cast<std::uint32_t>(count)};
  tables_dirty_ = true;
  return static_cast<int>(index);
}

void KvCache::close_request(int request) {
  Request& slot = live(request);
  for (int page = 0; page < static_cast<int>(slot.pages.size()); ++page) {
    for (int loop = 1; loop <= kLoops; ++loop) return_page(slot, loop, page);
  }
  slot = Request{};
  tables_[static_cast<std::size_t>(request)] = RequestTable{};
  tables_dirty_ = true;
}

int KvCache::live_requests() const {
  return static_cast<int>(std::count_if(requests_.begin(), requests_.end(), [](const Request& request) { return request.live; }));
}

void KvCache::reserve(int request, int loop, PositionRange positions) {
  Request& slot = live(request);
  check_loop(loop, "reserve");
  check_range(slot, positions, "reserve");
  for (int page = positions.begin / kPageTokens; page < page_count(positions.end); ++page) reserve_page(slot, loop, page);
}

void KvCache::reserve(int request, int loop, std::span<const std::int32_t> positions) {
  Request& slot = live(request);
  check_loop(loop, "reserve");
  for (const std::int32_t position : positions) {
    check_position(slot, position, "reserve");
    reserve_page(slot, loop, position / kPageTokens);
  }
}

void KvCache::set_active(int request, int loop, PositionRange positions) {
  Request& slot = live(request);
  check_loop(loop, "set_active");
  check_range(slot, positions, "set_active");
  for (int page = positions.begin / kPageTokens; page < page_count(positions.end); ++page) {
    slot.maps[static_cast<std::size_t>(page)].active[loop - 1] |= page_mask(page, positions.begin, positions.end);
    mark_dirty(slot, page, page + 1);
  }
}

void KvCache::set_active(int request, int loop, std::span<const std::int32_t> positions) {
  Request& slot = live(request);
  check_loop(loop, "set_active");
  for (const std::int32_t position : positions) {
    check_position(slot, position, "set_active");
    const int page = position / kPageTokens;
    slot.maps[static_cast<std::size_t>(page)].active[loop - 1] |= std::uint64_t{1} << (position % kPageTokens);
    mark_dirty(slot, page, page + 1);
  }
}

void KvCache::truncate(int request, int position) {
  Request& slot = live(request);
  if (position < 0) throw InternalError("K/V cache, truncate: negative position " + std::to_string(position));
  for (const SealedBlock& block : slot.blocks) {
    if (block.positions.end > position) {
      throw InternalError("K/V cache, truncate: positions from " + std::to_string(position) + " include the encoded block " +
                          range_text(block.positions));
    }
  }
  for (int page = position / kPageTokens; page < static_cast<int>(slot.maps.size()); ++page) {
    for (std::uint64_t& mask : slot.maps[static_cast<std::size_t>(page)].active) mask &= page_mask(page, 0, position);
    mark_dirty(slot, page, page + 1);
  }
}

SealedBlock& KvCache::block_of(Request& slot, PositionRange positions, const std::array<std::uint32_t, kLoops>& capacity) {
  for (SealedBlock& block : slot.blocks) {
    if (block.positions == positions) return block;
  }
  const int expected_begin = slot.blocks.empty() ? 0 : slot.blocks.back().positions.end;
  if (positions.begin != expected_begin || positions.begin % kPageTokens != 0) {
    throw InternalError("K/V cache: block " + range_text(positions) + " does not continue the encoded positions, which end at " +
                        std::to_string(expected_begin) + ", at a page boundary");
  }
  SealedBlock block;
  block.positions = positions;
  const int page_begin = positions.begin / kPageTokens, page_end = page_count(positions.end);
  for (std::size_t stream = 0; stream < kLoops; ++stream) {
    std::uint32_t count = 0;
    for (int page = page_begin; page < page_end; ++page) {
      count += static_cast<std::uint32_t>(
          std::popcount(slot.maps[static_cast<std::size_t>(page)].active[stream] & page_mask(page, positions.begin, positions.end)));
    }
    block.rows[stream] = capacity[stream] != 0 ? capacity[stream] : count;
  }
  if (block.rows[0] != static_cast<std::uint32_t>(positions.size())) {
    throw InternalError("K/V cache: block " + range_text(positions) + " has " + std::to_string(block.rows[0]) + " rows in stream 1, not " +
                        std::to_string(positions.size()));
  }
  block.base_payload = allocator_.allocate(MemoryCategory::base_payload, base_payload_bytes(shape_, block.rows.data()));
  block.residual_payload = allocator_.allocate(MemoryCategory::residual_payload, residual_payload_bytes(shape_, block.rows.data()));
  block.parameters = allocator_.allocate(MemoryCategory::parameters, parameter_bytes(shape_, block.rows.data()));
  for (int page = page_begin; page < page_end; ++page) {
    PageTableEntry& entry = slot.pages[static_cast<std::size_t>(page)];
    entry.base_payload = address(block.base_payload);
    entry.residual_payload = address(block.residual_payload);
    entry.parameters = address(block.parameters);
    std::copy(block.rows.begin(), block.rows.end(), slot.maps[static_cast<std::size_t>(page)].rows);
  }
  mark_dirty(slot, page_begin, page_end);
  return slot.blocks.emplace_back(std::move(block));
}

EncodeTask KvCache::prepare_encode(int request, PositionRange positions, int loop_first, int loop_last,
                                   const std::array<std::uint32_t, kLoops>& capacity) {
  Request& slot = live(request);
  check_loop(loop_first, "prepare_encode");
  check_loop(loop_last, "prepare_encode");
  check_range(slot, positions, "prepare_encode");
  const SealedBlock& block = block_of(slot, positions, capacity);
  const int page_begin = positions.begin / kPageTokens, page_end = page_count(positions.end);
  for (int loop = loop_first; loop <= loop_last; ++loop) {
    std::uint32_t rank = 0;
    for (int page = page_begin; page < page_end; ++page) {
      ActivityMap& map = slot.maps[static_cast<std::size_t>(page)];
      map.rank[loop - 1] = rank;
      rank += static_cast<std::uint32_t>(std::popcount(map.active[loop - 1] & page_mask(page, positions.begin, positions.end)));
    }
    if (rank > block.rows[static_cast<std::size_t>(loop - 1)]) {
      throw InternalError("K/V cache: block " + range_text(positions) + " reserved " +
                          std::to_string(block.rows[static_cast<std::size_t>(loop - 1)]) + " rows of stream " + std::to_string(loop) +
                          ", " + std::to_string(rank) + " are active");
    }
  }
  mark_dirty(slot, page_begin, page_end);
  return {request, positions.begin, positions.end, loop_first, loop_last};
}

void KvCache::release_planes(int request, int loop, PositionRange positions) {
  Request& slot = live(request);
  check_loop(loop, "release_planes");
  check_range(slot, positions, "release_planes");
  for (int page = page_count(positions.begin); (page + 1) * kPageTokens <= positions.end; ++page) {
    return_page(slot, loop, page);
    mark_dirty(slot, page, page + 1);
  }
}

void KvCache::trim() { free_pages_.clear(); }

void KvCache::upload() {
  for (Request& slot : requests_) {
    if (slot.dirty_begin >= slot.dirty_end) continue;
    const auto begin = static_cast<std::size_t>(slot.dirty_begin);
    const auto count = static_cast<std::size_t>(slot.dirty_end - slot.dirty_begin);
    // The sources are pageable: the copies have been staged when the calls return, so the mirrors may change at once.
    LOOPGAUGE_CUDA_CHECK(cudaMemcpyAsync(slot.device_pages.as<PageTableEntry>() + begin, slot.pages.data() + begin,
                                         count * sizeof(PageTableEntry), cudaMemcpyHostToDevice, stream_));
    LOOPGAUGE_CUDA_CHECK(cudaMemcpyAsync(slot.device_maps.as<ActivityMap>() + begin, slot.maps.data() + begin, count * sizeof(ActivityMap),
                                         cudaMemcpyHostToDevice, stream_));
    slot.dirty_begin = slot.dirty_end = 0;
  }
  if (tables_dirty_) {
    LOOPGAUGE_CUDA_CHECK(cudaMemcpyAsync(device_tables_.data(), tables_.data(), sizeof(tables_), cudaMemcpyHostToDevice, stream_));
    tables_dirty_ = false;
  }
}

KvView KvCache::view() const { return {shape_, device_tables_.as<RequestTable>()}; }

std::span<const PageTableEntry> KvCache::pages(int request) const { return live(request).pages; }
std::span<const ActivityMap> KvCache::maps(int request) const { return live(request).maps; }
std::span<const SealedBlock> KvCache::blocks(int request) const { return live(request).blocks; }

KvCache::Request& KvCache::live(int request) { return const_cast<Request&>(static_cast<const KvCache*>(this)->live(request)); }

const KvCache::Request& KvCache::live(int request) const {
  if (request < 0 || request >= kMaxRequests || !requests_[static_cast<std::size_t>(request)].live) {
    throw InternalError("K/V cache: request slot " + std::to_string(request) + " is not open");
  }
  return requests_[static_cast<std::size_t>(request)];
}

void KvCache::check_range(const Request& slot, PositionRange positions, const char* what) const {
  if (positions.begin < 0 || positions.begin >= positions.end || positions.end > slot.max_positions) {
    throw InternalError(std::string("K/V cache, ") + what + ": positions " + range_text(positions) + " are not inside [0, " +
                        std::to_string(slot.max_positions) + ")");
  }
}

void KvCache::check_position(const Request& slot, int position, const char* what) const {
  check_range(slot, {position, position + 1}, what);
}

void KvCache::mark_dirty(Request& slot, int page_begin, int page_end) {
  if (slot.dirty_begin >= slot.dirty_end) {
    slot.dirty_begin = page_begin;
    slot.dirty_end = page_end;
  } else {
    slot.dirty_begin = std::min(slot.dirty_begin, page_begin);
    slot.dirty_end = std::max(slot.dirty_end, page_end);
  }
}

void KvCache::reserve_page(Request& slot, int loop, int page) {
  DeviceBuffer& buffer = slot.buffers[static_cast<std::size_t>(page)][static_cast<std::size_t>(loop - 1)];
  if (buffer) return;
  buffer = take_page();
  ++pages_in_use_;
  slot.pages[static_cast<std::size_t>(page)].bf16[loop - 1] = address(buffer);
  mark_dirty(slot, page, page + 1);
}

void KvCache::return_page(Request& slot, int loop, int page) {
  DeviceBuffer& buffer = slot.buffers[static_cast<std::size_t>(page)][static_cast<std::size_t>(loop - 1)];
  if (!buffer) return;
  free_pages_.push_back(std::move(buffer));
  --pages_in_use_;
  slot.pages[static_cast<std::size_t>(page)].bf16[loop - 1] = 0;
}

DeviceBuffer KvCache::take_page() {
  if (free_pages_.empty()) {
    return allocator_.allocate(options_.quantized ? MemoryCategory::bf16_tail : MemoryCategory::bf16_planes, page_bytes(shape_));
  }
  DeviceBuffer buffer = std::move(free_pages_.back());
  free_pages_.pop_back();
  if (options_.poison_reused_pages) LOOPGAUGE_CUDA_CHECK(cudaMemsetAsync(buffer.data(), 0xFF, buffer.size_bytes(), stream_));
  return buffer;
}

}  // namespace loopgauge::optimized
