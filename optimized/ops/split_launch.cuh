// SPDX-License-Identifier: Apache-2.0
// What every launcher of a split-KV reader checks on the host.
#pragma once

#include <string>

#include "models/error.hpp"
#include "optimized/kv/kv_layout.hpp"

namespace loopgauge::optimized::split {

// Limits of the launch: grid extents, and positions that an int holds with room to spare.
inline void check_launch(const char* operation, const KvShape& shape, int row_count, int max_length) {
  if (shape.head_dim != 64 && shape.head_dim != 128) {
    throw UnsupportedError(std::string(operation) + ": head_dim " + std::to_string(shape.head_dim) + " is not 64 or 128");
  }
  if (row_count < 0 || row_count > 65535) {
    throw InternalError(std::string(operation) + ": " + std::to_string(row_count) + " rows in one launch, at most 65535");
  }
  if (row_count > 0 && (max_length < 1 || max_length > (1 << 21))) {
    throw UnsupportedError(std::string(operation) + ": length " + std::to_string(max_length) + " is not in 1.." + std::to_string(1 << 21));
  }
}

}  // namespace loopgauge::optimized::split
