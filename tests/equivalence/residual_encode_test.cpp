// SPDX-License-Identifier: Apache-2.0
#include "optimized/ops/residual_encode.cuh"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <functional>
#include <limits>

#include "reference/ops/codec.hpp"
#include "tests/equivalence/kv_fixture.hpp"

namespace loopgauge::equivalence {
namespace {

// Parameters compare as numbers: the reference record holds FP32 values, in which a zero may carry either sign.
void expect_equal(const CodecBlock& actual, const CodecBlock& expected, const std::string& what) {
  EXPECT_EQ(actual.positions, expected.positions) << what;
  std::size_t values = 0;
  for (std::size_t s = 0; s < kLoops; ++s) {
    const CodecStream &a = actual.streams[s], &e = expected.streams[s];
    ASSERT_EQ(a.rows, e.rows) << what << " stream " << s + 1;
    ASSERT_EQ(a.layers.size(), e.layers.size()) << what << " stream " << s + 1;
    for (std::size_t layer = 0; layer < e.layers.size(); ++layer) {
      const std::string where = what + " stream " + std::to_string(s + 1) + " layer " + std::to_string(layer);
      EXPECT_EQ(a.layers[layer].k_codes.data, e.layers[layer].k_codes.data) << where << " K codes";
      EXPECT_EQ(a.layers[layer].k_min.data, e.layers[layer].k_min.data) << where << " K minima";
      EXPECT_EQ(a.layers[layer].k_scale.data, e.layers[layer].k_scale.data) << where << " K scales";
      EXPECT_EQ(a.layers[layer].v_codes.data, e.layers[layer].v_codes.data) << where << " V codes";
      EXPECT_EQ(a.layers[layer].v_min.data, e.layers[layer].v_min.data) << where << " V minima";
      EXPECT_EQ(a.layers[layer].v_scale.data, e.layers[layer].v_scale.data) << where << " V scales";
      values += e.layers[layer].k_codes.data.size();
    }
  }
  EXPECT_GT(values, 0u) << what;
}

struct Case {
  int heads, head_dim, positions, prompt;
  std::vector<PositionRange> blocks;
};

class ResidualEncode : public ::testing::TestWithParam<Case> {};

TEST_P(ResidualEncode, CodesAndParametersAreTheReferences) {
  LOOPGAUGE_REQUIRE_DEVICE();
  const Case& c = GetParam();
  History history({.heads = c.heads, .head_dim = c.head_dim, .positions = c.positions, .prompt = c.prompt, .fragmented = true});
  history.encode(c.blocks);
  ASSERT_EQ(history.numeric_fault_word(), optimized::kNoNumericFault);
  for (std::size_t i = 0; i < c.blocks.size(); ++i) {
    expect_equal(history.device_block(i), history.blocks()[i], "block " + std::to_string(i));
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, ResidualEncode,
                         ::testing::Values(Case{3, 128, 512, 512, {{0, 256}, {256, 512}}}, Case{3, 64, 512, 512, {{0, 256}, {256, 512}}},
                                           Case{16, 128, 200, 100, {{0, 64}, {64, 128}, {128, 192}}}, Case{2, 128, 1, 1, {{0, 1}}},
                                           Case{2, 64, 63, 63, {{0, 63}}}, Case{2, 128, 65, 65, {{0, 65}}},
                                           Case{2, 64, 130, 0, {{0, 64}, {64, 128}}}, Case{2, 128, 1000, 1000, {{0, 1000}}}));

TEST(ResidualEncodeDevice, ReconstructionIsTheReferences) {
  LOOPGAUGE_REQUIRE_DEVICE();
  for (const int head_dim : {64, 128}) {
    History history({.head_dim = head_dim, .positions = 300, .prompt = 200});
    history.encode({{0, 192}, {192, 256}});
    const std::size_t count = static_cast<std::size_t>(history.model().heads) * 300 * static_cast<std::size_t>(head_dim);
    for (int loop = 1; loop <= kLoops; ++loop) {
      DeviceArray<float> k(history.allocator(), count), v(history.allocator(), count);
      optimized::kv_gather({.kv = history.cache().view(),
                            .layer = 1,
                            .loop = loop,
                            .request = history.request(),
                            .encoded_frontier = 256,
                            .begin = 0,
                            .end = 300,
                            .k = k.data(),
                            .v = v.data()},
                           history.stream());
      const auto actual_k = k.download(), actual_v = v.download();
      for (int head = 0; head < history.model().heads; ++head) {
        const auto keys = history.keys(1, loop, head, 256), values = history.values(1, loop, head, 256);
        for (int position = 0; position < 300; ++position) {
          for (int d = 0; d < head_dim; ++d) {
            const std::size_t i =
                (static_cast<std::size_t>(head) * 300 + static_cast<std::size_t>(position)) * static_cast<std::size_t>(head_dim) +
                static_cast<std::size_t>(d);
            ASSERT_EQ(actual_k[i], keys.row(position)[d]) << "K loop " << loop << " position " << position << " channel " << d;
            ASSERT_EQ(actual_v[i], values.row(position)[d]) << "V loop " << loop << " position " << position << " channel " << d;
          }
        }
      }
    }
  }
}

TEST(ResidualEncodeDevice, SealedBlocksDoNotChange) {
  LOOPGAUGE_REQUIRE_DEVICE();
  History history({.positions = 400, .prompt = 256});
  history.encode({{0, 256}});
  const CodecBlock before = history.device_block(0);
  history.encode({{256, 320}});
  history.encode({{320, 384}});
  expect_equal(history.device_block(0), before, "block 0 after two flushes");
}

// Streams of a window that are encoded one loop at a time are those encoded at once.
TEST(ResidualEncodeDevice, StreamByStreamEqualsAtOnce) {
  LOOPGAUGE_REQUIRE_DEVICE();
  History at_once({.positions = 256, .prompt = 256}), stepwise({.positions = 256, .prompt = 256});
  at_once.encode({{0, 256}});
  std::array<std::uint32_t, kLoops> rows{};
  for (int position = 0; position < 256; ++position) {
    for (int loop = 1; loop <= stepwise.depth(position); ++loop) ++rows[static_cast<std::size_t>(loop - 1)];
  }
  for (int loop = 1; loop <= kLoops; ++loop) {
    const optimized::EncodeTask task = stepwise.cache().prepare_encode(stepwise.request(), {0, 256}, loop, loop, rows);
    stepwise.cache().upload();
    DeviceArray<optimized::EncodeTask> tasks(stepwise.allocator(), std::vector<optimized::EncodeTask>{task});
    optimized::residual_encode({stepwise.cache().view(), tasks.data(), 1, stepwise.numeric_fault(), Fault::none}, stepwise.stream());
    LOOPGAUGE_CUDA_CHECK(cudaDeviceSynchronize());
    stepwise.cache().release_planes(stepwise.request(), loop, {0, 256});  // the chain needs reconstructed rows only
    stepwise.cache().upload();
  }
  expect_equal(stepwise.device_block(0), at_once.blocks()[0], "stepwise");
}

// Rows that replace others in sealed blocks keep to the parameters that the K groups have, also where their values lie far outside.
TEST(ResidualEncodeDevice, RowsEncodedAgainAreTheReferences) {
  LOOPGAUGE_REQUIRE_DEVICE();
  for (const int head_dim : {64, 128}) {
    for (const float scale : {0.5f, 1.0f, 40.0f}) {
      History history({.head_dim = head_dim, .positions = 200, .dense = true, .keep_planes = true, .fragmented = true});
      history.encode({{0, 64}, {64, 128}, {128, 192}});
      const CodecBlock before = history.device_block(1);
      const PositionRange parts[] = {{60, 67}, {100, 101}, {120, 192}};
      for (const PositionRange& rows : parts) history.encode_again(rows, scale);
      ASSERT_EQ(history.numeric_fault_word(), optimized::kNoNumericFault);
      for (std::size_t i = 0; i < 3; ++i) expect_equal(history.device_block(i), history.blocks()[i], "block " + std::to_string(i));
      EXPECT_EQ(history.device_block(1).streams[0].layers[0].k_min.data, before.streams[0].layers[0].k_min.data) << "K keeps its parameters";
      EXPECT_NE(history.device_block(1).streams[0].layers[0].k_codes.data, before.streams[0].layers[0].k_codes.data);
      EXPECT_NE(history.device_block(1).streams[0].layers[0].v_min.data, before.streams[0].layers[0].v_min.data) << "a group of V is one row's";
    }
  }
}

// Group values chosen by hand: written over one BF16 page, encoded, compared with the group codec value by value.
class EdgeGroups : public ::testing::Test {
 protected:
  // Fills K and V of layer 0, head 0 with value(row, channel) as BF16 bits and encodes 64 rows of loop 1. Returns the fault word.
  std::uint64_t encode(const std::function<float(int, int)>& value) {
    allocator_ = std::make_unique<optimized::DeviceAllocator>(poisoning_allocator());
    cache_ = std::make_unique<optimized::KvCache>(optimized::KvShape{1, 1, 64}, *allocator_, nullptr);
    const int request = cache_->open_request(64);
    cache_->reserve(request, 1, PositionRange{0, 64});
    cache_->set_active(request, 1, PositionRange{0, 64});
    std::vector<std::uint16_t> page(2 * 64 * 64);
    for (int row = 0; row < 64; ++row) {
      for (int channel = 0; channel < 64; ++channel) {
        const auto bits = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(value(row, channel)) >> 16);
        page[static_cast<std::size_t>(row * 64 + channel)] = bits;            // K
        page[static_cast<std::size_t>(64 * 64 + row * 64 + channel)] = bits;  // V
      }
    }
    LOOPGAUGE_CUDA_CHECK(
        cudaMemcpy(reinterpret_cast<void*>(cache_->pages(request)[0].bf16[0]), page.data(), page.size() * 2, cudaMemcpyHostToDevice));
    const optimized::EncodeTask task = cache_->prepare_encode(request, {0, 64}, 1, 1);
    cache_->upload();
    DeviceArray<optimized::EncodeTask> tasks(*allocator_, std::vector<optimized::EncodeTask>{task});
    DeviceArray<std::uint64_t> fault(*allocator_, std::vector<std::uint64_t>{optimized::kNoNumericFault});
    optimized::residual_encode({cache_->view(), tasks.data(), 1, fault.data(), Fault::none}, nullptr);
    const std::uint64_t word = fault.download().front();
    const optimized::SealedBlock& block = *cache_->blocks(request)[0];
    payload_.resize(block.base_payload.size_bytes());
    parameters_.resize(block.parameters.size_bytes() / 4);
    LOOPGAUGE_CUDA_CHECK(cudaMemcpy(payload_.data(), block.base_payload.data(), payload_.size(), cudaMemcpyDeviceToHost));
    LOOPGAUGE_CUDA_CHECK(cudaMemcpy(parameters_.data(), block.parameters.data(), parameters_.size() * 4, cudaMemcpyDeviceToHost));
    return word;
  }
  int k_code(int row, int channel) const { return payload_[static_cast<std::size_t>(row * 32 + channel / 2)] >> (channel % 2 * 4) & 15; }
  int v_code(int row, int channel) const { return payload_[static_cast<std::size_t>(64 * 32 + row * 32 + channel / 2)] >> (channel % 2 * 4) & 15; }
  std::uint32_t k_parameters(int channel) const { return parameters_[static_cast<std::size_t>(channel)]; }

  std::unique_ptr<optimized::DeviceAllocator> allocator_;
  std::unique_ptr<optimized::KvCache> cache_;
  std::vector<std::uint8_t> payload_;
  std::vector<std::uint32_t> parameters_;
};

TEST_F(EdgeGroups, ConstantSubnormalAndZeroGroups) {
  LOOPGAUGE_REQUIRE_DEVICE();
  // Channel by channel: constant 1.5; -0 and +0; a spread whose scale is an FP16 subnormal; a spread whose scale rounds to zero; 0..15.
  const auto value = [](int row, int channel) {
    switch (channel) {
      case 0:
        return 1.5f;
      case 1:
        return row % 2 == 0 ? -0.0f : 0.0f;
      case 2:
        return row == 7 ? 0x1p-18f : 0.0f;
      case 3:
        return row == 7 ? 0x1p-26f : 0.0f;
      case 4:
        return static_cast<float>(row % 16);
      case 5:
        return row == 0 ? -65280.0f : 65280.0f;  // scale 8704
      default:
        return static_cast<float>((row * 31 + channel * 17) % 64) - 20.0f;
    }
  };
  ASSERT_EQ(encode(value), optimized::kNoNumericFault);
  for (int channel = 0; channel < 64; ++channel) {
    std::vector<float> group(64);
    for (int row = 0; row < 64; ++row) group[static_cast<std::size_t>(row)] = value(row, channel);
    std::vector<std::uint8_t> codes(64);
    const auto expected = reference::encode_group(group.data(), 1, 64, codes.data());
    ASSERT_TRUE(expected.valid);
    for (int row = 0; row < 64; ++row)
      EXPECT_EQ(k_code(row, channel), codes[static_cast<std::size_t>(row)]) << "row " << row << " channel " << channel;
    const auto half = [](std::uint32_t bits) {
      const int exponent = static_cast<int>(bits >> 10 & 31), fraction = static_cast<int>(bits & 1023);
      const double magnitude = exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25);
      return static_cast<float>(bits & 0x8000 ? -magnitude : magnitude);
    };
    EXPECT_EQ(half(k_parameters(channel) & 0xFFFF), expected.min16) << "channel " << channel;
    EXPECT_EQ(half(k_parameters(channel) >> 16), expected.scale16) << "channel " << channel;
  }
  EXPECT_EQ(k_parameters(0) >> 16, 0u);
  EXPECT_EQ(k_parameters(1), 0u) << "a zero minimum is +0 (S-KVQ-6)";
  EXPECT_NE(k_parameters(2) >> 16, 0u) << "subnormal scales are kept";
  EXPECT_EQ(k_parameters(3) >> 16, 0u);
}

// Every other value lies in the middle between two codes, or a spacing of BF16 beside it.
TEST_F(EdgeGroups, MiddlesBetweenCodesGoToTheEvenOne) {
  LOOPGAUGE_REQUIRE_DEVICE();
  for (const float scale : {1.0f, 0x1p-20f, 0x1p10f, 0.3f}) {
    const auto value = [scale](int index, int group) {
      const float exact = static_cast<float>(index % 31) * 0.5f * scale;
      return group % 3 == 0 || index == 0 || index == 30 ? exact : exact * (group % 3 == 1 ? 1.00390625f : 0.99609375f);
    };
    const auto truncated = [&value](int index, int group) { return std::bit_cast<float>(std::bit_cast<std::uint32_t>(value(index, group)) & 0xFFFF0000u); };
    for (const bool keys : {true, false}) {
      ASSERT_EQ(encode([&](int row, int channel) { return keys ? value(row, channel) : value(channel, row); }), optimized::kNoNumericFault);
      for (int group = 0; group < 64; ++group) {
        std::vector<float> values(64);
        for (int i = 0; i < 64; ++i) values[static_cast<std::size_t>(i)] = truncated(i, group);
        std::vector<std::uint8_t> codes(64);
        ASSERT_TRUE(reference::encode_group(values.data(), 1, 64, codes.data()).valid);
        for (int i = 0; i < 64; ++i) {
          EXPECT_EQ(keys ? k_code(i, group) : v_code(group, i), codes[static_cast<std::size_t>(i)])
              << (keys ? "K" : "V") << " scale " << scale << " group " << group << " value " << i;
        }
      }
    }
  }
}

TEST_F(EdgeGroups, OverflowAndNonFiniteValuesAreReported) {
  LOOPGAUGE_REQUIRE_DEVICE();
  struct Bad {
    float value;
    const char* what;
  };
  for (const Bad& bad :
       {Bad{std::numeric_limits<float>::quiet_NaN(), "NaN"}, Bad{std::numeric_limits<float>::infinity(), "inf"},
        Bad{-70000.0f, "minimum beyond FP16"}, Bad{0x1p100f, "scale beyond FP16"}, Bad{-0x1.8p127f, "range beyond FP32"}}) {
    const std::uint64_t word = encode([&](int row, int channel) {
      return row == 9 && channel == 33 ? bad.value : row == 10 && channel == 33 ? 1.0f : 0.5f;
    });
    ASSERT_NE(word, optimized::kNoNumericFault) << bad.what;
    const optimized::NumericFault fault = optimized::unpack_numeric_fault(word);
    EXPECT_EQ(fault.kind, optimized::NumericFaultKind::k_group) << bad.what;  // the K group orders before the V group
    EXPECT_EQ(fault.detail, 33) << bad.what;
    EXPECT_EQ(fault.position, 0) << bad.what;
    EXPECT_EQ(fault.loop, 1) << bad.what;
  }
}

TEST(ResidualEncodeDevice, PlantedFaultShows) {
  LOOPGAUGE_REQUIRE_DEVICE();
  History right({.positions = 64, .dense = true}), wrong({.positions = 64, .dense = true});
  right.encode({{0, 64}});
  const optimized::EncodeTask task = wrong.cache().prepare_encode(wrong.request(), {0, 64}, 1, 4);
  wrong.cache().upload();
  DeviceArray<optimized::EncodeTask> tasks(wrong.allocator(), std::vector<optimized::EncodeTask>{task});
  optimized::residual_encode({wrong.cache().view(), tasks.data(), 1, wrong.numeric_fault(), Fault::unreconstructed_predecessor},
                             wrong.stream());
  LOOPGAUGE_CUDA_CHECK(cudaDeviceSynchronize());
  EXPECT_EQ(wrong.device_block(0).streams[0].layers[0].k_codes.data, right.blocks()[0].streams[0].layers[0].k_codes.data);
  EXPECT_NE(wrong.device_block(0).streams[1].layers[0].k_codes.data, right.blocks()[0].streams[1].layers[0].k_codes.data);
}

}  // namespace
}  // namespace loopgauge::equivalence
