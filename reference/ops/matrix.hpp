// SPDX-License-Identifier: Apache-2.0
// Storage of the reference: row-major Eigen matrices. Eigen holds and maps elements here and never adds them up: its reductions and
// products choose an order of additions by instruction set.
#pragma once

#include <Eigen/Core>
#include <cstdint>

namespace loopgauge::reference {

template <class Real>
using Matrix = Eigen::Matrix<Real, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

// A matrix of somebody else's BF16 bit patterns, such as a checkpoint's: weights are read where they lie.
using WeightView = Eigen::Map<const Matrix<std::uint16_t>>;
using WeightArgument = Eigen::Ref<const Matrix<std::uint16_t>>;

template <class Real>
using Vector = Eigen::Matrix<Real, Eigen::Dynamic, 1>;

// Multiply-adds below which an operation stays on one thread: a team costs a few microseconds, and far more on a busy machine. Threads
// share independent outputs only, so their number never changes a bit.
inline constexpr double kMinParallelWork = 2.5e5;

}  // namespace loopgauge::reference
