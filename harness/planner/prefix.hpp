// SPDX-License-Identifier: Apache-2.0
// prefix: a request publishes its windows as they complete, and one that begins later with the same leading windows takes as many of them
// as are published. Windows that complete together with the prompt are not published: planes end with the flush after the prompt (S-PFX-3),
// and the request itself may end with its first token. Windows are told apart by all tokens up to their end (S-PFX-1). Where at most
// `capacity` windows may be published, the least recently used one that no published window continues is evicted; of equally recent ones
// the deepest, then the newest.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "harness/planner/request_progress.hpp"
#include "models/plan.hpp"

namespace loopgauge::harness {

class PrefixRule {
 public:
  // capacity 0: no limit. `trace` and `config` must outlive the rule. Throws ConfigError for a negative capacity.
  PrefixRule(const Trace& trace, const EffectiveConfig& config, int capacity);

  // Of a request that can run: publishes what has completed since the last call, then evicts down to the capacity.
  void publish(const RequestProgress& progress, std::int64_t clock, std::vector<Action>& actions);
  // Leading windows that the request could begin with.
  int published_windows(const RequestProgress& progress) const;
  // The request begins with `windows` of them.
  void reused(int request, int windows, std::int64_t clock);

 private:
  using Tokens = std::vector<std::int32_t>;  // from position 0 through the window's end
  struct Entry {
    int publisher = 0;
    int window = 0;
    std::int64_t used = 0;
  };

  Tokens tokens(int request, int window) const;
  void evict(std::vector<Action>& actions);

  const Trace& trace_;
  const EffectiveConfig& config_;
  int capacity_;
  std::vector<int> seen_;            // by request: leading windows that were published or reused
  std::map<Tokens, Entry> entries_;  // a window's entry is followed by those that continue it
};

}  // namespace loopgauge::harness
