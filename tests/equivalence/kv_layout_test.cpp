// SPDX-License-Identifier: Apache-2.0
// Layout arithmetic and packed words: host code, no device needed.
#include "optimized/kv/kv_layout.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "optimized/kv/numeric_fault.hpp"

namespace loopgauge::optimized {
namespace {

class KvLayout : public ::testing::TestWithParam<KvShape> {};

TEST_P(KvLayout, PageTilesCoverThePageOnce) {
  const KvShape shape = GetParam();
  std::vector<int> uses(page_bytes(shape) / 2);
  for (int layer = 0; layer < shape.layers; ++layer) {
    for (const auto tensor : {KvTensor::k, KvTensor::v}) {
      for (int head = 0; head < shape.heads; ++head) {
        for (int row = 0; row < kPageTokens; ++row) {
          const std::size_t begin = page_row_offset(shape, layer, tensor, head, row);
          for (int d = 0; d < shape.head_dim; ++d) ++uses.at(begin + static_cast<std::size_t>(d));
        }
      }
    }
  }
  for (const int count : uses) ASSERT_EQ(count, 1);
}

TEST_P(KvLayout, StreamTilesCoverTheBlockOnce) {
  const KvShape shape = GetParam();
  for (const auto& rows : {std::array<std::uint32_t, 4>{130, 130, 65, 13}, {64, 64, 0, 0}, {1, 1, 1, 1}, {256, 256, 64, 26}}) {
    std::vector<std::uint8_t> base(base_payload_bytes(shape, rows.data())), residual(residual_payload_bytes(shape, rows.data()));
    std::vector<std::uint8_t> parameters(parameter_bytes(shape, rows.data()));
    PageTableEntry entry{};
    entry.base_payload = reinterpret_cast<std::uint64_t>(base.data());
    entry.residual_payload = reinterpret_cast<std::uint64_t>(residual.data());
    entry.parameters = reinterpret_cast<std::uint64_t>(parameters.data());
    ActivityMap map{};
    std::copy(rows.begin(), rows.end(), map.rows);
    const auto mark = [](std::vector<std::uint8_t>& bytes, const void* begin, std::size_t count) {
      const auto* first = static_cast<const std::uint8_t*>(begin);
      if (count == 0) return;
      ASSERT_GE(first, bytes.data());
      ASSERT_LE(first + count, bytes.data() + bytes.size());
      for (std::size_t i = 0; i < count; ++i) ++bytes[static_cast<std::size_t>(first - bytes.data()) + i];
    };
    for (int layer = 0; layer < shape.layers; ++layer) {
      for (int stream = 1; stream <= kLoops; ++stream) {
        const std::size_t n = rows[static_cast<std::size_t>(stream - 1)];
        for (const auto tensor : {KvTensor::k, KvTensor::v}) {
          for (int head = 0; head < shape.heads; ++head) {
            const StreamTile tile = stream_tile(shape, entry, map, layer, stream, tensor, head);
            mark(stream == 1 ? base : residual, tile.payload, n * static_cast<std::size_t>(shape.head_dim) / 2);
            const std::size_t groups = tensor == KvTensor::k ? (n + 63) / 64 * static_cast<std::size_t>(shape.head_dim)
                                                             : n * static_cast<std::size_t>(shape.head_dim / 64);
            mark(parameters, tile.parameters, groups * 4);
          }
        }
      }
    }
    for (const auto* bytes : {&base, &residual, &parameters}) {
      for (const std::uint8_t count : *bytes) ASSERT_EQ(count, 1);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, KvLayout, ::testing::Values(KvShape{2, 3, 64}, KvShape{3, 3, 128}, KvShape{1, 16, 128}));

// 48 layers, one block of 65,472 positions: its parts are longer than 32 bits count.
TEST(KvLayout, TheLastTilesOfTheLargestBlockEndWhereItEnds) {
  const KvShape shape{48, 16, 128};
  constexpr std::uint64_t kRows = 65472;
  const std::array<std::uint32_t, 4> rows{kRows, kRows, kRows, kRows};
  ActivityMap map{};
  std::copy(rows.begin(), rows.end(), map.rows);
  const auto ends = [&](int stream, KvTensor tensor) {
    const StreamTile tile = stream_tile(shape, {}, map, shape.layers - 1, stream, tensor, shape.heads - 1);
    return std::pair(reinterpret_cast<std::uint64_t>(tile.payload) + kRows * payload_row_bytes(shape), reinterpret_cast<std::uint64_t>(tile.parameters));
  };
  EXPECT_EQ(ends(1, KvTensor::v).first, std::uint64_t{48} * 2 * 16 * kRows * 64);
  EXPECT_EQ(ends(1, KvTensor::v).first, base_payload_bytes(shape, rows.data()));
  EXPECT_EQ(ends(4, KvTensor::v).first, residual_payload_bytes(shape, rows.data()));
  EXPECT_EQ(ends(4, KvTensor::v).second + kRows * 2 * 4, parameter_bytes(shape, rows.data()));
  EXPECT_EQ(ends(4, KvTensor::k).second + kRows / 64 * 128 * 4, std::uint64_t{48} * k_parameter_layer_bytes(shape, rows.data()));
}

TEST(KvLayout, PageMasks) {
  EXPECT_EQ(page_mask(0, 0, 64), ~std::uint64_t{0});
  EXPECT_EQ(page_mask(1, 0, 64), 0u);
  EXPECT_EQ(page_mask(1, 0, 65), 1u);
  EXPECT_EQ(page_mask(0, 3, 5), 0b11000u);
  EXPECT_EQ(page_mask(1, 3, 66), 0b11u);
  EXPECT_EQ(page_mask(2, 128, 192), ~std::uint64_t{0});
  EXPECT_EQ(page_mask(2, 191, 192), std::uint64_t{1} << 63);
  EXPECT_EQ(page_mask(0, 0, 0), 0u);
}

TEST(KvLayout, ResidentLoopIsTheLastExecutedOneUpToTheReader) {
  ActivityMap map{};
  map.active[0] = 0b1111;
  map.active[1] = 0b0111;
  map.active[2] = 0b0011;
  map.active[3] = 0b0001;
  for (int loop = 1; loop <= 4; ++loop) {
    for (int row = 0; row < 4; ++row) EXPECT_EQ(resident_loop(map, row, loop), std::min(loop, 4 - row)) << loop << ' ' << row;
  }
}

TEST(NumericFault, PackingRoundTripsAndOrders) {
  const NumericFault fault{NumericFaultKind::v_group, 3, kMaxRequests - 1, 47, 1234567, 1000, 1};
  const NumericFault back = unpack_numeric_fault(pack_numeric_fault(fault));
  EXPECT_EQ(back.kind, fault.kind);
  EXPECT_EQ(back.loop, fault.loop);
  EXPECT_EQ(back.request, fault.request);
  EXPECT_EQ(back.layer, fault.layer);
  EXPECT_EQ(back.position, fault.position);
  EXPECT_EQ(back.head, fault.head);
  EXPECT_EQ(back.detail, fault.detail);
  EXPECT_LT(pack_numeric_fault(fault), kNoNumericFault);
  EXPECT_NE(describe(fault, 7).find("request 7, loop 3, layer 47, head 1000"), std::string::npos) << describe(fault, 7);
}

}  // namespace
}  // namespace loopgauge::optimized
