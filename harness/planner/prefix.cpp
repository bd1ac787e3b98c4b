// SPDX-License-Identifier: Apache-2.0
#include "harness/planner/prefix.hpp"

#include <algorithm>
#include <string>
#include <tuple>

#include "models/error.hpp"

namespace loopgauge::harness {

PrefixRule::PrefixRule(const Trace& trace, const EffectiveConfig& config, int capacity)
    : trace_(trace), config_(config), capacity_(capacity), seen_(trace.requests.size(), 0) {
  if (capacity < 0) throw ConfigError(std::to_string(capacity) + " published windows are negative; 0 means no limit");
}

PrefixRule::Tokens PrefixRule::tokens(int request, int window) const {
  const auto& prompt = trace_.requests[static_cast<std::size_t>(request)].prompt;
  return {prompt.begin(), prompt.begin() + static_cast<std::ptrdiff_t>(window + 1) * config_.window()};
}

void PrefixRule::publish(const RequestProgress& progress, std::int64_t clock, std::vector<Action>& actions) {
  const int request = progress.index();
  const int windows = std::min(progress.completed_windows(), progress.sharable_windows());
  int& seen = seen_[static_cast<std::size_t>(request)];
  if (windows <= seen) return;
  if (progress.prompt_complete()) return;
  bool news = false;
  for (int w = seen; w < windows; ++w) news |= !entries_.contains(tokens(request, w));
  seen = windows;
  if (!news) return;
  actions.push_back({ActionKind::publish, request, windows});
  for (int w = 0; w < windows; ++w) {
    const auto [entry, is_new] = entries_.try_emplace(tokens(request, w), Entry{request, w, clock});
    entry->second.used = clock;
  }
  evict(actions);
}

void PrefixRule::evict(std::vector<Action>& actions) {
  while (capacity_ > 0 && static_cast<int>(entries_.size()) > capacity_) {
    auto victim = entries_.end();
    const auto before = [](const Entry& a, const Entry& b) {
      return std::tuple(a.used, -a.window, -a.publisher) < std::tuple(b.used, -b.window, -b.publisher);
    };
    for (auto entry = entries_.begin(); entry != entries_.end(); ++entry) {
      const auto following = std::next(entry);
      const bool continued = following != entries_.end() && following->first.size() > entry->first.size() &&
                             std::equal(entry->first.begin(), entry->first.end(), following->first.begin());
      if (!continued && (victim == entries_.end() || before(entry->second, victim->second))) victim = entry;
    }
    actions.push_back({ActionKind::evict, victim->second.publisher, victim->second.window});
    entries_.erase(victim);
  }
}

int PrefixRule::published_windows(const RequestProgress& progress) const {
  int windows = 0;
  while (windows < progress.sharable_windows() && entries_.contains(tokens(progress.index(), windows))) ++windows;
  return windows;
}

void PrefixRule::reused(int request, int windows, std::int64_t clock) {
  seen_[static_cast<std::size_t>(request)] = windows;
  for (int w = 0; w < windows; ++w) entries_.at(tokens(request, w)).used = clock;
}

}  // namespace loopgauge::harness
