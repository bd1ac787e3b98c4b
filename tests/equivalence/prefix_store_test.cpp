// SPDX-License-Identifier: Apache-2.0
// Published windows: who is found, who is dropped first, who must not be dropped. Bookkeeping alone, in host memory.
#include "optimized/prefix_store.hpp"

#include <gtest/gtest.h>

#include <vector>

namespace loopgauge::test {
namespace {

using namespace optimized;

constexpr KvShape kShape{2, 3, 64};

class PrefixStoreTest : public ::testing::Test {
 protected:
  // A request with `windows` windows of 64, all loops of all rows: four pages each.
  int request(int windows) {
    const int slot = cache_.open_request(64 * windows + 10);
    for (int loop = 1; loop <= kLoops; ++loop) {
      cache_.reserve(slot, loop, PositionRange{0, 64 * windows});
      cache_.set_active(slot, loop, PositionRange{0, 64 * windows});
    }
    return slot;
  }
  void publish(int slot, const std::vector<std::string>& identities) {
    for (std::size_t w = 0; w < identities.size(); ++w) {
      const int begin = static_cast<int>(w) * 64;
      EXPECT_TRUE(store_.publish(identities[w], cache_.share(slot, {begin, begin + 64}), slot));
    }
  }
  std::size_t window_bytes() const { return 4 * page_bytes(kShape); }

  DeviceAllocator allocator_{AllocatorOptions{.poison = true, .host_memory = true}};
  KvCache cache_{kShape, allocator_, nullptr};
  PrefixStore store_;
};

TEST_F(PrefixStoreTest, FindsByIdentityUntilEvicted) {
  const int a = request(2);
  publish(a, {"a0", "a1"});
  EXPECT_EQ(store_.find("b0"), nullptr);
  ASSERT_NE(store_.find("a1"), nullptr);
  EXPECT_EQ(store_.find("a1")->publisher, a);
  EXPECT_EQ(store_.find("a1")->kv.positions, (PositionRange{64, 128}));
  EXPECT_FALSE(store_.publish("a1", cache_.share(a, {64, 128}), 7)) << "the first one stays";
  EXPECT_EQ(store_.find("a1")->publisher, a);
  EXPECT_TRUE(store_.evict("a1"));
  EXPECT_FALSE(store_.evict("a1"));
  EXPECT_EQ(store_.find("a1"), nullptr);
  EXPECT_EQ(cache_.pages_in_use(), 8u) << "the publisher still holds them";
}

TEST_F(PrefixStoreTest, DropsTheLeastRecentlyUsedThatNobodyHolds) {
  const int a = request(3), b = request(1);
  publish(a, {"a0", "a1", "a2"});
  publish(b, {"b0"});
  EXPECT_EQ(store_.droppable_bytes(), 0u) << "the publishers hold all of it";
  EXPECT_EQ(store_.make_room(1), 0);
  cache_.close_request(a);
  cache_.close_request(b);
  EXPECT_EQ(store_.droppable_bytes(), 4 * window_bytes());
  // A reader of a0; a1 is used after a2 and b0.
  const int reader = cache_.open_request(100);
  cache_.adopt(reader, store_.find("a0")->kv);
  EXPECT_NE(store_.find("a1"), nullptr);
  EXPECT_EQ(store_.droppable_bytes(), 3 * window_bytes());
  EXPECT_EQ(store_.make_room(window_bytes() + 1), 2);
  EXPECT_EQ(store_.find("a2"), nullptr);
  EXPECT_EQ(store_.find("b0"), nullptr);
  EXPECT_NE(store_.find("a0"), nullptr);
  EXPECT_NE(store_.find("a1"), nullptr);
  EXPECT_EQ(cache_.pages_in_use(), 8u);
}

TEST_F(PrefixStoreTest, NothingIsDroppedInVain) {
  const int a = request(2);
  publish(a, {"a0", "a1"});
  cache_.close_request(a);
  EXPECT_EQ(store_.make_room(2 * window_bytes() + 1), 0);
  EXPECT_EQ(store_.size(), 2u);
  EXPECT_EQ(store_.make_room(2 * window_bytes()), 2);
  EXPECT_EQ(cache_.pages_in_use(), 0u);
}

TEST_F(PrefixStoreTest, EvictedWindowsStayWithTheirReaders) {
  const int a = request(1);
  publish(a, {"a0"});
  const int reader = cache_.open_request(100);
  cache_.adopt(reader, store_.find("a0")->kv);
  cache_.close_request(a);
  store_.clear();
  EXPECT_EQ(cache_.pages_in_use(), 4u);
  EXPECT_NE(cache_.pages(reader)[0].bf16[3], 0u);
  cache_.close_request(reader);
  EXPECT_EQ(cache_.pages_in_use(), 0u);
}

}  // namespace
}  // namespace loopgauge::test
