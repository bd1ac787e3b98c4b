// SPDX-License-Identifier: Apache-2.0
// Decode rows that come late: what decode_projections writes for attention behind it, written by a kernel that lets the next one begin two milliseconds
// before. A launch that may begin early (written_rows) and reads one of them without waiting reads NaN.
#pragma once

#include <cstdint>

#include "optimized/kv/kv_layout.hpp"
#include "tests/equivalence/kv_fixture.hpp"

namespace loopgauge::equivalence {

class LateRows {
 public:
  // rows (device): [row_count], no (position, loop) twice; q (device): [row_count, heads * head_dim], both kept by the caller; K and V are those of `layer`.
  LateRows(History& history, int layer, const optimized::QueryRow* rows, int row_count, DeviceArray<std::uint16_t>& q);
  // Behind what was launched before, takes q of the rows, and K and V of each row's position in the plane of its loop, away; then launches the kernel that
  // puts them back. Waits for nothing.
  void launch();
  // After launch(), the first two values of q as a kernel reads them that is launched like attention and does not wait.
  std::uint32_t read_without_waiting();

 private:
  History& history_;
  int layer_, row_count_;
  const optimized::QueryRow* rows_;
  DeviceArray<std::uint16_t>& q_;
  DeviceArray<std::uint32_t> kept_;  // [rows, 3, heads * head_dim / 2] words: q, K, V
  DeviceArray<std::uint32_t> read_;
};

}  // namespace loopgauge::equivalence
