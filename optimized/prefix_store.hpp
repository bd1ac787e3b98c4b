// SPDX-License-Identifier: Apache-2.0
// Published prompt windows (S-PFX): found by identity, held for the requests to come, dropped when memory is needed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>

#include "optimized/kv/kv_cache.hpp"

namespace loopgauge::optimized {

struct PublishedWindow {
  KvExtent kv;
  int publisher = -1;  // index of the request whose record holds what the window's rows were: hidden, gate, scores, active sets
  std::uint64_t last_used = 0;
};

class PrefixStore {
 public:
  // False when the identity is published already: it counts as used, and stays as it is.
  bool publish(const std::string& identity, KvExtent kv, int publisher);
  // Null when it is not published. What is found counts as used now. Valid until the next call.
  const PublishedWindow* find(const std::string& identity);
  // False when it is not published.
  bool evict(const std::string& identity);

  // Drops windows that no request holds, those used longest ago first, until they made up `bytes` of device memory; returns how many. When
  // all of them would not make that much none is dropped, since it would be in vain.
  int make_room(std::size_t bytes);
  std::size_t droppable_bytes() const;

  std::size_t size() const { return windows_.size(); }
  void clear() { windows_.clear(); }

 private:
  std::map<std::string, PublishedWindow> windows_;
  std::uint64_t uses_ = 0;
};

}  // namespace loopgauge::optimized
