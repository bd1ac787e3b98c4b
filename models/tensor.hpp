// SPDX-License-Identifier: Apache-2.0
// A dense row-major array with its extents. It owns its elements and does no arithmetic.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

namespace loopgauge {

template <class T>
struct Tensor {
  std::vector<std::int64_t> shape;  // extents, slowest first
  std::vector<T> data;              // row-major, product(shape) elements

  Tensor() = default;
  explicit Tensor(std::vector<std::int64_t> extents, T fill = T{}) : shape(std::move(extents)) {
    std::size_t count = 1;
    for (auto extent : shape) count *= static_cast<std::size_t>(extent);
    data.assign(count, fill);
  }

  bool empty() const { return data.empty(); }
  std::int64_t extent(std::size_t axis) const { return shape.at(axis); }

  // The contiguous slice at index `i` of the first axis.
  std::span<T> row(std::int64_t i) { return {data.data() + stride() * static_cast<std::size_t>(i), stride()}; }
  std::span<const T> row(std::int64_t i) const {
    return {data.data() + stride() * static_cast<std::size_t>(i), stride()};
  }

 private:
  std::size_t stride() const { return shape.empty() || shape[0] == 0 ? 0 : data.size() / static_cast<std::size_t>(shape[0]); }
};

}  // namespace loopgauge
