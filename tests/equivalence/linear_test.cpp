// SPDX-License-Identifier: Apache-2.0
// Matrix products: within the declared bound of the reference, exact where the arithmetic is exact, and with bits that do not depend on
// the number of rows.
#include "models/spec/linear.hpp"

#include <cmath>

#include "optimized/ops/linear.cuh"
#include "optimized/ops/linear_split_k.cuh"
#include "reference/ops/linear.hpp"
#include "tests/equivalence/device_fixture.hpp"

namespace loopgauge::test {
namespace {

using optimized::Bfloat16;
using optimized::LinearImplementation;
using reference::Declared;
using reference::Matrix;
using reference::OutputRounding;

struct Product {
  int in, out;
};
// The projections of ouro-tiny and of Ouro-1.4B, and its head cut to a size the reference can follow.
const Product kTiny[] = {{384, 1152}, {384, 384}, {384, 2048}, {1024, 384}, {384, 264}};
const Product kLarge[] = {{2048, 6144}, {2048, 2048}, {2048, 11264}, {5632, 2048}, {2048, 49152}};
// No multiple of any tile, in either direction.
const Product kPartial[] = {{8, 8}, {40, 24}, {264, 40}, {1000, 72}, {2048, 2072}, {20008, 24}, {60000, 8}};
const LinearImplementation kImplementations[] = {LinearImplementation::library, LinearImplementation::tensor_core_tiles, LinearImplementation::split_k};

class LinearTest : public DeviceTest {
 protected:
  Bits multiply(LinearImplementation implementation, const Bits& x, const optimized::DeviceBuffer& weight, int rows, int in, int out) {
    const auto device_x = upload(x);
    auto y = poisoned<std::uint16_t>(static_cast<std::size_t>(rows) * out);
    optimized::linear(*library_, implementation, device_x.as<Bfloat16>(), in, weight.as<Bfloat16>(), y.as<Bfloat16>(), rows, in, out, *stream_);
    return download<std::uint16_t>(y, static_cast<std::size_t>(rows) * out);
  }
  std::vector<float> multiply_to_float(LinearImplementation implementation, const Bits& x, const optimized::DeviceBuffer& weight, int rows, int in, int out) {
    const auto device_x = upload(x);
    auto y = poisoned<float>(static_cast<std::size_t>(rows) * out);
    optimized::linear(*library_, implementation, device_x.as<Bfloat16>(), in, weight.as<Bfloat16>(), y.as<float>(), rows, in, out, *stream_);
    return download<float>(y, static_cast<std::size_t>(rows) * out);
  }

  void SetUp() override {
    DeviceTest::SetUp();
    if (!IsSkipped()) library_.emplace();
  }

