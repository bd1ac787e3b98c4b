// SPDX-License-Identifier: Apache-2.0
// Pages, blocks, tables and reference slots: life cycle and accounting.
#include "optimized/kv/kv_cache.hpp"

#include <gtest/gtest.h>

#include <cstring>
#include <set>
#include <span>

#include "models/error.hpp"
#include "optimized/kv/reference_store.hpp"
#include "optimized/ops/residual_encode.cuh"
#include "tests/equivalence/kv_fixture.hpp"

namespace loopgauge::equivalence {
namespace {

using optimized::KvCache;
using optimized::KvShape;

std::size_t in_use(const optimized::DeviceAllocator& allocator, MemoryCategory category) {
  return allocator.usage().in_use[static_cast<std::size_t>(category)];
}

TEST(KvCacheDevice, RefusesShapesItCannotServe) {
  LOOPGAUGE_REQUIRE_DEVICE();
  optimized::DeviceAllocator allocator = poisoning_allocator();
  EXPECT_THROW(KvCache({1, 1, 96}, allocator, nullptr), UnsupportedError);
  EXPECT_THROW(KvCache({1, 1, 256}, allocator, nullptr), UnsupportedError);
  KvCache cache({1, 1, 64}, allocator, nullptr);
  for (int i = 0; i < optimized::kMaxRequests; ++i) EXPECT_EQ(cache.open_request(10), i);
  EXPECT_THROW(cache.open_request(10), UnsupportedError);
  EXPECT_THROW(cache.reserve(0, 1, PositionRange{0, 11}), InternalError);
  EXPECT_THROW(cache.reserve(0, 5, PositionRange{0, 1}), InternalError);
  cache.close_request(5);
  EXPECT_THROW(cache.pages(5), InternalError);
  EXPECT_EQ(cache.open_request(10), 5);
}

TEST(KvCacheDevice, PagesAreReusedAndCounted) {
  LOOPGAUGE_REQUIRE_DEVICE();
  optimized::DeviceAllocator allocator = poisoning_allocator();
  const KvShape shape{2, 3, 64};
  KvCache cache(shape, allocator, nullptr);
  const int a = cache.open_request(1000);
  cache.reserve(a, 1, PositionRange{0, 130});
  cache.reserve(a, 1, PositionRange{64, 200});  // overlaps: only what is missing
  cache.reserve(a, 3, std::vector<std::int32_t>{3, 700});
  EXPECT_EQ(cache.pages_in_use(), 6u);
  EXPECT_EQ(in_use(allocator, MemoryCategory::bf16_planes), 6 * optimized::page_bytes(shape));
  std::set<std::uint64_t> addresses;
  for (const auto& page : cache.pages(a)) {
    for (const std::uint64_t address : page.bf16) {
      if (address != 0) addresses.insert(address);
    }
  }
  EXPECT_EQ(addresses.size(), 6u);
  cache.release_planes(a, 1, {1, 192});  // pages 1 and 2 lie inside, page 0 does not
  EXPECT_EQ(cache.pages_in_use(), 4u);
  EXPECT_EQ(cache.free_pages(), 2u);
  EXPECT_NE(cache.pages(a)[0].bf16[0], 0u);
  EXPECT_EQ(cache.pages(a)[1].bf16[0], 0u);
  const int b = cache.open_request(64);
  cache.reserve(b, 2, PositionRange{0, 64});
  EXPECT_TRUE(addresses.contains(cache.pages(b)[0].bf16[1]));
  EXPECT_EQ(cache.free_pages(), 1u);
  cache.trim();
  EXPECT_EQ(in_use(allocator, MemoryCategory::bf16_planes), 5 * optimized::page_bytes(shape));
  cache.close_request(a);
  cache.close_request(b);
  cache.trim();
  EXPECT_EQ(cache.pages_in_use(), 0u);
  EXPECT_EQ(cache.live_requests(), 0);
  EXPECT_EQ(in_use(allocator, MemoryCategory::bf16_planes), 0u);
  EXPECT_EQ(in_use(allocator, MemoryCategory::activity_maps), 0u);
}

TEST(KvCacheDevice, OutOfMemoryLeavesTheCacheUsable) {
  LOOPGAUGE_REQUIRE_DEVICE();
  const KvShape shape{2, 3, 64};
  optimized::DeviceAllocator allocator({.limit_bytes = 3 * optimized::page_bytes(shape)});
  KvCache cache(shape, allocator, nullptr);
  const int a = cache.open_request(1000);
  EXPECT_THROW(cache.reserve(a, 1, PositionRange{0, 1000}), optimized::DeviceMemoryError);
  cache.reserve(a, 1, PositionRange{0, 64});
  EXPECT_NE(cache.pages(a)[0].bf16[0], 0u);
  cache.close_request(a);
  const int b = cache.open_request(64);
  cache.reserve(b, 1, PositionRange{0, 64});
  EXPECT_EQ(cache.pages_in_use(), 1u);
}

TEST(KvCacheDevice, TruncationClearsEveryPlane) {
  LOOPGAUGE_REQUIRE_DEVICE();
  optimized::DeviceAllocator allocator = poisoning_allocator();
  KvCache cache({1, 1, 64}, allocator, nullptr);
  const int a = cache.open_request(300);
  for (int loop = 1; loop <= kLoops; ++loop) cache.set_active(a, loop, PositionRange{0, 200});
  cache.truncate(a, 70);
  for (int loop = 0; loop < kLoops; ++loop) {
    EXPECT_EQ(cache.maps(a)[0].active[loop], ~std::uint64_t{0});
    EXPECT_EQ(cache.maps(a)[1].active[loop], 0b111111u);
    EXPECT_EQ(cache.maps(a)[2].active[loop], 0u);
  }
}

template <class T>
std::vector<T> read_device(const T* source, std::size_t count) {
  std::vector<T> values(count);
  LOOPGAUGE_CUDA_CHECK(cudaMemcpy(values.data(), source, count * sizeof(T), cudaMemcpyDeviceToHost));
  return values;
}

// More pages of more requests than a block of the kernel that writes them has threads.
TEST(KvCacheDevice, ChangesOfManyRequestsArriveTogether) {
  LOOPGAUGE_REQUIRE_DEVICE();
  constexpr int kRequests = 70;
  optimized::DeviceAllocator allocator = poisoning_allocator();
  KvCache cache({1, 1, 64}, allocator, nullptr);
  const auto expect_equal_tables = [&](const char* when) {
    const auto tables = read_device(cache.view().requests, optimized::kMaxRequests);
    for (int request = 0; request < kRequests; ++request) {
      const auto& table = tables[static_cast<std::size_t>(request)];
      const auto pages = cache.pages(request);
      const auto maps = cache.maps(request);
      ASSERT_EQ(table.page_capacity, pages.size());
      const auto device_pages = read_device(table.pages, pages.size());
      const auto device_maps = read_device(table.maps, maps.size());
      EXPECT_EQ(std::memcmp(device_pages.data(), pages.data(), pages.size_bytes()), 0) << when << ", entries of request " << request;
      EXPECT_EQ(std::memcmp(device_maps.data(), maps.data(), maps.size_bytes()), 0) << when << ", maps of request " << request;
    }
  };
  for (int request = 0; request < kRequests; ++request) {
    ASSERT_EQ(cache.open_request(100 + 50 * (request % 5)), request);
    cache.reserve(request, 1, PositionRange{0, 65 + request % 30});
    cache.note_active(request, 1, PositionRange{0, 60 + request % 30});
  }
  cache.upload();
  expect_equal_tables("all pages");
  for (int request = 0; request < kRequests; request += 3) {  // as a decode row of some of them
    const std::int32_t position = 60 + request % 30;
    cache.reserve(request, 2, PositionRange{position, position + 1});
    cache.note_active(request, 1, std::span(&position, 1));
    cache.note_active(request, 2, std::span(&position, 1));
  }
  cache.upload();
  expect_equal_tables("a row each");

  // What a kernel has noted stays beside what the host notes, and goes with what the host takes away.
  const auto map_of = [&](int request) { return read_device(cache.view().requests + request, 1).front().maps; };
  const auto active = [&](int request) { return read_device(map_of(request), 1).front().active[2]; };
  constexpr std::uint64_t kNoted = 0b1010;
  for (const int request : {1, 66}) {
    auto map = read_device(map_of(request), 1);
    map.front().active[2] = kNoted;
    LOOPGAUGE_CUDA_CHECK(cudaMemcpy(map_of(request), map.data(), sizeof(optimized::ActivityMap), cudaMemcpyHostToDevice));
    cache.reserve(request, 3, PositionRange{0, 1});
    const std::int32_t position = 0;
    cache.note_active(request, 3, std::span(&position, 1));
  }
  cache.upload();
  EXPECT_EQ(active(1), kNoted | 1);
  EXPECT_EQ(active(66), kNoted | 1);
  cache.truncate(66, 3);
  cache.upload();
  EXPECT_EQ(active(1), kNoted | 1);
  EXPECT_EQ(active(66), 1u);
}

TEST(KvCacheDevice, BlocksAreContiguousAndAccounted) {
  LOOPGAUGE_REQUIRE_DEVICE();
  optimized::DeviceAllocator allocator = poisoning_allocator();
  const KvShape shape{2, 3, 128};
  KvCache cache(shape, allocator, nullptr, {.quantized = true});
  const int a = cache.open_request(500);
  cache.set_active(a, 1, PositionRange{0, 400});
  cache.set_active(a, 2, PositionRange{0, 400});
  cache.set_active(a, 3, std::vector<std::int32_t>{0, 5, 63, 64, 100, 255});
  EXPECT_THROW(cache.prepare_encode(a, {64, 128}, 1, 4), InternalError);  // does not start at the frontier
  cache.prepare_encode(a, {0, 256}, 1, 4);
  EXPECT_THROW(cache.truncate(a, 255), InternalError);
  const auto& block = *cache.blocks(a)[0];
  EXPECT_EQ(block.rows, (std::array<std::uint32_t, 4>{256, 256, 6, 0}));
  EXPECT_EQ(cache.maps(a)[1].rank[2], 3u);
  EXPECT_EQ(cache.maps(a)[3].rank[2], 5u);
  EXPECT_EQ(cache.maps(a)[3].rank[0], 192u);
  // K 4 bits a value and one FP16 pair per 64 rows and channel, V one pair per row and 64 channels.
  const std::size_t width = 2 * 3 * 128;  // layers * heads * head_dim
  EXPECT_EQ(in_use(allocator, MemoryCategory::base_payload), 256 * width * 2 / 2);
  EXPECT_EQ(in_use(allocator, MemoryCategory::residual_payload), (256 + 6) * width * 2 / 2);
  EXPECT_EQ(in_use(allocator, MemoryCategory::parameters), (4 + 4 + 1) * width * 4 + (256 + 256 + 6) * width / 64 * 4);
  cache.prepare_encode(a, {256, 320}, 1, 2, {64, 64, 10, 4});  // late streams not known yet
  cache.set_active(a, 3, PositionRange{256, 267});
  EXPECT_THROW(cache.prepare_encode(a, {256, 320}, 3, 3), InternalError);  // 11 rows, 10 reserved
}

TEST(ReferenceStore, StatesFollowTheToken) {
  LOOPGAUGE_REQUIRE_DEVICE();
  optimized::DeviceAllocator allocator = poisoning_allocator();
  optimized::ReferenceStore store({2, 3, 64}, 2, 500, allocator);
  using Key = optimized::ReferenceStore::Key;
  const Key first{1, 1}, second{1, 2}, third{2, 1};
  const int a = store.acquire(first);
  const int b = store.acquire(second);
  EXPECT_NE(a, b);
  EXPECT_THROW(store.acquire(third), InternalError);
  EXPECT_THROW(store.require_reusable(a, first), InternalError);  // loop 2 not executed
  EXPECT_THROW(store.mark_reusable(a, first), InternalError);
  store.mark_source_ready(a, first);
  EXPECT_THROW(store.require_reusable(a, first), InternalError);
  store.mark_reusable(a, first);
  store.require_reusable(a, first);
  EXPECT_THROW(store.require_reusable(a, second), InternalError);  // another incarnation
  store.release(a, first);
  EXPECT_THROW(store.require_reusable(a, first), InternalError);
  EXPECT_EQ(store.acquire(third), a);
  EXPECT_EQ(store.in_use(), 2);
  EXPECT_EQ(in_use(allocator, MemoryCategory::attention_reference_state), 2u * 2 * 3 * (8 * 8 + 3 * 4 + 2 * 64 * 4));
}

}  // namespace
}  // namespace loopgauge::equivalence
