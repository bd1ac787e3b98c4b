// SPDX-License-Identifier: Apache-2.0
// Published prompt windows (S-PFX): shared in place, dropped when memory is needed.
#include <algorithm>
#include <span>
#include <string>

#include "models/error.hpp"
#include "models/prefix_identity.hpp"
#include "optimized/cuda_run.hpp"

namespace loopgauge::optimized {

std::string CudaRun::identity_of(const RequestState& s, int window) const {
  const auto tokens = static_cast<std::size_t>(window + 1) * static_cast<std::size_t>(config_.window());
  return prefix_identity(model_sha256_, config_, published_encoding(config_),
                         std::span<const std::int32_t>(s.request->prompt).first(tokens));
}

void CudaRun::publish(RequestState& s, int windows) {
  for (int window = 0; window < windows; ++window) {
    const std::string identity = identity_of(s, window);
    if (prefixes_.find(identity) != nullptr) continue;
    if (s.slot < 0 || window >= s.complete_windows)
      throw InternalError(s.name() + " publishes window " + std::to_string(window) + ", which it does not hold complete");
    KvExtent extent = kv_.share(s.slot, window_range(window, s.prompt_length, config_.window()));
    if (planted(Fault::publish_before_last_loop)) {
      // No row has executed the last loop yet.
      for (ActivityMap& map : extent.maps) map.active[kLoops - 1] = 0;
      for (auto& pages : extent.pages) pages[kLoops - 1] = nullptr;
    }
    prefixes_.publish(identity, std::move(extent), s.index);
    ++counters_.published_windows;
  }
  use_in_order(s, windows);
}

// A window is of no use without those before it, so of windows that are used together the first one is to be dropped last.
void CudaRun::use_in_order(const RequestState& s, int windows) {
  for (int window = windows; window-- > 0;) static_cast<void>(prefixes_.find(identity_of(s, window)));
}

void CudaRun::reuse(RequestState& s, int windows) {
  open(s);  // may need memory, and so drop windows: it comes before they are looked up
  int found = 0;
  for (; found < windows; ++found) {
    const PublishedWindow* published = prefixes_.find(identity_of(s, found));
    if (published == nullptr) break;
    const auto w = static_cast<std::size_t>(found);
    kv_.adopt(s.slot, published->kv);
    if (!published->kv.blocks.empty()) s.encoded = published->kv.positions.end;
    const RequestState& publisher = requests_.at(static_cast<std::size_t>(published->publisher));
    for (std::size_t late = 2; late < kLoops; ++late) s.active[late][w] = publisher.active[late][w];
    s.begun_loops[w] = s.completed_loops[w] = config_.loops();
    reused_.push_back({s.index, found, publisher.index});
  }
  use_in_order(s, found);
  s.complete_windows = s.held_windows = found;
  counters_.reused_windows += found;
  // What is not there any more, because memory was needed, is computed as in a cold run.
  for (int window = found; window < windows; ++window) {
    for (int loop = 1; loop <= config_.loops(); ++loop) {
      std::vector<Part> parts;
      parts.push_back(*prefill_part(s, window, window_range(window, s.prompt_length, config_.window()), loop));
      run_step(parts);
    }
  }
}

void CudaRun::evict(const RequestState& s, int from) {
  const int end = (s.prompt_length - 1) / config_.window();
  for (int window = from; window < end; ++window) counters_.evicted_windows += prefixes_.evict(identity_of(s, window));
}

// Free pages go first, then published windows that no request holds. True when that makes `missing_bytes`.
bool CudaRun::relieve_pressure(std::size_t missing_bytes) {
  const std::size_t free_bytes = kv_.free_pages() * page_bytes(kv_.shape());
  if (free_bytes < missing_bytes) {
    const int dropped = prefixes_.make_room(missing_bytes - free_bytes);
    if (dropped == 0) return false;
    counters_.evicted_windows += dropped;
  }
  kv_.trim();
  return true;
}

// A request that began with published windows has the record of a cold run: what was observed of those windows is in the record of the
// request that computed them, complete when every result has been read.
void CudaRun::record_reused_windows() {
  for (const ReusedWindow& reused : reused_) {
    RequestState& s = requests_.at(static_cast<std::size_t>(reused.request));
    const RequestState& publisher = requests_.at(static_cast<std::size_t>(reused.publisher));
    const PositionRange range = window_range(reused.window, s.prompt_length, config_.window());
    const auto copy_rows = [&](const Tensor<float>& from, Tensor<float>& to) {
      if (from.empty() || to.empty()) return;
      for (int position = range.begin; position < range.end; ++position)
        std::copy_n(from.row(position).data(), from.row(position).size(), to.row(position).data());
    };
    for (std::size_t r = 0; r < kLoops; ++r) copy_rows(publisher.record.hidden[r], s.record.hidden[r]);
    copy_rows(publisher.record.gate, s.record.gate);
    for (std::size_t late = 2; config_.selects_tokens() && late < kLoops; ++late) {
      const auto& scores = publisher.record.scores[late - 2];
      std::copy(scores.begin() + range.begin, scores.begin() + range.end, s.record.scores[late - 2].begin() + range.begin);
      s.active[late][static_cast<std::size_t>(reused.window)] = publisher.active[late][static_cast<std::size_t>(reused.window)];
    }
  }
}

}  // namespace loopgauge::optimized
