// SPDX-License-Identifier: Apache-2.0
#include "harness/planner/request_progress.hpp"

#include <algorithm>

#include "models/error.hpp"

namespace loopgauge::harness {

RequestProgress::RequestProgress(int index, const TraceRequest& request, const EffectiveConfig& config, const Speculation& speculation)
    : index_(index),
      window_(config.window()),
      loops_(config.loops()),
      prompt_length_(request.prompt_length()),
      decode_rows_(fed_tokens(request)),
      window_loops_(static_cast<std::size_t>(window_count(prompt_length_, window_)), 0),
      window_part_(window_loops_.size(), 0),
      speculation_(speculation) {}

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

std::vector<WorkItem> RequestProgress::next_speculative_items(bool one_loop) const {
  const int depth = speculation_.draft_depth, rows = speculation_.live_rows();
  if (speculation_.kind == SpeculationKind::pipeline) {
    std::vector<WorkItem> items;
    for (int stage = rows - 1; stage >= 0; --stage) {
      const int loop = stage * depth + cycle_steps_ % depth + 1;
      if (loop <= loops_) items.push_back({index_, RowKind::stage, stage, stage + 1, loop, loop});
    }
    return items;
  }
  if (drafted_ == rows) {
    const int first = std::max(depth, round_loops_) + 1;
    return {{index_, RowKind::verify, 0, rows, first, one_loop ? first : loops_}};
  }
  const int first = round_loops_ + 1;
  if (one_loop) return {{index_, RowKind::draft, drafted_, drafted_ + 1, first, first}};
  return {{index_, RowKind::draft, drafted_, round_loops_ == 0 ? rows : drafted_ + 1, first, depth}};
}

void RequestProgress::advance(const WorkItem& item) {
  if (item.kind == RowKind::draft) {
    round_loops_ = item.loop_last == speculation_.draft_depth ? 0 : item.loop_last;
    if (round_loops_ == 0) drafted_ = item.end;
    return;
  }
  if (item.kind == RowKind::verify) {
    round_loops_ = item.loop_last;
    if (round_loops_ < loops_) return;
    drafted_ = round_loops_ = 0;
    ++rows_done_;
    return;
  }
  if (item.kind == RowKind::stage) {
    if (item.begin > 0) return;  // stage 0 has as many loops as any
    if (++cycle_steps_ < speculation_.draft_depth * speculation_.live_rows()) return;
    cycle_steps_ = 0;
    ++rows_done_;
    return;
  }
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
  row_loops_ = drafted_ = round_loops_ = cycle_steps_ = 0;
}

void RequestProgress::set_reused_windows(int count) {
  if (count > sharable_windows()) throw InternalError("more windows are reused than may be shared");
  for (int w = 0; w < static_cast<int>(window_loops_.size()); ++w) window_loops_[static_cast<std::size_t>(w)] = w < count ? loops_ : 0;
}

}  // namespace loopgauge::harness
