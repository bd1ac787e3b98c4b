// SPDX-License-Identifier: Apache-2.0
// Rows go to the page of their request, loop and position, in every layer and head, and nowhere else.
#include "optimized/ops/kv_append.cuh"

#include "optimized/kv/kv_cache.hpp"
#include "optimized/ops/residual_encode.cuh"
#include "optimized/ops/rope.cuh"
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

TEST_F(KvAppendTest, OnePassWithRopeWritesWhatTwoWrite) {
  for (const int head_dim : {64, 128}) {
    const KvShape shape{2, 3, head_dim};
    const int width = shape.heads * head_dim, stride = 3 * width, layer = 1;
    const optimized::RopeTable table = optimized::make_rope_table(200, head_dim, 10000.0);
    const auto cosine = upload(table.cosine), sine = upload(table.sine);
    struct Written {
      Bits q;
      std::vector<float> k, v;
    };
    const auto written = [&](bool one_pass) {
      optimized::DeviceAllocator poisoning({.poison = true});
      KvCache cache(shape, poisoning, *stream_);
      const int request = cache.open_request(200);
      cache.reserve(request, 2, PositionRange{0, 192});
      cache.set_active(request, 2, PositionRange{0, 192});
      cache.upload();
      const std::vector<QueryRow> rows{{request, 130, 2, 0, -1}, {-1, 131, 2, 0, -1}, {request, 0, 2, 0, -1}, {request, 63, 2, 0, -1}};
      const int count = static_cast<int>(rows.size());
      const auto device_rows = upload(rows);
      const auto positions = upload(std::vector<std::int32_t>{130, 0, 0, 63});
      auto input = upload(random_bits(static_cast<std::size_t>(count) * stride, 95));
      auto* const qkv = input.as<Bfloat16>();
      if (one_pass) {
        optimized::rope_and_kv_append(qkv, stride, positions.as<std::int32_t>(), cosine.as<Bfloat16>(), sine.as<Bfloat16>(), device_rows.as<QueryRow>(), cache.view(),
                                      layer, count, *stream_);
      } else {
        optimized::rope(qkv, stride, positions.as<std::int32_t>(), cosine.as<Bfloat16>(), sine.as<Bfloat16>(), count, 2 * shape.heads, head_dim, *stream_);
        optimized::kv_append(qkv + width, qkv + 2 * width, stride, device_rows.as<QueryRow>(), cache.view(), layer, count, *stream_);
      }
      Written result;
      const Bits all = download<std::uint16_t>(input, static_cast<std::size_t>(count) * stride);
      for (int row = 0; row < count; ++row) result.q.insert(result.q.end(), all.begin() + row * stride, all.begin() + row * stride + width);
      const std::size_t plane = static_cast<std::size_t>(192) * width;
      auto k = poisoned<float>(plane), v = poisoned<float>(plane);
      optimized::kv_gather({cache.view(), layer, 2, request, 0, 0, 192, k.as<float>(), v.as<float>()}, *stream_);
      result.k = download<float>(k, plane);
      result.v = download<float>(v, plane);
      return result;
    };
    const Written two = written(false), one = written(true);
    EXPECT_TRUE(same_bits(two.q, one.q)) << "head_dim " << head_dim;
    EXPECT_TRUE(same_bits(two.k, one.k)) << "head_dim " << head_dim;  // NaN where nothing was written
    EXPECT_TRUE(same_bits(two.v, one.v)) << "head_dim " << head_dim;
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
