// SPDX-License-Identifier: Apache-2.0
#include "optimized/prefix_store.hpp"

#include <algorithm>
#include <utility>

namespace loopgauge::optimized {

bool PrefixStore::publish(const std::string& identity, KvExtent kv, int publisher) {
  const auto [entry, added] = windows_.try_emplace(identity);
  if (added) {
    entry->second.kv = std::move(kv);
    entry->second.publisher = publisher;
  }
  entry->second.last_used = ++uses_;
  return added;
}

const PublishedWindow* PrefixStore::find(const std::string& identity) {
  const auto entry = windows_.find(identity);
  if (entry == windows_.end()) return nullptr;
  entry->second.last_used = ++uses_;
  return &entry->second;
}

bool PrefixStore::evict(const std::string& identity) { return windows_.erase(identity) != 0; }

std::size_t PrefixStore::droppable_bytes() const {
  std::size_t bytes = 0;
  for (const auto& [identity, window] : windows_) bytes += window.kv.shared() ? 0 : window.kv.size_bytes();
  return bytes;
}

int PrefixStore::make_room(std::size_t bytes) {
  if (droppable_bytes() < bytes) return 0;
  int dropped = 0;
  for (std::size_t made = 0; made < bytes; ++dropped) {
    auto oldest = windows_.end();
    for (auto entry = windows_.begin(); entry != windows_.end(); ++entry) {
      if (!entry->second.kv.shared() && (oldest == windows_.end() || entry->second.last_used < oldest->second.last_used)) oldest = entry;
    }
    made += oldest->second.kv.size_bytes();
    windows_.erase(oldest);
  }
  return dropped;
}

}  // namespace loopgauge::optimized
