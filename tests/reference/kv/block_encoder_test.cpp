// SPDX-License-Identifier: Apache-2.0
// Streams of one block: residual chain, compact rows, groups, inheritance (S-KVQ-1, S-KVQ-7..12).
#include "reference/kv/block_encoder.hpp"

#include <gtest/gtest.h>

#include "models/error.hpp"
#include "reference/ops/codec.hpp"
#include "tests/reference/support.hpp"

namespace loopgauge::reference {
namespace {

ModelConfig shape(int layers, int heads, int head_dim) {
  ModelConfig model;
  model.layers = layers, model.loops = kLoops, model.heads = heads, model.head_dim = head_dim;
  return model;
}

class Block {
 public:
  Block(const ModelConfig& model, PositionRange range) : model_(model), range_(range), planes_(model, range.end, true) {}

  // Writes K and V of a position at a loop, the same value pattern for all layers and heads unless set later.
  void fill(int loop, int position, std::uint64_t seed) {
    for (int layer = 0; layer < model_.layers; ++layer) {
      for (const KvTensor tensor : {KvTensor::key, KvTensor::value}) {
        const auto row =
            test::bf16_values(static_cast<std::size_t>(model_.projection_width()),
                              seed * 977 + static_cast<std::uint64_t>(position * 64 + loop * 8 + layer * 2 + (tensor == KvTensor::key)), 5);
        planes_.write_row(tensor, layer, loop, position, row.data());
      }
    }
  }
  CodecStream encode(int loop, std::vector<std::int32_t> rows) {
    CodecStream stream;
    stream.rows = std::move(rows);
    encode_stream<float>(planes_, model_, range_, loop, stream, Fault::none, "request 3");
    return stream;
  }
  KvPlanes<float>& planes() { return planes_; }
  const float* hat(KvTensor tensor, int layer, int loop, int head, int position) {
    return planes_.reconstructed(tensor, layer, loop, head, position);
  }
  const float* exact(KvTensor tensor, int layer, int loop, int head, int position) {
    return planes_.exact(tensor, layer, loop, head, position);
  }

