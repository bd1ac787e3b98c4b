// SPDX-License-Identifier: Apache-2.0
#include "reference/ops/swiglu.hpp"

namespace loopgauge::reference {
namespace {

template <class P>
void swiglu_elements(const typename P::Real* gate, const typename P::Real* up, std::ptrdiff_t count, typename P::Real* y);
#define LOOPGAUGE_INSTANTIATE(P)                                                                                                        \
  template <>                                                                                                                           \
  LOOPGAUGE_MULTIVERSION void swiglu_elements<P>(const P::Real* gate, const P::Real* up, std::ptrdiff_t count, P::Real* y) {            \
    for (std::ptrdiff_t i = 0; i < count; ++i) y[i] = P::round_bf16(P::round_bf16(P::silu(gate[i])) * up[i]);                           \
  }
LOOPGAUGE_FOR_EACH_PROFILE(LOOPGAUGE_INSTANTIATE)
#undef LOOPGAUGE_INSTANTIATE

}  // namespace

template <class P>
void swiglu(const Matrix<typename P::Real>& gate, const Matrix<typename P::Real>& up, Matrix<typename P::Real>& y) {
  y.resize(gate.rows(), gate.cols());
  const std::ptrdiff_t columns = gate.cols();
#pragma omp parallel for schedule(static) if (static_cast<double>(gate.size()) * 16 > kMinParallelWork)
  for (std::ptrdiff_t t = 0; t < gate.rows(); ++t) {
    swiglu_elements<P>(gate.data() + t * columns, up.data() + t * columns, columns, y.data() + t * columns);
  }
}

#define LOOPGAUGE_INSTANTIATE(P) template void swiglu<P>(const Matrix<P::Real>&, const Matrix<P::Real>&, Matrix<P::Real>&);
LOOPGAUGE_FOR_EACH_PROFILE(LOOPGAUGE_INSTANTIATE)

}  // namespace loopgauge::reference
