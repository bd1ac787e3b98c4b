// SPDX-License-Identifier: Apache-2.0
#include "harness/sweep/sampled_products.hpp"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <random>

#include "reference/numeric/profile.hpp"

namespace loopgauge::harness {
namespace {

TEST(SampledProducts, HaveTheBitsOfRowsOneByOne) {
  const int in = 37;
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  for (const int rows : {1, 5, 16, 17, 40}) {
    for (const int out : {1, 8, 21}) {
      reference::Matrix<float> x(rows, in);
      for (int i = 0; i < rows * in; ++i) x.data()[i] = reference::round_to_bfloat16(normal(random));
      std::vector<std::uint16_t> bits(static_cast<std::size_t>(out * in));
      for (std::uint16_t& each : bits) each = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(normal(random)) >> 16);
      const SampledProducts::Weight weight(bits.data(), out, in);
      const auto row = [&](int r) { return std::span<const float>(x.data() + r * in, static_cast<std::size_t>(in)); };
      SampledProducts products;
      for (int r = 0; r < rows; ++r) products.add(row(r), weight, reference::OutputRounding::bf16);
      products.add(row(0), weight, reference::OutputRounding::bf16);  // asked for twice
      products.compute();
      for (int r = 0; r < rows; ++r) {
        reference::Matrix<float> y;
        reference::linear<reference::Declared>(x.row(r), weight, reference::OutputRounding::bf16, y);
        const SampledProducts::Product product = products.of(row(r), weight);
        ASSERT_EQ(product.y, std::vector<float>(y.data(), y.data() + out)) << rows << " rows, row " << r;
        for (int o = 0; o < out; ++o) {
          float sum = 0.0f;
          for (int i = 0; i < in; ++i) sum += std::fabs(x(r, i) * reference::bfloat16_to_float(weight(o, i)));
          ASSERT_EQ(product.magnitude[static_cast<std::size_t>(o)], double{sum}) << rows << " rows, row " << r << " column " << o;
        }
      }
    }
  }
}

}  // namespace
}  // namespace loopgauge::harness
