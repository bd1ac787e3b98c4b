// SPDX-License-Identifier: Apache-2.0
#include "harness/planner/request_progress.hpp"

#include <algorithm>

#include "models/error.hpp"

namespace loopgauge::harness {

RequestProgress::RequestProgress(int index, const TraceRequest& request, const EffectiveConfig& config)
    : index_(index),
      window_(config.window()),
      loops_(config.loops()),
      prompt_length_(request.prompt_length()),
      decode_rows_(fed_tokens(request)),
      window_loops_(static_cast<std::size_t>(window_count(prompt_length_, window_)), 0),
      window_part_(window_loops_.size(), 0) {}

// Earlier windows are never behind later ones (S-PLAN-4).
bool RequestProgress::prompt_complete() const { return window_loops_.back() == loops_; }

int RequestProgress::completed_windows() const {
  const auto unfinished = std::find_if(window_loops_.begin(), window_loops_.end(), [&](int done) { return done < loops_; });
  return static_cast<int>(unfinished - window_loops_.begin());
}

int RequestProgress::sharable_windows() const { return (prompt_length_ - 1) / window_; }

WorkItem RequestProgress::next_item(int most_tokens, int most_loops) const {
  if (prompt_complete()) {
    const int position = prompt_length_ + rows_done_;
    return {index_, RowKind::decode, position, position + 1, row_loops_ + 1, std::min(row_loops_ + most_loops, loops_)};
  }
  const int w = completed_windows();
  const PositionRange range = window(w);
  const int begin = range.begin + window_part_[static_cast<std::size_t>(w)];
  const int end = std::min(range.end, begin + std::min(most_tokens, range.size()));
  const int done = window_loops_[static_cast<std::size_t>(w)];
  const bool whole = begin == range.begin && end == range.end;
  return {index_, RowKind::prefill, begin, end, done + 1, whole ? std::min(done + most_loops, loops_) : done + 1};
}

std::vector<WorkItem> RequestProgress::ready_chunks(int chunk_windows) const {
  std::vector<WorkItem> items;
  const int count = static_cast<int>(window_loops_.size());
  int before = loops_;  // completed loops of the window before
  for (int w = 0; w < count;) {
    const int done = window_loops_[static_cast<std::size_t>(w)];
    const int chunk_end = std::min(count, (w / chunk_windows + 1) * chunk_windows);
    int end = w + 1;
    while (end < chunk_end && window_loops_[static_cast<std::size_t>(end)] == done) ++end;
    if (done < loops_ && done < before)
      items.push_back({index_, RowKind::prefill, window(w).begin, window(end - 1).end, done + 1, done + 1});
    before = done;
    w = end;
  }
  return items;
}

void RequestProgress::advance(const WorkItem& item) {
  if (item.kind == RowKind::decode) {
    row_loops_ = item.loop_last;
    if (row_loops_ == loops_) {
      ++rows_done_;
      row_loops_ = 0;
    }
    return;
  }
  for (int w = item.begin / window_; w * window_ < item.end; ++w) {
    int& part = window_part_[static_cast<std::size_t>(w)];
    const PositionRange range = window(w);
    part += std::min(range.end, item.end) - std::max(range.begin, item.begin);
    if (part < range.size()) continue;
    part = 0;
    window_loops_[static_cast<std::size_t>(w)] = item.loop_last;
  }
}

void RequestProgress::rewind() {
  std::fill(window_part_.begin(), window_part_.end(), 0);
  for (int& done : window_loops_) {
    if (done < loops_) done = 0;
  }
  row_loops_ = 0;
}

void RequestProgress::set_reused_windows(int count) {
  if (count > sharable_windows()) throw InternalError("more windows are reused than may be shared");
  for (int w = 0; w < static_cast<int>(window_loops_.size()); ++w) window_loops_[static_cast<std::size_t>(w)] = w < count ? loops_ : 0;
}

}  // namespace loopgauge::harness
