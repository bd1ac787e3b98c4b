// SPDX-License-Identifier: Apache-2.0
#include "reference/ops/rms_norm.hpp"

namespace loopgauge::reference {

template <class P>
void rms_norm(const Matrix<typename P::Real>& x, const Vector<typename P::Real>& weight, float eps, Matrix<typename P::Real>& y) {
  using Real = typename P::Real;
  const int rows = static_cast<int>(x.rows()), hidden = static_cast<int>(x.cols());
  if (&x != &y) y.resize(rows, hidden);
#pragma omp parallel for schedule(static) if (static_cast<double>(x.size()) * 4 > kMinParallelWork)
  for (int t = 0; t < rows; ++t) {
    const Real* in = x.data() + static_cast<std::ptrdiff_t>(t) * hidden;
    Real* out = y.data() + static_cast<std::ptrdiff_t>(t) * hidden;
    const Real mean_square = dot<P>(in, in, hidden) / static_cast<Real>(hidden);
    const Real inv = Real{1} / std::sqrt(mean_square + static_cast<Real>(eps));
    for (int i = 0; i < hidden; ++i) {
      const Real normalized = P::round_bf16(in[i] * inv);
      out[i] = P::round_bf16(weight[i] * normalized);
    }
  }
}

#define LOOPGAUGE_INSTANTIATE(P) template void rms_norm<P>(const Matrix<P::Real>&, const Vector<P::Real>&, float, Matrix<P::Real>&);
LOOPGAUGE_FOR_EACH_PROFILE(LOOPGAUGE_INSTANTIATE)

}  // namespace loopgauge::reference
