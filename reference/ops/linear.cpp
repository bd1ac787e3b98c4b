// SPDX-License-Identifier: Apache-2.0
#include "reference/ops/linear.hpp"

#include <algorithm>
#include <vector>

namespace loopgauge::reference {
namespace {

// R x O independent dots side by side: rows of x against rows of w. Each dot follows the declared order on its own; the tile only shares
// loads. y is [R, ...] with the given stride.
template <class P, int R, int O>
LOOPGAUGE_INLINE void dot_tile(const typename P::Real* x, const typename P::Real* w, int in, typename P::Real* y, int y_stride,
                               OutputRounding rounding) {
  using Real = typename P::Real;
  using L = Lanes<Real, P::kLanes>;
  L sums[R][O];
  int i = 0;
  for (; i + P::kLanes <= in; i += P::kLanes) {
    for (int r = 0; r < R; ++r) {
      const auto xv = L::load(x + r * in + i);
      for (int o = 0; o < O; ++o) sums[r][o].value += xv * L::load(w + o * in + i);
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int o = 0; o < O; ++o) {
      const Real* xr = x + r * in + i;
      const Real* wo = w + o * in + i;
      const Real value = sums[r][o].reduce(in - i, [&](int j) LOOPGAUGE_INLINE_LAMBDA { return xr[j] * wo[j]; });
      y[r * y_stride + o] = rounding == OutputRounding::bf16 ? P::round_bf16(value) : value;
    }
  }
}

// O output columns for all rows. The weight rows are widened once, into `wide` [O, in].
template <class P, int O>
LOOPGAUGE_INLINE void columns(const typename P::Real* x, const std::uint16_t* w, int rows, int in, int out, typename P::Real* wide,
                              typename P::Real* y, OutputRounding rounding) {
  for (int i = 0; i < O * in; ++i) wide[i] = bfloat16_to_float(w[i]);
  int r = 0;
  for (; r + 4 <= rows; r += 4) dot_tile<P, 4, O>(x + r * in, wide, in, y + r * out, out, rounding);
  for (; r < rows; ++r) dot_tile<P, 1, O>(x + r * in, wide, in, y + r * out, out, rounding);
}

constexpr int kColumnBlock = 16;

// All rows of output columns [begin, min(begin + kColumnBlock, out)).
template <class P>
void column_block(const typename P::Real* x, const std::uint16_t* weight, int rows, int in, int out, int begin, typename P::Real* wide,
                  typename P::Real* y, OutputRounding rounding);
#define LOOPGAUGE_INSTANTIATE(P)                                                                                                        \
  template <>                                                                                                                           \
  LOOPGAUGE_MULTIVERSION void column_block<P>(const P::Real* x, const std::uint16_t* weight, int rows, int in, int out, int begin,      \
                                              P::Real* wide, P::Real* y, OutputRounding rounding) {                                     \
    const int end = std::min(begin + kColumnBlock, out);                                                                                \
    int o = begin;                                                                                                                      \
    if (rows < 4) { /* few rows: more columns side by side keep the adders busy */                                                      \
      for (; o + 8 <= end; o += 8) columns<P, 8>(x, weight + std::ptrdiff_t{o} * in, rows, in, out, wide, y + o, rounding);             \
    }                                                                                                                                   \
    for (; o + 2 <= end; o += 2) columns<P, 2>(x, weight + std::ptrdiff_t{o} * in, rows, in, out, wide, y + o, rounding);               \
    for (; o < end; ++o) columns<P, 1>(x, weight + std::ptrdiff_t{o} * in, rows, in, out, wide, y + o, rounding);                       \
  }
LOOPGAUGE_FOR_EACH_PROFILE(LOOPGAUGE_INSTANTIATE)
#undef LOOPGAUGE_INSTANTIATE

}  // namespace

template <class P>
void linear(const Matrix<typename P::Real>& x, const Matrix<std::uint16_t>& weight, OutputRounding rounding, Matrix<typename P::Real>& y) {
  const int rows = static_cast<int>(x.rows()), in = static_cast<int>(x.cols()), out = static_cast<int>(weight.rows());
  y.resize(rows, out);
  const bool worth_threads = static_cast<double>(rows) * in * out > kMinParallelWork;
#pragma omp parallel if (worth_threads)
  {
    std::vector<typename P::Real> wide(static_cast<std::size_t>(8 * in));
#pragma omp for schedule(static)
    for (int begin = 0; begin < out; begin += kColumnBlock) {
      column_block<P>(x.data(), weight.data(), rows, in, out, begin, wide.data(), y.data(), rounding);
    }
  }
}

#define LOOPGAUGE_INSTANTIATE(P) template void linear<P>(const Matrix<P::Real>&, const Matrix<std::uint16_t>&, OutputRounding, Matrix<P::Real>&);
LOOPGAUGE_FOR_EACH_PROFILE(LOOPGAUGE_INSTANTIATE)

}  // namespace loopgauge::reference
