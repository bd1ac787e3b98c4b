// SPDX-License-Identifier: Apache-2.0
// What the reference's linear makes of sampled rows, and the sums of magnitudes that bound its error: all rows of a weight together, so that
// a weight is read twice, not twice a row.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <utility>
#include <vector>

#include "reference/ops/linear.hpp"
#include "reference/ops/matrix.hpp"

namespace loopgauge::harness {

class SampledProducts {
 public:
  using Weight = reference::WeightView;  // [out, in] BF16 bit patterns

  // Asks for x [in] times `weight`. Both must stay where they are.
  void add(std::span<const float> x, const Weight& weight, reference::OutputRounding rounding);
  // Computes everything that was asked for.
  void compute();

  struct Product {
    std::vector<float> y;           // [out], the declared profile
    std::vector<double> magnitude;  // [out] sum over i of |x[i]| |weight[o, i]|, added in FP32, ascending
  };
  // Of a pair that add() and compute() saw.
  Product of(std::span<const float> x, const Weight& weight) const;

 private:
  struct Rows {
    reference::OutputRounding rounding;
    std::vector<const float*> x;
    reference::Matrix<float> y, magnitude;  // [rows, out]
  };
  std::map<const Weight*, Rows> weights_;
  std::map<std::pair<const float*, const Weight*>, std::ptrdiff_t> rows_;  // row of y and magnitude
};

}  // namespace loopgauge::harness
