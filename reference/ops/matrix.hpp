// SPDX-License-Identifier: Apache-2.0
// Storage of the reference: row-major Eigen matrices. Eigen holds and maps elements here and never adds them up: its reductions and
// products choose an order of additions by instruction set.
#pragma once

#include <Eigen/Core>

namespace loopgauge::reference {

template <class Real>
using Matrix = Eigen::Matrix<Real, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

template <class Real>
using Vector = Eigen::Matrix<Real, Eigen::Dynamic, 1>;

// Multiply-adds below which an operation stays on one thread: a team costs a few microseconds, and far more on a busy machine. Threads
// share independent outputs only, so their number never changes a bit.
inline constexpr double kMinParallelWork = 2.5e5;

}  // namespace loopgauge::reference
