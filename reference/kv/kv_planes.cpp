// SPDX-License-Identifier: Apache-2.0
#include "reference/kv/kv_planes.hpp"

#include <algorithm>
#include <limits>

#include "models/error.hpp"

namespace loopgauge::reference {

template <class Real>
KvPlanes<Real>::KvPlanes(const ModelConfig& model, int positions, bool with_reconstruction)
    : loops_(model.loops), heads_(model.heads), head_dim_(model.head_dim), positions_(positions), planes_(static_cast<std::size_t>(model.layers)) {
  const std::size_t count = static_cast<std::size_t>(heads_) * static_cast<std::size_t>(positions_) * static_cast<std::size_t>(head_dim_);
  for (auto& loops : planes_) {
    for (int loop = 1; loop <= model.loops; ++loop) {
      for (Plane& plane : loops[static_cast<std::size_t>(loop - 1)]) {
        plane.exact.assign(count, std::numeric_limits<Real>::quiet_NaN());
        if (with_reconstruction) plane.reconstructed.assign(count, std::numeric_limits<Real>::quiet_NaN());
      }
    }
  }
}

template <class Real>
PlaneView<Real> KvPlanes<Real>::view(KvTensor tensor, int layer, int loop, int head, int frontier) {
  Plane& p = plane(tensor, layer, loop);
  return {at(p.exact, head, 0), p.reconstructed.empty() ? nullptr : at(p.reconstructed, head, 0), frontier, head_dim_};
}

template <class Real>
void KvPlanes<Real>::write_row(KvTensor tensor, int layer, int loop, int position, const Real* row) {
  for (int head = 0; head < heads_; ++head) {
    std::copy(row + head * head_dim_, row + (head + 1) * head_dim_, exact(tensor, layer, loop, head, position));
  }
}

template <class Real>
void KvPlanes<Real>::inherit_row(int loop, int position) {
  for (int layer = 0; layer < static_cast<int>(planes_.size()); ++layer) {
    for (const KvTensor tensor : {KvTensor::key, KvTensor::value}) {
      for (int head = 0; head < heads_; ++head) {
        const Real* from = exact(tensor, layer, loop - 1, head, position);
        std::copy(from, from + head_dim_, exact(tensor, layer, loop, head, position));
      }
    }
  }
}

template <class Real>
template <class Visit>
void KvPlanes<Real>::for_each_head(KvForm form, PositionRange range, int first_loop, Visit visit) {
  for (auto& loops : planes_) {
    for (int loop = first_loop; loop <= loops_; ++loop) {
      for (Plane& plane : loops[static_cast<std::size_t>(loop - 1)]) {
        std::vector<Real>& values = form == KvForm::exact ? plane.exact : plane.reconstructed;
        if (values.empty()) continue;
        for (int head = 0; head < heads_; ++head) visit(at(values, head, range.begin), static_cast<std::ptrdiff_t>(range.size()) * head_dim_);
      }
    }
  }
}

template <class Real>
std::vector<Real> KvPlanes<Real>::rows(KvForm form, PositionRange range) {
  std::vector<Real> result;
  for_each_head(form, range, 1, [&](const Real* from, std::ptrdiff_t count) { result.insert(result.end(), from, from + count); });
  return result;
}

template <class Real>
void KvPlanes<Real>::set_rows(KvForm form, PositionRange range, std::span<const Real> values) {
  std::size_t used = 0;
  for_each_head(form, range, 1, [&](Real* to, std::ptrdiff_t count) {
    if (values.size() - used < static_cast<std::size_t>(count)) throw InternalError("K/V rows of another shape");
    std::copy_n(values.data() + used, count, to);
    used += static_cast<std::size_t>(count);
  });
  if (used != values.size()) throw InternalError("K/V rows of another shape");
}

template <class Real>
void KvPlanes<Real>::poison(PositionRange range, int first_loop) {
  for (const KvForm form : {KvForm::exact, KvForm::reconstructed}) {
    for_each_head(form, range, first_loop,
                  [](Real* values, std::ptrdiff_t count) { std::fill_n(values, count, std::numeric_limits<Real>::quiet_NaN()); });
  }
}

template class KvPlanes<float>;
template class KvPlanes<double>;

}  // namespace loopgauge::reference