  std::optional<optimized::CublasLt> library_;
};

TEST_F(LinearTest, StaysWithinTheDeclaredBound) {
  const spec::Tolerance& tolerance = spec::kLinear.outputs[0].tolerance;
  std::uint32_t seed = 40;
  for (const auto [in, out] : kTiny) {
    for (const int rows : {1, 5, 33, 150}) {
      const Bits x = random_bits(static_cast<std::size_t>(rows) * in, ++seed), w = random_bits(static_cast<std::size_t>(out) * in, ++seed, 0.05f);
      const Matrix<float> mx = to_matrix(x, rows, in), mw = to_matrix(w, out, in);
      Matrix<float> expected;
      reference::linear<Declared>(mx, to_bit_matrix(w, out, in), OutputRounding::bf16, expected);
      const Matrix<float> magnitude = mx.cwiseAbs() * mw.cwiseAbs().transpose();
      const auto weight = upload(w);
      for (const LinearImplementation implementation : kImplementations) {
        const Matrix<float> actual = to_matrix(multiply(implementation, x, weight, rows, in, out), rows, out);
        double worst = 0.0;
        std::int64_t different = 0;
        for (std::ptrdiff_t i = 0; i < actual.size(); ++i) {
          spec::Element element;
          element.expected = expected.data()[i];
          element.magnitude = magnitude.data()[i];
          element.terms = in;
          worst = std::fmax(worst, spec::error_ratio(tolerance, element, actual.data()[i]));
          different += actual.data()[i] != expected.data()[i];
        }
        EXPECT_LE(worst, 1.0) << to_string(implementation) << ", " << rows << " x " << in << " x " << out;
        EXPECT_LE(static_cast<double>(different), tolerance.differing_share * static_cast<double>(actual.size()) + 1.0)
            << to_string(implementation) << ", " << rows << " x " << in << " x " << out;
      }
    }
  }
}

// Integers whose products and sums are exact in FP32: any order of additions gives the same bits.
TEST_F(LinearTest, IsExactOnSmallIntegers) {
  std::mt19937 generator(3);
  const auto integers = [&](std::size_t count) {
    Bits bits(count);
    for (auto& value : bits) value = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(static_cast<float>(static_cast<int>(generator() % 17) - 8)) >> 16);
    return bits;
  };
  for (const auto [in, out] : kTiny) {
    const int rows = 77;
    const Bits x = integers(static_cast<std::size_t>(rows) * in), w = integers(static_cast<std::size_t>(out) * in);
    Matrix<float> rounded, full;
    reference::linear<Declared>(to_matrix(x, rows, in), to_bit_matrix(w, out, in), OutputRounding::bf16, rounded);
    reference::linear<Declared>(to_matrix(x, rows, in), to_bit_matrix(w, out, in), OutputRounding::fp32, full);
    const auto weight = upload(w);
    for (const LinearImplementation implementation : kImplementations) {
      EXPECT_TRUE(same_bits(to_bits(rounded), multiply(implementation, x, weight, rows, in, out))) << to_string(implementation) << ", " << in << " x " << out;
      EXPECT_TRUE(same_bits(std::vector<float>(full.data(), full.data() + full.size()), multiply_to_float(implementation, x, weight, rows, in, out)))
          << to_string(implementation) << ", " << in << " x " << out;
    }
  }
}

TEST_F(LinearTest, PartialTilesAreExactAndDoNotDependOnTheNumberOfRows) {
  std::uint32_t seed = 90;
  for (const LinearImplementation implementation : {LinearImplementation::tensor_core_tiles, LinearImplementation::split_k}) {
    for (const auto [in, out] : kPartial) {
      constexpr int kRows = 131;
      const Bits x = random_bits(static_cast<std::size_t>(kRows) * in, ++seed), w = random_bits(static_cast<std::size_t>(out) * in, ++seed, 0.05f);
      const auto weight = upload(w);
      const Bits all = multiply(implementation, x, weight, kRows, in, out);
      Matrix<float> expected;
      reference::linear<Declared>(to_matrix(x, kRows, in), to_bit_matrix(w, out, in), OutputRounding::bf16, expected);
      const Matrix<float> magnitude = to_matrix(x, kRows, in).cwiseAbs() * to_matrix(w, out, in).cwiseAbs().transpose();
      const Matrix<float> actual = to_matrix(all, kRows, out);
      for (std::ptrdiff_t i = 0; i < actual.size(); ++i) {
        const spec::Element element{.expected = expected.data()[i], .magnitude = magnitude.data()[i], .terms = static_cast<double>(in)};
        ASSERT_LE(spec::error_ratio(spec::kLinear.outputs[0].tolerance, element, actual.data()[i]), 1.0)
            << to_string(implementation) << ", element " << i << " of " << in << " x " << out;
      }
      for (const int rows : {1, 7, 8, 9, 16, 17, 24, 25, 32, 33, 48, 49, 64, 65, 130}) {
        const Bits part(x.begin(), x.begin() + static_cast<std::ptrdiff_t>(rows) * in);
        EXPECT_TRUE(same_bits(Bits(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(rows) * out), multiply(implementation, part, weight, rows, in, out)))
            << to_string(implementation) << ", " << rows << " rows of " << in << " x " << out;
      }
    }
  }
}

// The first rows of a large product are the rows of the small one, bit for bit.
TEST_F(LinearTest, RowsDoNotDependOnTheirNumber) {
  constexpr int kMostRows = 2048;
  std::uint32_t seed = 60;
  for (const auto& products : {std::span<const Product>(kTiny), std::span<const Product>(kLarge)}) {
    for (const auto [in, out] : products) {
      const bool head = out == 264 || out == 49152;
      const int most = head ? 256 : kMostRows;
      const Bits x = random_bits(static_cast<std::size_t>(most) * in, ++seed);
      const auto weight = upload(random_bits(static_cast<std::size_t>(out) * in, ++seed, 0.05f));
      for (const LinearImplementation implementation : kImplementations) {
        const Bits all = head ? Bits{} : multiply(implementation, x, weight, most, in, out);
        const std::vector<float> all_logits = head ? multiply_to_float(implementation, x, weight, most, in, out) : std::vector<float>{};
        for (const int rows : {1, 2, 7, 8, 9, 16, 17, 24, 31, 40, 48, 63, 64, 65, 103, 205, 256}) {
          const Bits part(x.begin(), x.begin() + static_cast<std::ptrdiff_t>(rows) * in);
          const auto count = static_cast<std::ptrdiff_t>(rows) * out;
          if (head) {
            EXPECT_TRUE(same_bits(std::vector<float>(all_logits.begin(), all_logits.begin() + count), multiply_to_float(implementation, part, weight, rows, in, out)))
                << to_string(implementation) << ", " << rows << " rows, " << in << " x " << out;
          } else {
            EXPECT_TRUE(same_bits(Bits(all.begin(), all.begin() + count), multiply(implementation, part, weight, rows, in, out)))
                << to_string(implementation) << ", " << rows << " rows, " << in << " x " << out;
          }
        }
      }
    }
  }
}

TEST_F(LinearTest, RowsMayLieApart) {
  std::uint32_t seed = 120;
  for (const auto [in, out] : {Product{384, 1152}, Product{264, 40}}) {
    constexpr int kRows = 70;
    const int stride = in + 24;
    const Bits apart = random_bits(static_cast<std::size_t>(kRows) * stride, ++seed);
    Bits x;
    for (int row = 0; row < kRows; ++row) x.insert(x.end(), apart.begin() + row * stride, apart.begin() + row * stride + in);
    const auto device_x = upload(apart), weight = upload(random_bits(static_cast<std::size_t>(out) * in, ++seed, 0.05f));
    for (const LinearImplementation implementation : {LinearImplementation::tensor_core_tiles, LinearImplementation::split_k}) {
      for (const int rows : {1, 8, 9, 17, 33, 64, 65, 70}) {
        auto y = poisoned<std::uint16_t>(static_cast<std::size_t>(rows) * out);
        optimized::linear(*library_, implementation, device_x.as<Bfloat16>(), stride, weight.as<Bfloat16>(), y.as<Bfloat16>(), rows, in, out, *stream_);
        const Bits side_by_side(x.begin(), x.begin() + static_cast<std::ptrdiff_t>(rows) * in);
        EXPECT_TRUE(same_bits(multiply(implementation, side_by_side, weight, rows, in, out), download<std::uint16_t>(y, static_cast<std::size_t>(rows) * out)))
            << to_string(implementation) << ", " << rows << " rows of " << in << " x " << out;
      }
    }
  }
}

TEST_F(LinearTest, ShapesOutsideTheKernelsAreRefused) {
  const auto buffer = poisoned<std::uint16_t>(1024);
  auto out = poisoned<std::uint16_t>(1024);
  EXPECT_THROW(optimized::linear(*library_, LinearImplementation::automatic, buffer.as<Bfloat16>(), 12, buffer.as<Bfloat16>(), out.as<Bfloat16>(), 1, 12, 8, *stream_),
               UnsupportedError);
  const auto split_k = [&](const Bfloat16* x, int x_stride, int in, int outputs) {
    optimized::linear_split_k(x, x_stride, buffer.as<Bfloat16>(), out.as<Bfloat16>(), 9, in, outputs, *stream_);
  };
  EXPECT_THROW(split_k(buffer.as<Bfloat16>(), 12, 8, 8), UnsupportedError);
  EXPECT_THROW(split_k(buffer.as<Bfloat16>(), 16, 12, 8), UnsupportedError);
  EXPECT_THROW(split_k(buffer.as<Bfloat16>(), 8, 8, 6), UnsupportedError);
  EXPECT_THROW(split_k(buffer.as<Bfloat16>() + 4, 8, 8, 8), UnsupportedError);
}

}  // namespace
}  // namespace loopgauge::test
