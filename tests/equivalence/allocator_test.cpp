// SPDX-License-Identifier: Apache-2.0
// Exact accounting by category, and a refusal that leaves everything usable.
#include "models/error.hpp"
#include "optimized/cuda_executor.hpp"
#include "tests/equivalence/device_fixture.hpp"

namespace loopgauge::test {
namespace {

using optimized::AllocatorOptions;
using optimized::DeviceAllocator;
using optimized::DeviceBuffer;
using optimized::DeviceMemoryError;

// Both ways of allocation, in every test.
class AllocatorTest : public DeviceTest, public ::testing::WithParamInterface<bool> {
 protected:
  static AllocatorOptions options(AllocatorOptions options = {}) {
    options.stream_ordered = GetParam();
    return options;
  }
};

INSTANTIATE_TEST_SUITE_P(Ways, AllocatorTest, ::testing::Bool(),
                         [](const auto& way) { return std::string(way.param ? "StreamOrdered" : "Synchronous"); });

std::size_t index(MemoryCategory category) { return static_cast<std::size_t>(category); }

TEST_P(AllocatorTest, CountsBytesByCategoryNowAndAtTheirPeak) {
  DeviceAllocator allocator(options());
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

TEST_P(AllocatorTest, RefusesWhatDoesNotFitAndStaysUsable) {
  DeviceAllocator allocator(options({.limit_bytes = 1 << 20}));
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

  DeviceAllocator unlimited(options());
  EXPECT_THROW(static_cast<void>(unlimited.allocate(MemoryCategory::workspace, std::size_t{1} << 46)), DeviceMemoryError);
  EXPECT_EQ(unlimited.usage().total_in_use, 0u);
  EXPECT_TRUE(unlimited.allocate(MemoryCategory::workspace, 4096));
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

TEST_P(AllocatorTest, PoisonsFreshMemory) {
  DeviceAllocator allocator(options({.poison = true}));
  for (int round = 0; round < 2; ++round) {  // the second time, memory that was written and freed
    const DeviceBuffer buffer = allocator.allocate(MemoryCategory::workspace, 256);
    if (GetParam()) allocator.stream().synchronize();
    for (const std::uint8_t byte : download<std::uint8_t>(buffer, 256)) EXPECT_EQ(byte, 0xFF);
    ASSERT_EQ(cudaMemset(const_cast<void*>(buffer.data()), 0, 256), cudaSuccess);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  }
}

TEST_F(DeviceTest, WhatAPoolKeepsIsFreeAndGoesToAllocatorsThatNeedIt) {
  constexpr std::size_t kBytes = std::size_t{2} << 30;
  const std::size_t before = optimized::kept_bytes(0);
  DeviceAllocator allocator({.stream_ordered = true});
  allocator.allocate(MemoryCategory::workspace, kBytes).reset();
  allocator.stream().synchronize();
  EXPECT_GE(optimized::kept_bytes(0), before + kBytes);
  std::size_t taken_apart = 0, total = 0;
  ASSERT_EQ(cudaMemGetInfo(&taken_apart, &total), cudaSuccess);
  EXPECT_GE(optimized::device_memory(0).free, taken_apart + kBytes - (std::size_t{1} << 30));  // other processes may have taken some in between

  DeviceAllocator other;
  EXPECT_THROW(static_cast<void>(other.allocate(MemoryCategory::workspace, std::size_t{1} << 46)), DeviceMemoryError);
  EXPECT_EQ(optimized::kept_bytes(0), 0u);
  EXPECT_TRUE(allocator.allocate(MemoryCategory::workspace, kBytes));
}

TEST_F(DeviceTest, MemoryFreedInStreamOrderKeepsItsContentForWorkIssuedBefore) {
  constexpr std::size_t kBytes = 64 << 20;
  DeviceAllocator allocator({.stream_ordered = true});
  const optimized::Stream& stream = allocator.stream();
  DeviceBuffer copy = allocator.allocate(MemoryCategory::workspace, kBytes);
  {
    DeviceBuffer source = allocator.allocate(MemoryCategory::workspace, kBytes);
    ASSERT_EQ(cudaMemsetAsync(source.data(), 0x5A, kBytes, stream), cudaSuccess);
    ASSERT_EQ(cudaMemcpyAsync(copy.data(), source.data(), kBytes, cudaMemcpyDeviceToDevice, stream), cudaSuccess);
  }
  DeviceBuffer next = allocator.allocate(MemoryCategory::workspace, kBytes);  // the same memory, most likely
  ASSERT_EQ(cudaMemsetAsync(next.data(), 0xA5, kBytes, stream), cudaSuccess);
  stream.synchronize();
  for (const std::uint8_t byte : download<std::uint8_t>(copy, kBytes)) ASSERT_EQ(byte, 0x5A);
  EXPECT_THROW(static_cast<void>(DeviceAllocator().stream()), InternalError);
}

}  // namespace
}  // namespace loopgauge::test
