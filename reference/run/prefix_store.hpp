// SPDX-License-Identifier: Apache-2.0
// Published prompt windows by identity (S-PFX-1..5). Whoever holds a window keeps it when its store has let go of it.
#pragma once

#include <array>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "models/run_record.hpp"

namespace loopgauge::reference {

// Planes, or under `streaming` the sealed block and its reconstruction; and what a cold run would have observed while it computed them.
template <class Real>
struct PublishedWindow {
  PositionRange positions;
  std::vector<Real> kv;                      // KvPlanes::rows of the form that is published
  std::vector<std::uint8_t> executed_loops;  // [positions]
  std::optional<CodecBlock> block;
  std::array<std::vector<float>, kLoops> hidden;    // [positions, hidden] where the run records hidden rows
  std::vector<float> gate;                          // [positions, 4] where the run records gates
  std::array<std::vector<float>, 2> scores;         // loops 3, 4: [positions]
  std::array<std::vector<std::int32_t>, 2> active;  // loops 3, 4
};

template <class Real>
using HeldWindow = std::shared_ptr<const PublishedWindow<Real>>;

template <class Real>
class PrefixStore {
 public:
  bool contains(const std::string& identity) const { return windows_.contains(identity); }
  void publish(const std::string& identity, PublishedWindow<Real> window) {
    windows_.emplace(identity, std::make_shared<const PublishedWindow<Real>>(std::move(window)));
  }
  // Null when nothing of this identity is published.
  HeldWindow<Real> hold(const std::string& identity) const {
    const auto found = windows_.find(identity);
    return found == windows_.end() ? nullptr : found->second;
  }
  // True when there was one.
  bool evict(const std::string& identity) { return windows_.erase(identity) > 0; }
  void clear() { windows_.clear(); }

 private:
  std::map<std::string, std::shared_ptr<const PublishedWindow<Real>>> windows_;
};

}  // namespace loopgauge::reference
