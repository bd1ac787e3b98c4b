// SPDX-License-Identifier: Apache-2.0
#include "reference/ops/linear.hpp"

#include <algorithm>
#include <cstring>

namespace loopgauge::reference {
namespace {

// A lane sum lies in vectors of at most 64 bytes: longer ones are kept in memory, not in registers.
template <class P>
inline constexpr int kPartLanes = std::min<int>(P::kLanes, 64 / sizeof(typename P::Real));
template <class P>
inline constexpr int kParts = P::kLanes / kPartLanes<P>;

// A part of a row of weights: widened before, or BF16 as they are stored. Widening is exact, so it does not matter when it is done.
template <class P>
LOOPGAUGE_INLINE auto load_weights(const typename P::Real* w) {
  return Lanes<typename P::Real, kPartLanes<P>>::load(w);
}
template <class P>
LOOPGAUGE_INLINE auto load_weights(const std::uint16_t* w) {
  constexpr int kCount = kPartLanes<P>;
  const auto bits = __builtin_convertvector(Lanes<std::uint16_t, kCount>::load(w), typename Lanes<std::uint32_t, kCount>::Vector) << 16;
  Lanes<float, kCount> single;
  std::memcpy(&single.value, &bits, sizeof bits);
  return __builtin_convertvector(single.value, typename Lanes<typename P::Real, kCount>::Vector);
}
template <class Real>
LOOPGAUGE_INLINE Real widened(Real w) {
  return w;
}
LOOPGAUGE_INLINE float widened(std::uint16_t w) { return bfloat16_to_float(w); }

// R x O independent dots side by side: rows of x against rows of w. Each dot follows the declared order on its own; the tile only shares
// loads. y is [R, ...] with the given stride.
template <class P, int R, int O, class Weight>
LOOPGAUGE_INLINE void dot_tile(const typename P::Real* x, const Weight* w, int in, typename P::Real* y, int y_stride,
                               OutputRounding rounding) {
  using Real = typename P::Real;
  using Part = Lanes<Real, kPartLanes<P>>;
  Part parts[R][O][kParts<P>];
  int i = 0;
  for (; i + P::kLanes <= in; i += P::kLanes) {
    for (int part = 0; part < kParts<P>; ++part) {
      const int at = i + part * kPartLanes<P>;
      for (int r = 0; r < R; ++r) {
        const auto xv = Part::load(x + r * in + at);
        for (int o = 0; o < O; ++o) parts[r][o][part].value += xv * load_weights<P>(w + o * in + at);
      }
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int o = 0; o < O; ++o) {
      const Real* xr = x + r * in + i;
      const Weight* wo = w + o * in + i;
      Lanes<Real, P::kLanes> sum;
      std::memcpy(&sum.value, parts[r][o], sizeof sum.value);
      const Real value = sum.reduce(in - i, [&](int j) LOOPGAUGE_INLINE_LAMBDA { return xr[j] * widened(wo[j]); });
      y[r * y_stride + o] = rounding == OutputRounding::bf16 ? P::round_bf16(value) : value;
    }
  }
}

// R rows of x against `columns` rows of w, O of these at a time. y is [R, ...] with the given stride.
template <class P, int R, int O, class Weight>
LOOPGAUGE_INLINE void row_tile(const typename P::Real* x, const Weight* w, int columns, int in, typename P::Real* y, int y_stride,
                               OutputRounding rounding) {
  int o = 0;
  for (; o + O <= columns; o += O) dot_tile<P, R, O>(x, w + o * in, in, y + o, y_stride, rounding);
  for (; o < columns; ++o) dot_tile<P, R, 1>(x, w + o * in, in, y + o, y_stride, rounding);
}

// 4 x 6 dots of one vector each, or 4 x 3 of two: 24 of 32 registers are sums. A row by itself takes 8 columns, so that the adders are busy,
// and weights as they are stored.
constexpr int kTileRows = 4;
template <class P>
inline constexpr int kTileColumns = 6 / kParts<P>;
// Widened once for all rows; they stay in the second-level cache while x goes past, once per block.
constexpr int kColumnBlock = 24;

// All rows of output columns [begin, min(begin + kColumnBlock, out)). wide [kColumnBlock, in] is working space for more than one row.
template <class P>
void column_block(const typename P::Real* x, const std::uint16_t* weight, int rows, int in, int out, int begin, typename P::Real* wide,
                  typename P::Real* y, OutputRounding rounding);
#define LOOPGAUGE_INSTANTIATE(P)                                                                                                        \
  template <>                                                                                                                           \
  LOOPGAUGE_MULTIVERSION void column_block<P>(const P::Real* x, const std::uint16_t* weight, int rows, int in, int out, int begin,      \
                                              P::Real* wide, P::Real* y, OutputRounding rounding) {                                     \
    const int columns = std::min(kColumnBlock, out - begin);                                                                            \
    const std::uint16_t* narrow = weight + std::ptrdiff_t{begin} * in;                                                                  \
    if (rows == 1) return row_tile<P, 1, 8>(x, narrow, columns, in, y + begin, out, rounding);                                          \
    for (int i = 0; i < columns * in; ++i) wide[i] = bfloat16_to_float(narrow[i]);                                                      \
    int r = 0;                                                                                                                          \
    for (; r + kTileRows <= rows; r += kTileRows)                                                                                       \
      row_tile<P, kTileRows, kTileColumns<P>>(x + std::ptrdiff_t{r} * in, wide, columns, in, y + std::ptrdiff_t{r} * out + begin, out,  \
                                              rounding);                                                                                \
    for (; r < rows; ++r)                                                                                                               \
      row_tile<P, 1, 8>(x + std::ptrdiff_t{r} * in, wide, columns, in, y + std::ptrdiff_t{r} * out + begin, out, rounding);             \
  }
LOOPGAUGE_FOR_EACH_PROFILE(LOOPGAUGE_INSTANTIATE)
#undef LOOPGAUGE_INSTANTIATE

}  // namespace

template <class P>
void linear(const Matrix<typename P::Real>& x, const WeightArgument& weight, OutputRounding rounding, Matrix<typename P::Real>& y) {
  const int rows = static_cast<int>(x.rows()), in = static_cast<int>(x.cols()), out = static_cast<int>(weight.rows());
  y.resize(rows, out);
  const bool worth_threads = static_cast<double>(rows) * in * out > kMinParallelWork;
#pragma omp parallel if (worth_threads)
  {
    Vector<typename P::Real> wide(rows == 1 ? 0 : std::ptrdiff_t{kColumnBlock} * in);
#pragma omp for schedule(static)
    for (int begin = 0; begin < out; begin += kColumnBlock) {
      column_block<P>(x.data(), weight.data(), rows, in, out, begin, wide.data(), y.data(), rounding);
    }
  }
}

#define LOOPGAUGE_INSTANTIATE(P) template void linear<P>(const Matrix<P::Real>&, const WeightArgument&, OutputRounding, Matrix<P::Real>&);
LOOPGAUGE_FOR_EACH_PROFILE(LOOPGAUGE_INSTANTIATE)

}  // namespace loopgauge::reference
