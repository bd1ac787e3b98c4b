// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "models/tensor.hpp"

namespace loopgauge {

// Keeps the first `rows` (at most extent(0)) of the first axis. Without rows the tensor is empty, which is how a record says "nothing".
template <class T>
void cut_rows(Tensor<T>& tensor, std::int64_t rows) {
  if (tensor.empty()) return;
  if (rows == 0) {
    tensor = {};
    return;
  }
  tensor.data.resize(tensor.data.size() / static_cast<std::size_t>(tensor.extent(0)) * static_cast<std::size_t>(rows));
  tensor.shape[0] = rows;
}

}  // namespace loopgauge
