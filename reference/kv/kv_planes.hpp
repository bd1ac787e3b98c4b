// SPDX-License-Identifier: Apache-2.0
// The keys and values of one request: one plane per (layer, loop), each with its exact values and, under Q, its reconstruction.
// Both are kept, and a reader says up to which frontier it sees the reconstruction: what a query reads is then a function of the query,
// not of when other work ran. The optimized runtime keeps one representation only; this file is the definition, not the storage format.
#pragma once

#include <array>
#include <cstddef>
#include <span>
#include <vector>

#include "models/algorithm_config.hpp"
#include "models/model_config.hpp"
#include "reference/ops/attention.hpp"

namespace loopgauge::reference {

enum class KvTensor { key, value };
enum class KvForm { exact, reconstructed };

template <class Real>
class KvPlanes {
 public:
  // Room for `positions` tokens. Rows are NaN until written, so that a read of an unwritten row cannot go unnoticed.
  KvPlanes(const ModelConfig& model, int positions, bool with_reconstruction);

  // [head_dim] row of one head.
  Real* exact(KvTensor tensor, int layer, int loop, int head, int position) { return at(plane(tensor, layer, loop).exact, head, position); }
  Real* reconstructed(KvTensor tensor, int layer, int loop, int head, int position) {
    return at(plane(tensor, layer, loop).reconstructed, head, position);
  }

  PlaneView<Real> view(KvTensor tensor, int layer, int loop, int head, int frontier);

  // Rows of all heads side by side, [heads * head_dim], as the projections produce them.
  void write_row(KvTensor tensor, int layer, int loop, int position, const Real* row);
  // The plane of `loop` takes the exact value of the previous loop's plane at this position, K and V, in every layer.
  void inherit_row(int loop, int position);

  // Every plane's rows of `range` in one form, for snapshots and published windows: [layers, loops, K then V, heads, range, head_dim].
  // The reconstructed form of planes without reconstruction is empty.
  std::vector<Real> rows(KvForm form, PositionRange range);
  void set_rows(KvForm form, PositionRange range, std::span<const Real> values);
  // Rows of `range` in the planes from `first_loop` on become NaN, in both forms: whoever reads them is found out.
  void poison(PositionRange range, int first_loop);

 private:
  struct Plane {
    std::vector<Real> exact, reconstructed;  // [heads, positions, head_dim]
  };
  Plane& plane(KvTensor tensor, int layer, int loop) {
    return planes_[static_cast<std::size_t>(layer)][static_cast<std::size_t>(loop - 1)][tensor == KvTensor::key ? 0 : 1];
  }
  // Calls visit(pointer to the first value, count of values) for every plane and head, in the order of rows().
  template <class Visit>
  void for_each_head(KvForm form, PositionRange range, int first_loop, Visit visit);

  Real* at(std::vector<Real>& values, int head, int position) {
    return values.data() + (static_cast<std::ptrdiff_t>(head) * positions_ + position) * head_dim_;
  }

  int loops_, heads_, head_dim_, positions_;
  std::vector<std::array<std::array<Plane, 2>, 4>> planes_;  // [layer][loop - 1][key, value]
};

}  // namespace loopgauge::reference
