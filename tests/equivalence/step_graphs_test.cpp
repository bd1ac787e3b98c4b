// SPDX-License-Identifier: Apache-2.0
// What captured steps rely on when memory is short: an array that has lost its memory says so, and a step is captured only after it has run once.
#include "optimized/step_graphs.hpp"

#include <gtest/gtest.h>

#include "optimized/runtime/growable_buffer.hpp"

namespace loopgauge::test {
namespace {

using optimized::DeviceAllocator;
using optimized::DeviceMemoryError;
using optimized::GrowableBuffer;
using optimized::StepGraphs;

TEST(StepGraphsTest, AnArrayThatFindsNoRoomHasChangedItsAddress) {
  DeviceAllocator allocator({.limit_bytes = 1000, .host_memory = true});
  GrowableBuffer array(allocator, MemoryCategory::workspace);
  array.reserve<std::byte>(600);
  const std::uint64_t captured = array.growths();
  array.reserve<std::byte>(500);
  EXPECT_EQ(array.growths(), captured);
  EXPECT_THROW(array.reserve<std::byte>(2000), DeviceMemoryError);
  EXPECT_EQ(array.data(), nullptr);
  EXPECT_NE(array.growths(), captured) << "a graph that was captured with the former address would be replayed";
  EXPECT_NE(array.reserve<std::byte>(600), nullptr);
}

// Without a device: a capture would fail.
TEST(StepGraphsTest, AStepThatFailedRunsEagerlyAgain) {
  StepGraphs graphs;
  const StepGraphs::Key key{4, 256, {.dense = true}};
  EXPECT_THROW(graphs.run(key, 0, nullptr, [] { throw DeviceMemoryError("no room"); }), DeviceMemoryError);
  int runs = 0;
  EXPECT_EQ(graphs.run(key, 0, nullptr, [&] { ++runs; }), StepGraphs::Outcome::ran_eagerly);
  EXPECT_EQ(runs, 1);
}

}  // namespace
}  // namespace loopgauge::test
