// SPDX-License-Identifier: Apache-2.0
#include "harness/sweep/sampled_products.hpp"

#include <algorithm>
#include <cmath>

#include "reference/numeric/bfloat16.hpp"
#include "reference/numeric/profile.hpp"

namespace loopgauge::harness {

namespace {

using Sums = reference::Lanes<float, 16>;  // a lane a row of x
constexpr std::ptrdiff_t kRows = 16, kColumns = 8;

// magnitude [columns <= kColumns][kRows]: sums of x[i, row] * |weight[column, i]|. x [in, kRows] holds magnitudes.
LOOPGAUGE_MULTIVERSION void add_magnitudes(const float* x, const std::uint16_t* weight, std::ptrdiff_t in, std::ptrdiff_t columns,
                                           float* magnitude) {
  Sums sums[kColumns];
  if (columns == kColumns) {
    for (std::ptrdiff_t i = 0; i < in; ++i) {
      const auto row = Sums::load(x + i * kRows);
      for (std::ptrdiff_t o = 0; o < kColumns; ++o) sums[o].value += row * std::fabs(reference::bfloat16_to_float(weight[o * in + i]));
    }
  } else {
    for (std::ptrdiff_t o = 0; o < columns; ++o) {
      for (std::ptrdiff_t i = 0; i < in; ++i)
        sums[o].value += Sums::load(x + i * kRows) * std::fabs(reference::bfloat16_to_float(weight[o * in + i]));
    }
  }
  for (std::ptrdiff_t o = 0; o < columns; ++o) {
    for (std::ptrdiff_t row = 0; row < kRows; ++row) magnitude[o * kRows + row] = sums[o].value[row];
  }
}

// Of rows [first, first + kRows) of x, as far as there are.
void magnitudes(const reference::Matrix<float>& x, const SampledProducts::Weight& weight, std::ptrdiff_t first,
                reference::Matrix<float>& magnitude) {
  const std::ptrdiff_t rows = std::min(kRows, x.rows() - first), in = weight.cols(), out = weight.rows();
  reference::Vector<float> across = reference::Vector<float>::Zero(in * kRows);
  for (std::ptrdiff_t row = 0; row < rows; ++row) {
    for (std::ptrdiff_t i = 0; i < in; ++i) across[i * kRows + row] = std::fabs(x(first + row, i));
  }
#pragma omp parallel for schedule(static) if (static_cast <double>(weight.size()) > reference::kMinParallelWork)
  for (std::ptrdiff_t begin = 0; begin < out; begin += kColumns) {
    const std::ptrdiff_t columns = std::min(kColumns, out - begin);
    float sums[kColumns * kRows];
    add_magnitudes(across.data(), weight.data() + begin * in, in, columns, sums);
    for (std::ptrdiff_t row = 0; row < rows; ++row) {
      for (std::ptrdiff_t o = 0; o < columns; ++o) magnitude(first + row, begin + o) = sums[o * kRows + row];
    }
  }
}

}  // namespace

void SampledProducts::add(std::span<const float> x, const Weight& weight, reference::OutputRounding rounding) {
  Rows& rows = weights_.try_emplace(&weight, Rows{rounding, {}, {}, {}}).first->second;
  if (rows_.try_emplace({x.data(), &weight}, std::ssize(rows.x)).second) rows.x.push_back(x.data());
}

void SampledProducts::compute() {
  for (auto& [weight, rows] : weights_) {
    reference::Matrix<float> x(std::ssize(rows.x), weight->cols());
    for (std::ptrdiff_t row = 0; row < x.rows(); ++row) std::copy_n(rows.x[static_cast<std::size_t>(row)], x.cols(), x.row(row).data());
    reference::linear<reference::Declared>(x, *weight, rows.rounding, rows.y);
    rows.magnitude.resize(x.rows(), weight->rows());
    for (std::ptrdiff_t first = 0; first < x.rows(); first += kRows) magnitudes(x, *weight, first, rows.magnitude);
  }
}

SampledProducts::Product SampledProducts::of(std::span<const float> x, const Weight& weight) const {
  const Rows& rows = weights_.at(&weight);
  const std::ptrdiff_t row = rows_.at({x.data(), &weight}), out = weight.rows();
  const float *const y = rows.y.data() + row * out, *const magnitude = rows.magnitude.data() + row * out;
  return {std::vector<float>(y, y + out), std::vector<double>(magnitude, magnitude + out)};
}

}  // namespace loopgauge::harness