 private:
  ModelConfig model_;
  PositionRange range_;
  KvPlanes<float> planes_;
};

std::vector<std::int32_t> range(int begin, int end, int step = 1) {
  std::vector<std::int32_t> all;
  for (int i = begin; i < end; i += step) all.push_back(i);
  return all;
}

// Worked example S-EX-2.
TEST(BlockEncoder, ResidualIsAgainstTheReconstructedPredecessor) {
  const ModelConfig model = shape(1, 1, 2);
  Block block(model, {0, 3});
  // Channel 0 spans 1.5, so the step is .1 and 10.03 reconstructs as 10.00.
  const std::vector<std::vector<float>> rows{{10.0f, 0}, {10.03f, 0}, {11.5f, 0}};
  for (int p = 0; p < 3; ++p) {
    for (const KvTensor tensor : {KvTensor::key, KvTensor::value})
      block.planes().write_row(tensor, 0, 1, p, rows[static_cast<std::size_t>(p)].data());
  }
  block.encode(1, {0, 1, 2});
  EXPECT_EQ(block.hat(KvTensor::key, 0, 1, 0, 1)[0], 10.0f);
  const std::vector<float> next{10.08f, 0};
  for (const KvTensor tensor : {KvTensor::key, KvTensor::value}) block.planes().write_row(tensor, 0, 2, 1, next.data());
  const CodecStream stream = block.encode(2, {1});
  EXPECT_NEAR(stream.layers[0].k_min.data[0], 0.08f, 1e-4f) << "not .05, the difference of the originals";
  EXPECT_NEAR(block.hat(KvTensor::key, 0, 2, 0, 1)[0], 10.08f, 1e-4f);
  EXPECT_EQ(block.hat(KvTensor::key, 0, 2, 0, 0)[0], 10.0f) << "absent: inherits";
}

// Every code, parameter and reconstruction of four streams, restated with indices written out.
TEST(BlockEncoder, EqualsARestatementOverFourStreams) {
  const int heads = 2, head_dim = 96, length = 150;  // V groups of 64 and 32 channels; K groups of 64, 64 and 22 rows
  const ModelConfig model = shape(2, heads, head_dim);
  Block block(model, {0, length});
  const std::vector<std::vector<std::int32_t>> rows{range(0, length), range(0, length), range(1, length, 2), range(3, length, 10)};
  std::vector<std::vector<float>> previous(static_cast<std::size_t>(2 * 2 * heads * length), std::vector<float>(head_dim, 0.0f));
  const auto index = [&](int layer, int tensor, int head, int position) {
    return static_cast<std::size_t>(((layer * 2 + tensor) * heads + head) * length + position);
  };
  for (int loop = 1; loop <= 4; ++loop) {
    for (const int p : rows[static_cast<std::size_t>(loop - 1)]) block.fill(loop, p, 140);
    const CodecStream stream = block.encode(loop, rows[static_cast<std::size_t>(loop - 1)]);
    const int count = static_cast<int>(stream.rows.size());
    for (int layer = 0; layer < 2; ++layer) {
      for (int tensor = 0; tensor < 2; ++tensor) {
        const KvTensor which = tensor == 0 ? KvTensor::key : KvTensor::value;
        const CodecLayer& codec = stream.layers[static_cast<std::size_t>(layer)];
        for (int head = 0; head < heads; ++head) {
          std::vector<std::vector<float>> target;
          for (const int p : stream.rows) {
            std::vector<float> row(head_dim);
            const auto& base = previous[index(layer, tensor, head, p)];
            for (int d = 0; d < head_dim; ++d) {
              const float x = block.exact(which, layer, loop, head, p)[d];
              row[static_cast<std::size_t>(d)] = loop == 1 ? x : x - base[static_cast<std::size_t>(d)];
            }
            target.push_back(row);
          }
          std::vector<std::vector<float>> decoded = target;
          const auto one_group = [&](const std::vector<std::pair<int, int>>& members, float stored_min, float stored_scale) {
            std::vector<float> values;
            for (const auto& [i, d] : members) values.push_back(target[static_cast<std::size_t>(i)][static_cast<std::size_t>(d)]);
            std::vector<std::uint8_t> codes(values.size());
            const auto group = encode_group(values.data(), 1, static_cast<int>(values.size()), codes.data());
            ASSERT_EQ(test::bits(group.min16), test::bits(stored_min));
            ASSERT_EQ(test::bits(group.scale16), test::bits(stored_scale));
            for (std::size_t m = 0; m < members.size(); ++m) {
              const auto& [i, d] = members[m];
              const auto& all = tensor == 0 ? codec.k_codes : codec.v_codes;
              ASSERT_EQ(all.data[static_cast<std::size_t>((head * count + i) * head_dim + d)], codes[m]);
              decoded[static_cast<std::size_t>(i)][static_cast<std::size_t>(d)] =
                  static_cast<float>(codes[m]) * group.scale16 + group.min16;
            }
          };
          if (tensor == 0) {
            const int groups = (count + 63) / 64;
            ASSERT_EQ(codec.k_min.shape, (std::vector<std::int64_t>{heads, groups, head_dim}));
            for (int g = 0; g < groups; ++g) {
              for (int d = 0; d < head_dim; ++d) {
                std::vector<std::pair<int, int>> members;
                for (int i = g * 64; i < std::min(count, g * 64 + 64); ++i) members.emplace_back(i, d);
                const std::size_t parameter = static_cast<std::size_t>((head * groups + g) * head_dim + d);
                one_group(members, codec.k_min.data[parameter], codec.k_scale.data[parameter]);
              }
            }
          } else {
            ASSERT_EQ(codec.v_min.shape, (std::vector<std::int64_t>{heads, count, 2}));
            for (int i = 0; i < count; ++i) {
              for (int g = 0; g < 2; ++g) {
                std::vector<std::pair<int, int>> members;
                for (int d = g * 64; d < std::min(head_dim, g * 64 + 64); ++d) members.emplace_back(i, d);
                const std::size_t parameter = static_cast<std::size_t>((head * count + i) * 2 + g);
                one_group(members, codec.v_min.data[parameter], codec.v_scale.data[parameter]);
              }
            }
          }
          std::size_t compact = 0;
          for (int p = 0; p < length; ++p) {
            auto& hat = previous[index(layer, tensor, head, p)];
            if (compact < stream.rows.size() && stream.rows[compact] == p) {
              for (std::size_t d = 0; d < head_dim; ++d) hat[d] = loop == 1 ? decoded[compact][d] : hat[d] + decoded[compact][d];
              ++compact;
            }
            ASSERT_TRUE(test::same_bits(hat, {block.hat(which, layer, loop, head, p), static_cast<std::size_t>(head_dim)}))
                << loop << ' ' << p;
          }
        }
      }
    }
  }
}

TEST(BlockEncoder, AbsentRowsInheritBitForBitAndAreNotCodeZero) {
  const ModelConfig model = shape(1, 1, 4);
  Block block(model, {0, 8});
  for (int p = 0; p < 8; ++p) block.fill(1, p, 150);
  for (int p = 0; p < 8; ++p) block.fill(2, p, 151);
  block.encode(1, range(0, 8));
  block.encode(2, range(0, 8));
  for (const int p : {2, 5}) block.fill(3, p, 152);
  const CodecStream stream = block.encode(3, {2, 5});
  bool minimum_matters = false;
  for (int p = 0; p < 8; ++p) {
    const bool present = p == 2 || p == 5;
    const std::span<const float> before{block.hat(KvTensor::key, 0, 2, 0, p), 4}, after{block.hat(KvTensor::key, 0, 3, 0, p), 4};
    EXPECT_EQ(test::same_bits(before, after), !present) << p;
  }
  for (const float m : stream.layers[0].k_min.data) minimum_matters |= m != 0;
  EXPECT_TRUE(minimum_matters) << "a stored code 0 would have changed the absent rows";
}

TEST(BlockEncoder, LateKeyGroupsAreOfCompactRowsNotOfPositions) {
  const ModelConfig model = shape(1, 1, 2);
  Block block(model, {0, 192});
  for (int p = 0; p < 192; ++p) block.fill(1, p, 160), block.fill(2, p, 161);
  block.encode(1, range(0, 192));
  block.encode(2, range(0, 192));
  const auto active = range(0, 192, 3);  // 64 rows spread over three times 64 positions
  for (const int p : active) block.fill(3, p, 162);
  EXPECT_EQ(block.encode(3, active).layers[0].k_min.shape, (std::vector<std::int64_t>{1, 1, 2}));
  const auto more = range(0, 192, 2);  // 96 rows: a full group and one of 32
  Block other(model, {0, 192});
  for (int p = 0; p < 192; ++p) other.fill(1, p, 160), other.fill(2, p, 161);
  other.encode(1, range(0, 192));
  other.encode(2, range(0, 192));
  for (const int p : more) other.fill(3, p, 162);
  EXPECT_EQ(other.encode(3, more).layers[0].k_min.shape, (std::vector<std::int64_t>{1, 2, 2}));
}

TEST(BlockEncoder, RaggedRowCountsHaveGroupsOfTheirRealRowsOnly) {
  const ModelConfig model = shape(1, 1, 2);
  for (const int count : {1, 7, 8, 9, 63, 64, 65, 127}) {
    Block block(model, {0, count});
    for (int p = 0; p < count; ++p) block.fill(1, p, 170);
    const CodecStream stream = block.encode(1, range(0, count));
    ASSERT_EQ(stream.layers[0].k_min.extent(1), (count + 63) / 64) << count;
    const int last = (count - 1) / 64 * 64;
    float low = block.exact(KvTensor::key, 0, 1, 0, last)[1];
    for (int p = last; p < count; ++p) low = std::min(low, block.exact(KvTensor::key, 0, 1, 0, p)[1]);
    EXPECT_EQ(stream.layers[0].k_min.data.back(), static_cast<float>(round_to_float16(low))) << count;
  }
}

TEST(BlockEncoder, AnEmptyStreamHasNoLayersAndEverythingInherits) {
  const ModelConfig model = shape(1, 1, 2);
  Block block(model, {0, 4});
  for (int p = 0; p < 4; ++p) block.fill(1, p, 180);
  block.encode(1, range(0, 4));
  const CodecStream stream = block.encode(2, {});
  EXPECT_TRUE(stream.layers.empty());
  for (int p = 0; p < 4; ++p) {
    EXPECT_TRUE(test::same_bits({block.hat(KvTensor::value, 0, 1, 0, p), 2}, {block.hat(KvTensor::value, 0, 2, 0, p), 2})) << p;
  }
}

TEST(BlockEncoder, EqualAndOppositeLoopsRoundTrip) {
  const ModelConfig model = shape(1, 1, 64);
  Block block(model, {0, 64});
  for (int p = 0; p < 64; ++p) {
    block.fill(1, p, 190);
    for (const KvTensor tensor : {KvTensor::key, KvTensor::value}) {
      std::vector<float> row(block.exact(tensor, 0, 1, 0, p), block.exact(tensor, 0, 1, 0, p) + 64);
      for (float& x : row) x = -x;
      block.planes().write_row(tensor, 0, 2, p, row.data());
    }
  }
  block.encode(1, range(0, 64));
  block.encode(2, range(0, 64));
  double base_error = 0, residual_error = 0;
  for (int p = 0; p < 64; ++p) {
    for (int d = 0; d < 64; ++d) {
      base_error =
          std::max<double>(base_error, std::fabs(block.hat(KvTensor::key, 0, 1, 0, p)[d] - block.exact(KvTensor::key, 0, 1, 0, p)[d]));
      residual_error =
          std::max<double>(residual_error, std::fabs(block.hat(KvTensor::key, 0, 2, 0, p)[d] - block.exact(KvTensor::key, 0, 2, 0, p)[d]));
    }
  }
  EXPECT_LE(base_error, 0.5 * 4 / 15 + 0.01);
  EXPECT_LE(residual_error, 0.5 * 8.3 / 15 + 0.01) << "the residual spans twice the values, not the base error on top";
}

TEST(BlockEncoder, ValuesOutsideTheCodecsRangeNameWhereTheyAre) {
  const ModelConfig model = shape(2, 1, 2);
  for (const float bad : {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN(), 1e6f}) {
    Block block(model, {0, 70});
    for (int p = 0; p < 70; ++p) block.fill(1, p, 200);
    const std::vector<float> row{0, bad};
    block.planes().write_row(KvTensor::value, 1, 1, 66, row.data());
    try {
      block.encode(1, range(0, 70));
      FAIL() << "accepted " << bad;
    } catch (const NumericError& error) {
      const std::string message = error.what();
      for (const char* part : {"request 3", "V", "loop 1", "layer 1", "group 66"})
        EXPECT_NE(message.find(part), std::string::npos) << message;
    }
  }
}

}  // namespace
}  // namespace loopgauge::reference
