// SPDX-License-Identifier: Apache-2.0
// Rows go to the page of their request, loop and position, in every layer and head, and nowhere else.
#include "optimized/ops/kv_append.cuh"

#include "optimized/kv/kv_cache.hpp"
#include "optimized/ops/residual_encode.cuh"
#include "tests/equivalence/device_fixture.hpp"

namespace loopgauge::test {
namespace {

using optimized::Bfloat16;
using optimized::KvCache;
using optimized::KvShape;
using optimized::QueryRow;

class KvAppendTest : public DeviceTest {};

TEST_F(KvAppendTest, WritesEveryRowToItsPlaceAndNowhereElse) {
  for (const int head_dim : {64, 128}) {
    const KvShape shape{2, 3, head_dim};
    const int width = shape.heads * head_dim, stride = 3 * width;
    KvCache cache(shape, allocator_, *stream_);
    const int first = cache.open_request(200), second = cache.open_request(70);
    // Nonconsecutive rows over three pages of one request, a padding row, and rows of another request and loop.
    const std::vector<QueryRow> rows{{first, 0, 1, 0, -1},  {first, 63, 1, 0, -1}, {first, 64, 1, 0, -1}, {first, 130, 1, 0, -1},
                                     {-1, 131, 1, 0, -1},   {second, 69, 1, 0, -1}, {second, 5, 1, 0, -1}};
    for (const QueryRow& row : rows) {
      if (row.request < 0) continue;
      cache.reserve(row.request, row.loop, {row.position, row.position + 1});
      cache.set_active(row.request, row.loop, {row.position, row.position + 1});
    }
    cache.upload();
    const auto device_rows = upload(rows);
    const auto count = static_cast<std::size_t>(rows.size()) * stride;
    std::vector<Bits> inputs;
    std::vector<optimized::DeviceBuffer> alive;
    for (int layer = 0; layer < shape.layers; ++layer) {
      inputs.push_back(random_bits(count, static_cast<std::uint32_t>(70 + layer)));
      alive.push_back(upload(inputs.back()));
      const auto* qkv = alive.back().as<Bfloat16>();
      optimized::kv_append(qkv + width, qkv + 2 * width, stride, device_rows.as<QueryRow>(), cache.view(), layer, static_cast<int>(rows.size()), *stream_);
    }
    for (int layer = 0; layer < shape.layers; ++layer) {
      for (std::size_t i = 0; i < rows.size(); ++i) {
        const QueryRow& row = rows[i];
        if (row.request < 0) continue;
        auto k = poisoned<float>(static_cast<std::size_t>(width)), v = poisoned<float>(static_cast<std::size_t>(width));
        optimized::kv_gather({cache.view(), layer, row.loop, row.request, 0, row.position, row.position + 1, k.as<float>(), v.as<float>()}, *stream_);
        const auto expected = [&](int part) {
          const auto begin = inputs[static_cast<std::size_t>(layer)].begin() + static_cast<std::ptrdiff_t>(i) * stride + part * width;
          const auto values = to_matrix(Bits(begin, begin + width), 1, width);
          return std::vector<float>(values.data(), values.data() + width);
        };
        EXPECT_TRUE(same_bits(expected(1), download<float>(k, static_cast<std::size_t>(width)))) << "K, row " << i << ", layer " << layer;
        EXPECT_TRUE(same_bits(expected(2), download<float>(v, static_cast<std::size_t>(width)))) << "V, row " << i << ", layer " << layer;
      }
    }
  }
}

TEST_F(KvAppendTest, LeavesTheOtherRowsOfAPageAlone) {
  optimized::DeviceAllocator poisoning({.poison = true});
  const KvShape shape{1, 1, 64};
  KvCache cache(shape, poisoning, *stream_);
  const int request = cache.open_request(64);
  cache.reserve(request, 1, PositionRange{0, 64});
  cache.set_active(request, 1, PositionRange{0, 64});
  cache.upload();
  const Bits input = random_bits(64, 90);
  const auto x = upload(input);
  const auto rows = upload(std::vector<QueryRow>{{request, 17, 1, 0, -1}});
  optimized::kv_append(x.as<Bfloat16>(), x.as<Bfloat16>(), 64, rows.as<QueryRow>(), cache.view(), 0, 1, *stream_);
  auto k = poisoned<float>(64 * 64), v = poisoned<float>(64 * 64);
  optimized::kv_gather({cache.view(), 0, 1, request, 0, 0, 64, k.as<float>(), v.as<float>()}, *stream_);
  const auto values = download<float>(k, 64 * 64);
  for (int position = 0; position < 64; ++position) {
    for (int channel = 0; channel < 64; ++channel) {
      const float value = values[static_cast<std::size_t>(position * 64 + channel)];
      if (position == 17) EXPECT_EQ(value, reference::bfloat16_to_float(input[static_cast<std::size_t>(channel)]));
      else EXPECT_NE(value, value) << "position " << position << " was written";
    }
  }
}

}  // namespace
}  // namespace loopgauge::test
