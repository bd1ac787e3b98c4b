// SPDX-License-Identifier: Apache-2.0
// Common ground of the tests that run kernels: they skip with the reason when there is no device.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <optional>
#include <random>
#include <vector>

#include "optimized/cuda_executor.hpp"
#include "optimized/runtime/cuda_check.hpp"
#include "optimized/runtime/device_allocator.hpp"
#include "optimized/runtime/stream.hpp"
#include "reference/numeric/bfloat16.hpp"
#include "reference/ops/matrix.hpp"

namespace loopgauge::test {

using Bits = std::vector<std::uint16_t>;

inline Bits to_bits(const reference::Matrix<float>& matrix) {
  Bits bits;
  for (std::ptrdiff_t i = 0; i < matrix.size(); ++i) bits.push_back(static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(matrix.data()[i]) >> 16));
  return bits;
}

inline reference::Matrix<float> to_matrix(const Bits& bits, int rows, int columns) {
  reference::Matrix<float> matrix(rows, columns);
  for (std::size_t i = 0; i < bits.size(); ++i) matrix.data()[i] = reference::bfloat16_to_float(bits[i]);
  return matrix;
}

inline reference::Matrix<std::uint16_t> to_bit_matrix(const Bits& bits, int rows, int columns) {
  reference::Matrix<std::uint16_t> matrix(rows, columns);
  std::copy(bits.begin(), bits.end(), matrix.data());
  return matrix;
}

// Gaussian values with one outlier of 200 times the scale in about 200, as trained activations have.
inline Bits random_bits(std::size_t count, std::uint32_t seed, float scale = 1.0f) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal(0.0f, scale);
  Bits bits(count);
  for (auto& value : bits) {
    const float x = normal(generator) * (generator() % 200 == 0 ? 200.0f : 1.0f);
    value = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(reference::round_to_bfloat16(x)) >> 16);
  }
  return bits;
}

class DeviceTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const optimized::DeviceStatus status = optimized::device_status();
    if (!status.available) GTEST_SKIP() << status.description;
    stream_.emplace();
  }

  template <class T>
  optimized::DeviceBuffer upload(const std::vector<T>& values) {
    optimized::DeviceBuffer buffer = allocator_.allocate_array<T>(MemoryCategory::workspace, values.size());
    if (!values.empty()) LOOPGAUGE_CUDA_CHECK(cudaMemcpy(buffer.data(), values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
    LOOPGAUGE_CUDA_CHECK(cudaDeviceSynchronize());  // the tests' stream does not wait for the default stream
    return buffer;
  }

  // Filled with NaN patterns (all bits set): an element that is not written shows.
  template <class T>
  optimized::DeviceBuffer poisoned(std::size_t count) {
    optimized::DeviceBuffer buffer = allocator_.allocate_array<T>(MemoryCategory::workspace, count);
    if (count != 0) LOOPGAUGE_CUDA_CHECK(cudaMemset(buffer.data(), 0xFF, count * sizeof(T)));
    LOOPGAUGE_CUDA_CHECK(cudaDeviceSynchronize());
    return buffer;
  }

  template <class T>
  std::vector<T> download(const optimized::DeviceBuffer& buffer, std::size_t count) {
    stream_->synchronize();
    std::vector<T> values(count);
    LOOPGAUGE_CUDA_CHECK(cudaMemcpy(values.data(), buffer.data(), count * sizeof(T), cudaMemcpyDeviceToHost));
    return values;
  }

  optimized::DeviceAllocator allocator_;
  std::optional<optimized::Stream> stream_;
};

// Number of elements that differ; the first one is named in the failure.
template <class T>
::testing::AssertionResult same_bits(const std::vector<T>& expected, const std::vector<T>& actual) {
  if (expected.size() != actual.size()) return ::testing::AssertionFailure() << expected.size() << " elements expected, " << actual.size() << " found";
  std::size_t different = 0, first = 0;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    if (std::memcmp(&expected[i], &actual[i], sizeof(T)) == 0) continue;
    if (different++ == 0) first = i;
  }
  if (different == 0) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << different << " of " << expected.size() << " elements differ, first " << first << ": expected "
                                       << expected[first] << ", found " << actual[first];
}

}  // namespace loopgauge::test
