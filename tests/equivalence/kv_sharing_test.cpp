// SPDX-License-Identifier: Apache-2.0
// Who holds which page and block, and what is left when a reservation or a restore is refused. Bookkeeping alone: in host memory, without a
// device.
#include <gtest/gtest.h>

#include <cstring>
#include <numeric>

#include "models/error.hpp"
#include "optimized/kv/kv_cache.hpp"
#include "optimized/runtime/cuda_check.hpp"

namespace loopgauge::test {
namespace {

using optimized::DeviceAllocator;
using optimized::DeviceMemoryError;
using optimized::KvCache;
using optimized::KvExtent;
using optimized::KvLayout;
using optimized::KvRegion;
using optimized::KvShape;
using optimized::MemoryUsage;

constexpr KvShape kShape{2, 3, 64};

DeviceAllocator host_allocator(std::size_t limit = std::numeric_limits<std::size_t>::max()) {
  return DeviceAllocator({.limit_bytes = limit, .poison = true, .host_memory = true});
}

std::size_t in_use(const DeviceAllocator& allocator, MemoryCategory category) {
  return allocator.usage().in_use[static_cast<std::size_t>(category)];
}

std::vector<std::int32_t> positions(int begin, int end) {
  std::vector<std::int32_t> result(static_cast<std::size_t>(end - begin));
  std::iota(result.begin(), result.end(), begin);
  return result;
}

// Loops 1 and 2 of [begin, end) in full, loop 3 of every third row, loop 4 of every ninth.
void write_window(KvCache& cache, int request, int begin, int end) {
  for (int loop = 1; loop <= kLoops; ++loop) {
    std::vector<std::int32_t> active;
    for (int position = begin; position < end; position += loop <= 2 ? 1 : loop == 3 ? 3 : 9) active.push_back(position);
    cache.reserve(request, loop, active);
    cache.set_active(request, loop, active);
  }
}

// Everything that a refused operation must leave alone.
struct State {
  std::vector<std::vector<std::uint64_t>> addresses, masks;
  std::size_t pages, blocks, free;
  optimized::BytesByCategory bytes;
  std::size_t buffers;
  bool operator==(const State&) const = default;
};

State state_of(const KvCache& cache, const DeviceAllocator& allocator, const std::vector<int>& requests) {
  State state{
      {}, {}, cache.pages_in_use(), cache.blocks_in_use(), cache.free_pages(), allocator.usage().in_use, allocator.usage().live_buffers};
  for (const int request : requests) {
    auto& addresses = state.addresses.emplace_back();
    for (const auto& page : cache.pages(request)) {
      addresses.insert(addresses.end(), std::begin(page.bf16), std::end(page.bf16));
      addresses.insert(addresses.end(), {page.base_payload, page.residual_payload, page.parameters});
    }
    auto& masks = state.masks.emplace_back();
    for (const auto& map : cache.maps(request)) masks.insert(masks.end(), std::begin(map.active), std::end(map.active));
  }
  return state;
}

TEST(KvSharing, SharedPagesAreCountedOnceAndFreeWithTheirLastHolder) {
  DeviceAllocator allocator = host_allocator();
  KvCache cache(kShape, allocator, nullptr);
  const int a = cache.open_request(300);
  write_window(cache, a, 0, 192);
  EXPECT_EQ(cache.pages_in_use(), 12u);
  KvExtent extent = cache.share(a, {0, 128});
  EXPECT_TRUE(extent.shared());
  EXPECT_EQ(extent.size_bytes(), 8 * optimized::page_bytes(kShape));
  const int b = cache.open_request(400);
  cache.adopt(b, extent);
  EXPECT_EQ(cache.pages_in_use(), 12u) << "nothing is copied";
  EXPECT_EQ(in_use(allocator, MemoryCategory::bf16_planes), 12 * optimized::page_bytes(kShape));
  for (std::size_t page = 0; page < 2; ++page) {
    for (int loop = 0; loop < kLoops; ++loop) {
      EXPECT_EQ(cache.pages(a)[page].bf16[loop], cache.pages(b)[page].bf16[loop]);
      EXPECT_EQ(cache.maps(a)[page].active[loop], cache.maps(b)[page].active[loop]);
    }
  }
  cache.close_request(a);
  EXPECT_EQ(cache.pages_in_use(), 8u) << "the third page had one holder";
  extent = {};
  EXPECT_EQ(cache.pages_in_use(), 8u) << "evicted entries stay with their readers";
  cache.close_request(b);
  EXPECT_EQ(cache.pages_in_use(), 0u);
  cache.trim();
  EXPECT_EQ(in_use(allocator, MemoryCategory::bf16_planes), 0u);
}

TEST(KvSharing, ActivityOfAReaderIsItsOwn) {
  DeviceAllocator allocator = host_allocator();
  KvCache cache(kShape, allocator, nullptr);
  const int a = cache.open_request(300), b = cache.open_request(300);
  write_window(cache, a, 0, 128);
  const KvExtent extent = cache.share(a, {0, 64});
  cache.adopt(b, extent);
  write_window(cache, b, 64, 200);
  cache.rewind(b, 128);
  cache.truncate(a, 64);
  EXPECT_EQ(cache.maps(b)[1].active[0], ~std::uint64_t{0});
  EXPECT_EQ(cache.maps(a)[1].active[0], 0u);
  EXPECT_NE(cache.pages(a)[1].bf16[0], cache.pages(b)[1].bf16[0]);
}

TEST(KvSharing, NothingSharedIsWritten) {
  DeviceAllocator allocator = host_allocator();
  KvCache cache(kShape, allocator, nullptr);
  const int a = cache.open_request(300), b = cache.open_request(300);
  write_window(cache, a, 0, 128);
  const KvExtent extent = cache.share(a, {0, 64});
  cache.adopt(b, extent);
  EXPECT_THROW(cache.reserve(a, 1, positions(10, 11)), InternalError);
  EXPECT_THROW(cache.reserve(b, 3, positions(0, 1)), InternalError);
  cache.reserve(b, 3, positions(64, 65));
  EXPECT_THROW(cache.adopt(b, extent), InternalError) << "rows stand there already";
  EXPECT_THROW(static_cast<void>(cache.share(a, {0, 100})), InternalError) << "no whole pages";
}

TEST(KvSharing, APublishersFlushDropsItsPagesAndKeepsTheReaders) {
  DeviceAllocator allocator = host_allocator();
  KvCache cache(kShape, allocator, nullptr, {.quantized = true});
  const int a = cache.open_request(300), b = cache.open_request(300);
  write_window(cache, a, 0, 256);
  const KvExtent extent = cache.share(a, {0, 128});
  cache.adopt(b, extent);
  cache.prepare_encode(a, {0, 256}, 1, 4);
  for (int loop = 1; loop <= kLoops; ++loop) cache.release_planes(a, loop, {0, 256});
  EXPECT_EQ(cache.pages_in_use(), 8u);
  EXPECT_EQ(cache.pages(a)[0].bf16[0], 0u);
  EXPECT_NE(cache.pages(b)[0].bf16[0], 0u);
  EXPECT_EQ(cache.pages(b)[0].base_payload, 0u);
  // The reader encodes by its own length.
  write_window(cache, b, 128, 192);
  cache.prepare_encode(b, {0, 192}, 1, 4);
  EXPECT_NE(cache.pages(a)[0].base_payload, cache.pages(b)[0].base_payload);
  EXPECT_EQ(cache.blocks_in_use(), 2u);
}

TEST(KvSharing, SealedBlocksAreSharedLikePages) {
  DeviceAllocator allocator = host_allocator();
  KvCache cache(kShape, allocator, nullptr, {.quantized = true});
  const int a = cache.open_request(300), b = cache.open_request(300);
  write_window(cache, a, 0, 192);
  cache.prepare_encode(a, {0, 64}, 1, 4);
  cache.prepare_encode(a, {64, 128}, 1, 4);
  cache.prepare_encode(a, {128, 192}, 1, 4);
  for (int loop = 1; loop <= kLoops; ++loop) cache.release_planes(a, loop, {0, 192});
  EXPECT_EQ(cache.pages_in_use(), 0u);
  const KvExtent first = cache.share(a, {0, 64});
  KvExtent second = cache.share(a, {64, 128});
  EXPECT_THROW(cache.adopt(b, second), InternalError) << "blocks continue each other";
  cache.adopt(b, first);
  cache.adopt(b, second);
  EXPECT_EQ(cache.blocks_in_use(), 3u);
  EXPECT_EQ(cache.pages(a)[1].parameters, cache.pages(b)[1].parameters);
  EXPECT_EQ(cache.maps(a)[1].rows[3], cache.maps(b)[1].rows[3]);
  EXPECT_THROW(cache.prepare_encode(a, {64, 128}, 4, 4), InternalError) << "a shared block is not encoded again";
  EXPECT_THROW(cache.rewind(b, 100), InternalError) << "a block reaches over the frontier";
  const std::size_t payload = in_use(allocator, MemoryCategory::base_payload);
  cache.close_request(a);
  EXPECT_EQ(cache.blocks_in_use(), 2u);
  EXPECT_EQ(in_use(allocator, MemoryCategory::base_payload), payload / 3 * 2);
  second = {};
  cache.close_request(b);
  EXPECT_EQ(cache.blocks_in_use(), 1u) << "the first one is still published";
}

TEST(KvSharing, ARefusedReservationLeavesEverybodyAsBefore) {
  std::size_t limit = 0;
  {
    DeviceAllocator allocator = host_allocator();
    KvCache cache(kShape, allocator, nullptr);
    for (int i = 0; i < 2; ++i) write_window(cache, cache.open_request(300), 0, 64);
    limit = allocator.usage().total_in_use + 3 * optimized::page_bytes(kShape);
  }
  DeviceAllocator allocator = host_allocator(limit);
  KvCache cache(kShape, allocator, nullptr);
  const int a = cache.open_request(300), b = cache.open_request(300);
  write_window(cache, a, 0, 64);
  write_window(cache, b, 0, 64);
  cache.reserve(b, 1, positions(128, 192));
  cache.release_planes(b, 1, {128, 192});  // one page on the free list, so that taken and fresh ones are both given back
  const State before = state_of(cache, allocator, {a, b});
  const std::vector<std::int32_t> more_a = positions(64, 128), more_b = positions(64, 250);
  const std::vector<optimized::PageReservation> both{{a, 1, more_a}, {b, 2, more_b}};  // four pages where three fit
  EXPECT_THROW(cache.reserve(both), DeviceMemoryError);
  EXPECT_EQ(state_of(cache, allocator, {a, b}), before);
  cache.reserve(a, 1, more_a);
  EXPECT_EQ(cache.pages_in_use(), before.pages + 1);
}

TEST(KvSharing, APlannedRefusalComesOnceAndAfterPagesWereTaken) {
  DeviceAllocator allocator = host_allocator();
  KvCache cache(kShape, allocator, nullptr);
  const int a = cache.open_request(300);
  const State before = state_of(cache, allocator, {a});
  const std::size_t peak = allocator.usage().total_peak;
  cache.refuse_next_reservation();
  EXPECT_THROW(cache.reserve(a, 1, positions(0, 200)), DeviceMemoryError);
  EXPECT_EQ(state_of(cache, allocator, {a}), before);
  EXPECT_EQ(allocator.usage().total_peak, peak + 3 * optimized::page_bytes(kShape));
  cache.reserve(a, 1, positions(0, 200));
  EXPECT_EQ(cache.pages_in_use(), 4u);
}

TEST(KvSharing, RewindLeavesNothingBeyondTheFrontier) {
  DeviceAllocator allocator = host_allocator();
  KvCache cache(kShape, allocator, nullptr, {.quantized = true});
  const int a = cache.open_request(400);
  write_window(cache, a, 0, 128);
  cache.prepare_encode(a, {0, 128}, 1, 4);
  for (int loop = 1; loop <= kLoops; ++loop) cache.release_planes(a, loop, {0, 128});
  // Two windows in flight, the first with two streams of its block, the second with one.
  cache.reserve(a, 1, positions(128, 384));
  cache.set_active(a, 1, PositionRange{128, 384});
  cache.reserve(a, 2, positions(128, 256));
  cache.set_active(a, 2, PositionRange{128, 256});
  const std::array<std::uint32_t, kLoops> capacity{128, 128, 32, 13};
  cache.prepare_encode(a, {128, 256}, 1, 1, capacity);
  cache.prepare_encode(a, {256, 384}, 1, 1, capacity);
  cache.prepare_encode(a, {128, 256}, 2, 2, capacity);
  EXPECT_EQ(cache.blocks_in_use(), 3u);
  cache.rewind(a, 128);
  EXPECT_EQ(cache.blocks_in_use(), 1u);
  EXPECT_EQ(cache.pages_in_use(), 0u);
  for (std::size_t page = 2; page < cache.pages(a).size(); ++page) {
    const auto& entry = cache.pages(a)[page];
    EXPECT_EQ(entry.base_payload | entry.residual_payload | entry.parameters, 0u);
    for (int loop = 0; loop < kLoops; ++loop) {
      EXPECT_EQ(entry.bf16[loop], 0u);
      EXPECT_EQ(cache.maps(a)[page].active[loop], 0u);
      EXPECT_EQ(cache.maps(a)[page].rows[loop], 0u);
    }
  }
  cache.reserve(a, 1, positions(128, 256));
  cache.set_active(a, 1, PositionRange{128, 256});
  cache.prepare_encode(a, {128, 256}, 1, 1, capacity);  // starts over
}

TEST(KvSharing, RewindKeepsCompletedRowsOfThePage) {
  DeviceAllocator allocator = host_allocator();
  KvCache cache(kShape, allocator, nullptr);
  const int a = cache.open_request(200);
  write_window(cache, a, 0, 70);
  cache.reserve(a, 1, positions(70, 71));
  cache.set_active(a, 1, PositionRange{70, 71});
  cache.rewind(a, 70);
  EXPECT_EQ(cache.maps(a)[1].active[0], 0b111111u);
  EXPECT_NE(cache.pages(a)[1].bf16[0], 0u);
}

// The device takes rows away by itself: what the host sends next must not bring them back.
TEST(KvSharing, RowsThatTheHostForgetsAreInNoPlaneOfItsCopy) {
  DeviceAllocator allocator = host_allocator();
  KvCache cache(kShape, allocator, nullptr);
  const int a = cache.open_request(200);
  write_window(cache, a, 0, 130);
  cache.set_active(a, 4, PositionRange{60, 130});
  cache.forget_noted(a, 66);
  for (const int loop : {1, 2, 4}) EXPECT_EQ(cache.maps(a)[1].active[loop - 1], 0b11u) << loop;
  for (int loop = 1; loop <= kLoops; ++loop) EXPECT_EQ(cache.maps(a)[2].active[loop - 1], 0u) << loop;
  EXPECT_EQ(cache.maps(a)[0].active[0], ~std::uint64_t{0});
  EXPECT_NE(cache.pages(a)[1].bf16[0], 0u) << "pages stay";
}

TEST(KvSharing, DroppedBlocksLeaveRowsAndPages) {
  DeviceAllocator allocator = host_allocator();
  KvCache cache(kShape, allocator, nullptr);
  const int a = cache.open_request(200);
  write_window(cache, a, 0, 192);
  for (int begin = 0; begin < 192; begin += 64) cache.prepare_encode(a, {begin, begin + 64}, 1, kLoops);
  cache.drop_blocks(a, 64);
  ASSERT_EQ(cache.blocks(a).size(), 1u);
  EXPECT_NE(cache.pages(a)[0].base_payload, 0u);
  EXPECT_EQ(cache.pages(a)[1].base_payload, 0u);
  EXPECT_EQ(cache.maps(a)[2].rows[0], 0u);
  EXPECT_EQ(cache.maps(a)[2].active[0], ~std::uint64_t{0});
  EXPECT_NE(cache.pages(a)[2].bf16[0], 0u);
  cache.prepare_encode(a, {64, 192}, 1, kLoops);
  EXPECT_EQ(cache.blocks_in_use(), 2u);
}

// A layout and its bytes make the same request in other places.
TEST(KvSharing, ARequestIsRebuiltFromItsLayoutAndRegions) {
  DeviceAllocator allocator = host_allocator();
  KvCache cache(kShape, allocator, nullptr, {.quantized = true});
  const int a = cache.open_request(300);
  write_window(cache, a, 0, 200);
  cache.prepare_encode(a, {0, 128}, 1, 4);
  for (int loop = 1; loop <= kLoops; ++loop) cache.release_planes(a, loop, {0, 128});
  unsigned seed = 1;
  const std::vector<KvRegion> regions = cache.regions(a);
  for (const KvRegion& region : regions) {
    for (std::size_t i = 0; i < region.bytes; ++i)
      static_cast<std::uint8_t*>(region.data)[i] = static_cast<std::uint8_t>((seed = seed * 1664525u + 1013904223u) >> 24);
  }
  const int b = cache.open_request(cache.layout(a));
  EXPECT_NE(a, b);
  const std::vector<KvRegion> restored = cache.regions(b);
  ASSERT_EQ(restored.size(), regions.size());
  ASSERT_EQ(regions.size(), 3u + 8u);
  for (std::size_t i = 0; i < regions.size(); ++i) {
    EXPECT_EQ(restored[i].kind, regions[i].kind);
    EXPECT_EQ(restored[i].index, regions[i].index);
    EXPECT_EQ(restored[i].loop, regions[i].loop);
    ASSERT_EQ(restored[i].bytes, regions[i].bytes);
    EXPECT_NE(restored[i].data, regions[i].data);
    std::memcpy(restored[i].data, regions[i].data, regions[i].bytes);
  }
  cache.close_request(a);
  EXPECT_EQ(cache.blocks_in_use(), 1u);
  EXPECT_EQ(cache.pages_in_use(), 8u);
  EXPECT_EQ(cache.maps(b)[3].active[0], 0xFFu);
  EXPECT_EQ(cache.maps(b)[0].rows[0], 128u);
  write_window(cache, b, 200, 256);
  cache.prepare_encode(b, {128, 192}, 1, 4);  // goes on where the frontier was
}

TEST(KvSharing, ARefusedRestoreLeavesTheAccountingUnchanged) {
  KvLayout layout;
  std::size_t needed = 0;
  {
    DeviceAllocator allocator = host_allocator();
    KvCache cache(kShape, allocator, nullptr, {.quantized = true});
    const int a = cache.open_request(300);
    write_window(cache, a, 0, 200);
    cache.prepare_encode(a, {0, 128}, 1, 4);
    layout = cache.layout(a);
    needed = allocator.usage().total_in_use;
  }
  // Refused at the tables, at a block, at a page, at the last one.
  for (const int percent : {1, 10, 20, 50, 90, 99}) {
    DeviceAllocator allocator = host_allocator(needed + needed * static_cast<std::size_t>(percent) / 100);
    KvCache cache(kShape, allocator, nullptr, {.quantized = true});
    const int a = cache.open_request(layout);
    const int other = cache.open_request(100);
    const State before = state_of(cache, allocator, {a, other});
    EXPECT_THROW(static_cast<void>(cache.open_request(layout)), DeviceMemoryError) << percent;
    EXPECT_EQ(state_of(cache, allocator, {a, other}), before) << percent;
    EXPECT_EQ(cache.live_requests(), 2) << percent;
    KvLayout broken = layout;
    broken.blocks.front().positions.begin = 64;
    EXPECT_THROW(static_cast<void>(cache.open_request(broken)), InternalError);
    broken = layout;
    broken.resident.pop_back();
    EXPECT_THROW(static_cast<void>(cache.open_request(broken)), InternalError);
    EXPECT_EQ(state_of(cache, allocator, {a, other}), before) << percent;
  }
}

TEST(MemoryPressure, AnAllocationIsTriedOnceMoreWithWhatTheHandlerGaveBack) {
  DeviceAllocator allocator = host_allocator(1000);
  optimized::DeviceBuffer spare = allocator.allocate(MemoryCategory::workspace, 600);
  std::vector<std::size_t> asked;
  allocator.on_pressure([&](std::size_t missing) {
    asked.push_back(missing);
    spare.reset();
    return true;
  });
  EXPECT_TRUE(allocator.allocate(MemoryCategory::bf16_planes, 700));
  EXPECT_EQ(asked, std::vector<std::size_t>{300});
  EXPECT_THROW(static_cast<void>(allocator.allocate(MemoryCategory::bf16_planes, 1100)), DeviceMemoryError);
  EXPECT_EQ(asked.size(), 2u) << "once for each allocation";
  allocator.on_pressure([&](std::size_t) { return false; });
  EXPECT_THROW(static_cast<void>(allocator.allocate(MemoryCategory::bf16_planes, 1100)), DeviceMemoryError);
  EXPECT_EQ(allocator.usage().total_in_use, 0u);
}

}  // namespace
}  // namespace loopgauge::test
