// SPDX-License-Identifier: Apache-2.0
// Exact accounting by category, and a refusal that leaves everything usable.
#include "tests/equivalence/device_fixture.hpp"

namespace loopgauge::test {
namespace {

using optimized::AllocatorOptions;
using optimized::DeviceAllocator;
using optimized::DeviceBuffer;
using optimized::DeviceMemoryError;

class AllocatorTest : public DeviceTest {};

std::size_t index(MemoryCategory category) { return static_cast<std::size_t>(category); }

TEST_F(AllocatorTest, CountsBytesByCategoryNowAndAtTheirPeak) {
  DeviceAllocator allocator;
  DeviceBuffer weights = allocator.allocate(MemoryCategory::weights, 1000);
  {
    const DeviceBuffer scratch = allocator.allocate(MemoryCategory::workspace, 500);
    EXPECT_EQ(allocator.usage().total_in_use, 1500u);
    EXPECT_EQ(allocator.usage().live_buffers, 2u);
  }
  DeviceBuffer moved = std::move(weights);
  EXPECT_EQ(moved.size_bytes(), 1000u);
  EXPECT_FALSE(weights);
  EXPECT_EQ(allocator.usage().in_use[index(MemoryCategory::weights)], 1000u);
  EXPECT_EQ(allocator.usage().in_use[index(MemoryCategory::workspace)], 0u);
  EXPECT_EQ(allocator.usage().peak[index(MemoryCategory::workspace)], 500u);
  EXPECT_EQ(allocator.usage().total_peak, 1500u);
  allocator.reset_peak();
  EXPECT_EQ(allocator.usage().total_peak, 1000u);
  moved.reset();
  EXPECT_EQ(allocator.usage().total_in_use, 0u);
  EXPECT_EQ(allocator.usage().live_buffers, 0u);
  EXPECT_FALSE(allocator.allocate(MemoryCategory::workspace, 0));
}

TEST_F(AllocatorTest, RefusesWhatDoesNotFitAndStaysUsable) {
  DeviceAllocator allocator(AllocatorOptions{.limit_bytes = 1 << 20});
  const DeviceBuffer half = allocator.allocate(MemoryCategory::bf16_planes, 1 << 19);
  try {
    static_cast<void>(allocator.allocate(MemoryCategory::workspace, (1 << 19) + 1));
    FAIL() << "more than the limit was allocated";
  } catch (const DeviceMemoryError& error) {
    EXPECT_EQ(error.kind(), ErrorKind::unsupported);
    EXPECT_NE(std::string(error.what()).find("workspace"), std::string::npos) << error.what();
  }
  EXPECT_EQ(allocator.usage().total_in_use, 1u << 19);
  EXPECT_TRUE(allocator.allocate(MemoryCategory::workspace, 1 << 19));

  DeviceAllocator unlimited;
  EXPECT_THROW(static_cast<void>(unlimited.allocate(MemoryCategory::workspace, std::size_t{1} << 46)), DeviceMemoryError);
  EXPECT_EQ(unlimited.usage().total_in_use, 0u);
  EXPECT_TRUE(unlimited.allocate(MemoryCategory::workspace, 4096));
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

TEST_F(AllocatorTest, PoisonsFreshMemory) {
  DeviceAllocator allocator(AllocatorOptions{.poison = true});
  const DeviceBuffer buffer = allocator.allocate(MemoryCategory::workspace, 256);
  for (const std::uint8_t byte : download<std::uint8_t>(buffer, 256)) EXPECT_EQ(byte, 0xFF);
}

}  // namespace
}  // namespace loopgauge::test
