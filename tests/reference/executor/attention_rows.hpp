// SPDX-License-Identifier: Apache-2.0
// Recomputes the attention output of tapped rows from recorded K/V, so that what a row reads is checked position by position.
#pragma once

#include "reference/ops/sparse_decode.hpp"
#include "tests/reference/executor/tiny_model.hpp"

namespace loopgauge::test {

inline constexpr int kHeads = 2, kHeadDim = 16;

// K and V of one (layer, loop, head), positions 0..n-1, contiguous.
struct HeadPlane {
  std::vector<float> k, v;
  reference::PlaneView<float> keys() const { return {k.data(), nullptr, 0, kHeadDim}; }
  reference::PlaneView<float> values() const { return {v.data(), nullptr, 0, kHeadDim}; }
};

inline HeadPlane recorded_plane(const RequestRecord& r, int layer, int loop, int head, int n) {
  HeadPlane plane;
  for (int p = 0; p < n; ++p) {
    const auto k = kv_row(r, true, layer, loop, head, p), v = kv_row(r, false, layer, loop, head, p);
    plane.k.insert(plane.k.end(), k.begin(), k.end());
    plane.v.insert(plane.v.end(), v.begin(), v.end());
  }
  return plane;
}

inline const float* query(const Recorder& taps, int position, int loop, int layer, int head) {
  return taps.at("rope.q", position, loop, layer).data() + head * kHeadDim;
}

inline std::vector<float> tapped_output(const Recorder& taps, int position, int loop, int layer, int head) {
  const auto& row = taps.at("attention.output", position, loop, layer);
  return {row.begin() + head * kHeadDim, row.begin() + (head + 1) * kHeadDim};
}

// Dense attention of the tapped query over positions 0..n-1 of `plane`, rounded to BF16.
inline std::vector<float> dense_output(const Recorder& taps, int position, int loop, int layer, int head, const HeadPlane& plane, int n) {
  std::vector<float> p(static_cast<std::size_t>(n)), o(kHeadDim);
  reference::attention_dense<reference::Declared>(query(taps, position, loop, layer, head), plane.keys(), plane.values(), n,
                                                  reference::attention_scale<reference::Declared>(kHeadDim), nullptr, p.data(), o.data());
  for (float& x : o) x = reference::round_to_bfloat16(x);
  return o;
}

}  // namespace loopgauge::test
