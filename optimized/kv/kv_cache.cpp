// SPDX-License-Identifier: Apache-2.0
#include "optimized/kv/kv_cache.hpp"

#include <algorithm>
#include <bit>
#include <compare>
#include <iterator>
#include <string>
#include <utility>

#include "models/error.hpp"
#include "optimized/kv/activity_maps.cuh"
#include "optimized/runtime/cuda_check.hpp"

namespace loopgauge::optimized {
namespace {

std::string range_text(PositionRange range) { return "[" + std::to_string(range.begin) + ", " + std::to_string(range.end) + ")"; }

void check_loop(int loop, const char* what) {
  if (loop < 1 || loop > kLoops)
    throw InternalError(std::string("K/V cache, ") + what + ": loop " + std::to_string(loop) + " is not in 1..4");
}

std::uint64_t address(const DeviceBuffer& buffer) { return reinterpret_cast<std::uint64_t>(buffer.data()); }

std::string page_text(int page, int loop) { return "page " + std::to_string(page) + " of loop " + std::to_string(loop); }

bool whole_pages(PositionRange range) { return range.begin % kPageTokens == 0 && range.end % kPageTokens == 0; }

}  // namespace

bool KvExtent::shared() const {
  const auto others = [](const auto& handle) { return handle.use_count() > 1; };
  return std::any_of(blocks.begin(), blocks.end(), others) ||
         std::any_of(pages.begin(), pages.end(), [&](const auto& loops) { return std::any_of(loops.begin(), loops.end(), others); });
}

std::size_t KvExtent::size_bytes() const {
  std::size_t bytes = 0;
  for (const auto& loops : pages) {
    for (const PageHandle& page : loops) bytes += page ? page->size_bytes() : 0;
  }
  for (const BlockHandle& block : blocks) {
    bytes += block->base_payload.size_bytes() + block->residual_payload.size_bytes() + block->parameters.size_bytes();
  }
  return bytes;
}

KvCache::KvCache(const KvShape& shape, DeviceAllocator& allocator, cudaStream_t stream, KvCacheOptions options)
    : shape_(shape), allocator_(allocator), stream_(stream), storage_(shape, allocator, stream, options) {
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
  fresh.handles.resize(count);
  fresh.map_flags.assign(count, kReplaceActivity);
  fresh.dirty_end = static_cast<int>(count);
  *slot = std::move(fresh);
  const auto index = static_cast<std::size_t>(slot - requests_.begin());
  tables_[index] = {slot->device_pages.as<PageTableEntry>(), slot->device_maps.as<ActivityMap>(), static_cast<std::uint32_t>(count)};
  tables_dirty_ = true;
  return static_cast<int>(index);
}

int KvCache::open_request(const KvLayout& layout) {
  const auto impossible = [](const std::string& what) { return InternalError("K/V cache, layout of a request: " + what); };
  const auto count = static_cast<std::size_t>(page_count(layout.max_positions));
  if (layout.maps.size() != count || layout.resident.size() != count) throw impossible("not one map and one set of planes per page");
  int encoded = 0;
  for (const KvLayout::Block& block : layout.blocks) {
    if (block.positions.begin != encoded || block.positions.end <= encoded || block.positions.end > layout.max_positions ||
        encoded % kPageTokens != 0) {
      throw impossible("block " + range_text(block.positions) + " does not continue the encoded positions, which end at " +
                       std::to_string(encoded));
    }
    encoded = block.positions.end;
  }
  const std::size_t free_before = free_pages();
  const int request = open_request(layout.max_positions);
  Request& slot = live(request);
  try {
    for (const KvLayout::Block& block : layout.blocks) slot.blocks.push_back(storage_.make_block(block.positions, block.rows));
    for (std::size_t page = 0; page < count; ++page) {
      for (int loop = 1; loop <= kLoops; ++loop) {
        if ((layout.resident[page] >> (loop - 1)) & 1u) set_page(slot, loop, static_cast<int>(page), storage_.take_page());
      }
    }
  } catch (...) {
    close_request(request);
    trim(free_before);
    throw;
  }
  for (const BlockHandle& block : slot.blocks) enter_block(slot, block);
  slot.maps = layout.maps;
  mark_dirty(slot, 0, static_cast<int>(count));
  return request;
}

void KvCache::close_request(int request) {
  live(request) = Request{};
  tables_[static_cast<std::size_t>(request)] = RequestTable{};
  tables_dirty_ = true;
}

int KvCache::live_requests() const {
  return static_cast<int>(std::count_if(requests_.begin(), requests_.end(), [](const Request& request) { return request.live; }));
}

void KvCache::reserve(int request, int loop, PositionRange positions) {
  check_range(live(request), positions, "reserve");
  std::vector<std::int32_t> first_rows{positions.begin};  // one position of every page
  for (int page = positions.begin / kPageTokens + 1; page < page_count(positions.end); ++page) first_rows.push_back(page * kPageTokens);
  reserve(request, loop, first_rows);
}

void KvCache::reserve(int request, int loop, std::span<const std::int32_t> positions) {
  const PageReservation reservation{request, loop, positions};
  reserve(std::span(&reservation, 1));
}

void KvCache::reserve(std::span<const PageReservation> reservations) {
  struct Missing {
    Request* slot;
    int loop, page;
    auto operator<=>(const Missing&) const = default;
  };
  std::vector<Missing> missing;
  for (const PageReservation& reservation : reservations) {
    Request& slot = live(reservation.request);
    check_loop(reservation.loop, "reserve");
    for (const std::int32_t position : reservation.positions) {
      check_position(slot, position, "reserve");
      const int page = position / kPageTokens;
      const PageHandle& handle = slot.handles[static_cast<std::size_t>(page)][static_cast<std::size_t>(reservation.loop - 1)];
      if (handle.use_count() > 1)
        throw InternalError("K/V cache, reserve: " + page_text(page, reservation.loop) + " is shared and must not be written");
      const Missing next{&slot, reservation.loop, page};
      if (!handle && (missing.empty() || missing.back() != next)) missing.push_back(next);
    }
  }
  std::sort(missing.begin(), missing.end());
  missing.erase(std::unique(missing.begin(), missing.end()), missing.end());

  const std::size_t free_before = free_pages();
  std::vector<PageHandle> taken;
  try {
    const bool refused = std::exchange(refuse_next_, false);
    while (taken.size() + (refused ? 1 : 0) < missing.size()) taken.push_back(storage_.take_page());
    if (refused) throw DeviceMemoryError("planned failure: the last page of a reservation is refused");
  } catch (...) {
    taken.clear();
    trim(free_before);
    throw;
  }
  for (std::size_t i = 0; i < missing.size(); ++i) set_page(*missing[i].slot, missing[i].loop, missing[i].page, std::move(taken[i]));
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

void KvCache::note_active(int request, int loop, std::span<const std::int32_t> positions) {
  Request& slot = live(request);
  check_loop(loop, "note_active");
  for (const std::int32_t position : positions) {
    check_position(slot, position, "note_active");
    slot.maps[static_cast<std::size_t>(position / kPageTokens)].active[loop - 1] |= std::uint64_t{1} << (position % kPageTokens);
  }
}

void KvCache::note_active(int request, int loop, PositionRange positions) {
  Request& slot = live(request);
  check_loop(loop, "note_active");
  check_range(slot, positions, "note_active");
  for (int page = positions.begin / kPageTokens; page < page_count(positions.end); ++page) {
    slot.maps[static_cast<std::size_t>(page)].active[loop - 1] |= page_mask(page, positions.begin, positions.end);
  }
}

void KvCache::forget_noted(int request, int position) {
  Request& slot = live(request);
  for (int page = position / kPageTokens; page < static_cast<int>(slot.maps.size()); ++page) {
    for (std::uint64_t& mask : slot.maps[static_cast<std::size_t>(page)].active) mask &= page_mask(page, 0, position);
  }
}

void KvCache::release_unused(int request, int loop, PositionRange positions) {
  Request& slot = live(request);
  check_loop(loop, "release_unused");
  for (int page = positions.begin / kPageTokens; page < page_count(positions.end); ++page) {
    const auto index = static_cast<std::size_t>(page);
    if (slot.handles[index][static_cast<std::size_t>(loop - 1)] && slot.maps[index].active[loop - 1] == 0)
      set_page(slot, loop, page, nullptr);
  }
}

void KvCache::truncate(int request, int position, Sealed sealed) {
  Request& slot = live(request);
  if (position < 0) throw InternalError("K/V cache, truncate: negative position " + std::to_string(position));
  for (const BlockHandle& block : slot.blocks) {
    if (sealed == Sealed::refused && block->positions.end > position) {
      throw InternalError("K/V cache, truncate: positions from " + std::to_string(position) + " include the encoded block " +
                          range_text(block->positions));
    }
  }
  for (int page = position / kPageTokens; page < static_cast<int>(slot.maps.size()); ++page) {
    for (std::uint64_t& mask : slot.maps[static_cast<std::size_t>(page)].active) mask &= page_mask(page, 0, position);
    slot.map_flags[static_cast<std::size_t>(page)] |= kReplaceActivity;
    mark_dirty(slot, page, page + 1);
  }
}

void KvCache::drop_blocks(int request, int position) {
  Request& slot = live(request);
  while (!slot.blocks.empty() && slot.blocks.back()->positions.begin >= position) {
    const PositionRange dropped = slot.blocks.back()->positions;
    slot.blocks.pop_back();
    for (int page = dropped.begin / kPageTokens; page < page_count(dropped.end); ++page) {
      PageTableEntry& entry = slot.pages[static_cast<std::size_t>(page)];
      entry.base_payload = entry.residual_payload = entry.parameters = 0;
      ActivityMap& map = slot.maps[static_cast<std::size_t>(page)];
      std::fill(std::begin(map.rank), std::end(map.rank), 0u);
      std::fill(std::begin(map.rows), std::end(map.rows), 0u);
      mark_dirty(slot, page, page + 1);
    }
  }
}

void KvCache::rewind(int request, int position) {
  Request& slot = live(request);
  drop_blocks(request, position);
  truncate(request, position);
  for (int page = page_count(position); page < static_cast<int>(slot.pages.size()); ++page) {
    for (int loop = 1; loop <= kLoops; ++loop) set_page(slot, loop, page, nullptr);
  }
}

KvExtent KvCache::share(int request, PositionRange positions) const {
  const Request& slot = live(request);
  check_range(slot, positions, "share");
  if (!whole_pages(positions)) throw InternalError("K/V cache, share: positions " + range_text(positions) + " are not whole pages");
  KvExtent extent;
  extent.positions = positions;
  for (int page = positions.begin / kPageTokens; page < positions.end / kPageTokens; ++page) {
    extent.maps.push_back(slot.maps[static_cast<std::size_t>(page)]);
    extent.pages.push_back(slot.handles[static_cast<std::size_t>(page)]);
  }
  for (const BlockHandle& block : slot.blocks) {
    if (block->positions.end <= positions.begin || block->positions.begin >= positions.end) continue;
    if (block->positions.begin < positions.begin || block->positions.end > positions.end) {
      throw InternalError("K/V cache, share: block " + range_text(block->positions) + " lies only partly in " + range_text(positions));
    }
    extent.blocks.push_back(block);
  }
  return extent;
}

void KvCache::adopt(int request, const KvExtent& extent) {
  Request& slot = live(request);
  check_range(slot, extent.positions, "adopt");
  const int page_begin = extent.positions.begin / kPageTokens;
  for (int page = page_begin; page < static_cast<int>(slot.maps.size()); ++page) {
    if (slot.maps[static_cast<std::size_t>(page)].active[0] != 0) {
      throw InternalError("K/V cache, adopt: the request has rows at or after position " + std::to_string(extent.positions.begin));
    }
  }
  const int encoded = slot.blocks.empty() ? 0 : slot.blocks.back()->positions.end;
  if (!extent.blocks.empty() && extent.blocks.front()->positions.begin != encoded) {
    throw InternalError("K/V cache, adopt: block " + range_text(extent.blocks.front()->positions) +
                        " does not continue the encoded positions, which end at " + std::to_string(encoded));
  }
  for (std::size_t i = 0; i < extent.maps.size(); ++i) {
    const int page = page_begin + static_cast<int>(i);
    slot.maps[static_cast<std::size_t>(page)] = extent.maps[i];
    slot.map_flags[static_cast<std::size_t>(page)] = kReplaceActivity;
    for (int loop = 1; loop <= kLoops; ++loop) set_page(slot, loop, page, extent.pages[i][static_cast<std::size_t>(loop - 1)]);
  }
  for (const BlockHandle& block : extent.blocks) enter_block(slot, slot.blocks.emplace_back(block));
  mark_dirty(slot, page_begin, page_begin + static_cast<int>(extent.maps.size()));
}

// The tables of the block's pages point to it.
void KvCache::enter_block(Request& slot, const BlockHandle& block) {
  const int page_begin = block->positions.begin / kPageTokens, page_end = page_count(block->positions.end);
  for (int page = page_begin; page < page_end; ++page) {
    PageTableEntry& entry = slot.pages[static_cast<std::size_t>(page)];
    entry.base_payload = address(block->base_payload);
    entry.residual_payload = address(block->residual_payload);
    entry.parameters = address(block->parameters);
  }
  mark_dirty(slot, page_begin, page_end);
}

SealedBlock& KvCache::block_of(Request& slot, PositionRange positions, const std::array<std::uint32_t, kLoops>& capacity) {
  for (const BlockHandle& block : slot.blocks) {
    if (block->positions != positions) continue;
    if (block.use_count() > 1) throw InternalError("K/V cache: block " + range_text(positions) + " is shared and must not be written");
    return *block;
  }
  const int expected_begin = slot.blocks.empty() ? 0 : slot.blocks.back()->positions.end;
  if (positions.begin != expected_begin || positions.begin % kPageTokens != 0) {
    throw InternalError("K/V cache: block " + range_text(positions) + " does not continue the encoded positions, which end at " +
                        std::to_string(expected_begin) + ", at a page boundary");
  }
  std::array<std::uint32_t, kLoops> rows{};
  const int page_begin = positions.begin / kPageTokens, page_end = page_count(positions.end);
  for (std::size_t stream = 0; stream < kLoops; ++stream) {
    std::uint32_t count = 0;
    for (int page = page_begin; page < page_end; ++page) {
      count += static_cast<std::uint32_t>(
          std::popcount(slot.maps[static_cast<std::size_t>(page)].active[stream] & page_mask(page, positions.begin, positions.end)));
    }
    rows[stream] = capacity[stream] != 0 ? capacity[stream] : count;
  }
  if (rows[0] != static_cast<std::uint32_t>(positions.size())) {
    throw InternalError("K/V cache: block " + range_text(positions) + " has " + std::to_string(rows[0]) + " rows in stream 1, not " +
                        std::to_string(positions.size()));
  }
  const BlockHandle& block = slot.blocks.emplace_back(storage_.make_block(positions, rows));
  enter_block(slot, block);
  for (int page = page_begin; page < page_end; ++page) std::copy(rows.begin(), rows.end(), slot.maps[static_cast<std::size_t>(page)].rows);
  return *block;
}

EncodeTask KvCache::prepare_encode(int request, PositionRange positions, int loop_first, int loop_last,
                                   const std::array<std::uint32_t, kLoops>& capacity, bool members_known) {
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
  for (int page = page_begin; page < page_end && !members_known; ++page) slot.map_flags[static_cast<std::size_t>(page)] |= kKeepRanks;
  mark_dirty(slot, page_begin, page_end);
  return {request, positions.begin, positions.end, loop_first, loop_last};
}

void KvCache::release_planes(int request, int loop, PositionRange positions) {
  Request& slot = live(request);
  check_loop(loop, "release_planes");
  check_range(slot, positions, "release_planes");
  for (int page = page_count(positions.begin); (page + 1) * kPageTokens <= positions.end; ++page) {
    set_page(slot, loop, page, nullptr);
  }
}

void KvCache::upload() {
  PinnedArena arena;
  upload(arena);
  LOOPGAUGE_CUDA_CHECK(cudaStreamSynchronize(stream_));
}

void KvCache::upload(PinnedArena& arena) {
  int count = 0;
  for (const Request& slot : requests_) count += slot.dirty_end - slot.dirty_begin;
  auto* const updates = count > 0 ? arena.take<PageUpdate>(static_cast<std::size_t>(count)) : nullptr;
  PageUpdate* next = updates;
  for (Request& slot : requests_) {
    for (int i = slot.dirty_begin; i < slot.dirty_end; ++i) {
      const auto page = static_cast<std::size_t>(i);
      *next++ = {slot.device_pages.as<PageTableEntry>() + page, slot.device_maps.as<ActivityMap>() + page, slot.pages[page], slot.maps[page],
                 slot.map_flags[page]};
      slot.map_flags[page] &= static_cast<std::uint8_t>(~kReplaceActivity);
    }
    slot.dirty_begin = slot.dirty_end = 0;
  }
  update_pages(updates, count, stream_);
  if (tables_dirty_) {
    copy_to_device<RequestTable>(device_tables_.as<RequestTable>(), tables_, arena, stream_);
    tables_dirty_ = false;
  }
}

void KvCache::read_maps(int request) {
  Request& slot = live(request);
  if (slot.dirty_begin < slot.dirty_end) throw InternalError("K/V cache, read_maps: changes have not been uploaded");
  LOOPGAUGE_CUDA_CHECK(
      cudaMemcpyAsync(slot.maps.data(), slot.device_maps.data(), slot.maps.size() * sizeof(ActivityMap), cudaMemcpyDeviceToHost, stream_));
  LOOPGAUGE_CUDA_CHECK(cudaStreamSynchronize(stream_));
  std::fill(slot.map_flags.begin(), slot.map_flags.end(), std::uint8_t{0});
}

KvView KvCache::view() const { return {shape_, device_tables_.as<RequestTable>()}; }

std::span<const PageTableEntry> KvCache::pages(int request) const { return live(request).pages; }
std::span<const ActivityMap> KvCache::maps(int request) const { return live(request).maps; }
std::span<const BlockHandle> KvCache::blocks(int request) const { return live(request).blocks; }

KvLayout KvCache::layout(int request) const {
  const Request& slot = live(request);
  KvLayout layout;
  layout.max_positions = slot.max_positions;
  layout.maps = slot.maps;
  for (const auto& loops : slot.handles) {
    std::uint8_t resident = 0;
    for (std::size_t i = 0; i < kLoops; ++i) resident |= static_cast<std::uint8_t>((loops[i] ? 1u : 0u) << i);
    layout.resident.push_back(resident);
  }
  for (const BlockHandle& block : slot.blocks) layout.blocks.push_back({block->positions, block->rows});
  return layout;
}

std::vector<KvRegion> KvCache::regions(int request) const {
  const Request& slot = live(request);
  std::vector<KvRegion> regions;
  const auto add = [&](KvRegionKind kind, std::size_t index, int loop, DeviceBuffer& buffer) {
    if (buffer) regions.push_back({kind, static_cast<std::int32_t>(index), loop, buffer.data(), buffer.size_bytes()});
  };
  for (std::size_t i = 0; i < slot.blocks.size(); ++i) {
    SealedBlock& block = *slot.blocks[i];
    add(KvRegionKind::base_payload, i, 0, block.base_payload);
    add(KvRegionKind::residual_payload, i, 0, block.residual_payload);
    add(KvRegionKind::parameters, i, 0, block.parameters);
  }
  for (std::size_t page = 0; page < slot.handles.size(); ++page) {
    for (int loop = 1; loop <= kLoops; ++loop) {
      if (const PageHandle& handle = slot.handles[page][static_cast<std::size_t>(loop - 1)])
        add(KvRegionKind::bf16_page, page, loop, *handle);
    }
  }
  return regions;
}

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

void KvCache::set_page(Request& slot, int loop, int page, PageHandle handle) {
  PageHandle& held = slot.handles[static_cast<std::size_t>(page)][static_cast<std::size_t>(loop - 1)];
  if (held == handle) return;
  held = std::move(handle);
  slot.pages[static_cast<std::size_t>(page)].bf16[loop - 1] = held ? address(*held) : 0;
  mark_dirty(slot, page, page + 1);
}

}  // namespace loopgauge::optimized
