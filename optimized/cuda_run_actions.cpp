// SPDX-License-Identifier: Apache-2.0
// What happens to a request between two submissions, but for published windows (cuda_run_prefixes). Everything that was issued has run, and
// the host's copy of the activity maps is complete; results that have not been read stay to be read in their turn.
#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include "models/error.hpp"
#include "models/sha256.hpp"
#include "optimized/cuda_run.hpp"
#include "optimized/snapshot.hpp"

namespace loopgauge::optimized {

void CudaRun::act(const Action& action) {
  RequestState& s = requests_.at(static_cast<std::size_t>(action.request));
  if (s.finished && action.kind != ActionKind::evict) return;  // it has ended, maybe before the plan could know
  switch (action.kind) {
    case ActionKind::cancel:
      return cancel(s);
    case ActionKind::preempt:
      return preempt(s);
    case ActionKind::resume:
      return restore(s);
    case ActionKind::rewind:
      return rewind(s);
    case ActionKind::publish:
      return publish(s, action.windows);
    case ActionKind::reuse:
      return reuse(s, action.windows);
    case ActionKind::evict:
      return evict(s, action.windows);
    case ActionKind::hand_off:
      throw InternalError(s.name() + ": a handoff is carried out between two executors, by neither of them");
  }
  throw InternalError("unknown action");
}

// Results of its rows are dropped when they are read; what was decided for its windows is not (S-ACT-2), so the record is closed at the
// end.
void CudaRun::cancel(RequestState& s) {
  release_storage(s);
  kv_.trim();
  s.snapshot = {};
  s.record.outcome = RequestOutcome::cancelled;
  s.cancelled = s.finished = true;
}

void CudaRun::rewind(RequestState& s) {
  if (s.slot < 0) return;
  int frontier = s.settled ? s.settled->committed : s.committed;
  if (s.committed == 0) {
    frontier = s.complete_windows * config_.window();
    for (std::size_t w = static_cast<std::size_t>(s.complete_windows); w < s.windows.size(); ++w) {
      s.begun_loops[w] = s.completed_loops[w] = 0;
      // What a selection found is no longer known: the masks it stood for are gone (members_known).
      for (std::size_t late = 2; late < kLoops; ++late) s.active[late][w].clear();
      if (!s.windows[w]) continue;
      spare_windows_.push_back(std::move(*s.windows[w]));
      s.windows[w].reset();
    }
  }
  release_row(s);
  // Blocks that were sealed before a round was decided stay, whatever they hold beyond the committed rows.
  if (s.committed == 0 || !keeps_sealed_candidates()) kv_.rewind(s.slot, frontier);
}

// Lets go of the rows on their way, if there are any.
void CudaRun::release_row(RequestState& s) {
  give_up_rows(s, 0);
  if (s.row.position < 0 || s.row.committed) return;
  if (s.row.reference >= 0 && !s.row.reference_given_away) references_->release(s.row.reference, s.row.key);
  s.row = DecodeRow{};
}

// Frees everything that the request holds on the device. Progress that a snapshot carries is forgotten here: it comes back from there
// alone.
void CudaRun::release_storage(RequestState& s) {
  if (s.slot < 0) return;
  release_row(s);
  if (s.previous_reference) references_->release(s.previous_reference->first, s.previous_reference->second);
  s.previous_reference.reset();
  for (const auto& [_, reference] : std::exchange(s.stale_references, {})) references_->release(reference.first, reference.second);
  s.stale_rows.clear();
  for (auto& window : s.windows) window.reset();
  kv_.close_request(s.slot);
  s.slot = -1;
  s.held_windows = 0;
  s.row = DecodeRow{};
  s.complete_windows = s.committed = s.encoded = s.encoded_ahead = 0;
  s.unreadable = kNoPosition;
  s.incarnations = 0;
}

// ------------------------------------------------------------------------------------------------------------------------- snapshots

SnapshotOwner CudaRun::owner_of(const RequestState& s) const {
  Sha256 tokens;
  tokens.update(s.request->prompt.data(), s.request->prompt.size() * sizeof(std::int32_t));
  tokens.update(s.request->forced.data(), s.request->forced.size() * sizeof(std::int32_t));
  return {model_sha256_,
          config_.canonical_json(),
          {model_.layers, model_.heads, model_.head_dim, model_.hidden},
          s.prompt_length,
          s.capacity,
          tokens.hex_digest(),
          std::to_string(s.index) + " of trace " + trace_.name + ", generation " + std::to_string(s.generation)};
}

// What the request has in arrays by slot: hidden row, exit state and pending token, and where rows run ahead what has been decided of them.
std::vector<DeviceRange> CudaRun::slot_ranges(const RequestState& s) {
  const auto slot = static_cast<std::size_t>(s.slot);
  std::vector<DeviceRange> ranges{{decode_state(s), static_cast<std::size_t>(model_.hidden) * sizeof(Bfloat16)},
                                  {exits_.as<ExitState>() + slot, sizeof(ExitState)},
                                  {chosen_tokens_.as<std::int32_t>() + slot, sizeof(std::int32_t)}};
  if (runs_ahead()) {
    const auto rows = static_cast<std::size_t>(live_rows());
    ranges.push_back({speculation_.states + slot, sizeof(SpeculationState)});
    ranges.push_back({speculation_.tokens + slot * rows, rows * sizeof(std::int32_t)});
  }
  return ranges;
}

// Everything of the request on the device, in the order of a snapshot's payload.
std::vector<DeviceRange> CudaRun::device_ranges(RequestState& s) {
  std::vector<DeviceRange> ranges;
  for (const KvRegion& region : kv_.regions(s.slot)) ranges.push_back({region.data, region.bytes});
  for (const DeviceRange& range : slot_ranges(s)) ranges.push_back(range);
  for (auto& window : s.windows) {
    if (!window) continue;
    for (DeviceBuffer* buffer : {&window->states, &window->scores, &window->positions}) {
      if (*buffer) ranges.push_back({buffer->data(), buffer->size_bytes()});
    }
  }
  if (s.row.reference >= 0 && !s.row.committed) {
    for (const DeviceRange& range : references_->ranges(s.row.reference)) ranges.push_back(range);
  }
  return ranges;
}

void CudaRun::preempt(RequestState& s) {
  if (s.slot < 0) return;
  give_up_rows(s, 0);
  RequestSnapshot state;
  state.complete_windows = s.complete_windows;
  state.committed = s.committed;
  state.encoded = s.encoded;
  state.encoded_ahead = s.encoded_ahead;
  state.unreadable = s.unreadable;
  state.incarnations = s.incarnations;
  state.kv = kv_.layout(s.slot);
  for (std::size_t w = 0; w < s.windows.size(); ++w) {
    if (s.windows[w]) state.windows.push_back({static_cast<std::int32_t>(w), s.windows[w]->scored});
  }
  state.row_position = s.row.position;
  state.row_completed = s.row.completed;
  state.row_last_loop = s.row.last_loop;
  state.row_depth_given = s.row.depth_given;
  state.row_committed = s.row.committed;
  state.row_key = s.row.key;
  state.has_reference = s.row.reference >= 0 && !s.row.committed;
  if (state.has_reference) state.reference_state = references_->state(s.row.reference);

  const std::vector<DeviceRange> ranges = device_ranges(s);
  std::size_t payload_bytes = 0;
  for (const DeviceRange& range : ranges) payload_bytes += range.bytes;
  std::vector<std::byte> snapshot = begin_snapshot(owner_of(s), state, payload_bytes);
  std::byte* target = payload_of(snapshot).data();
  for (const DeviceRange& range : ranges) {
    LOOPGAUGE_CUDA_CHECK(cudaMemcpyAsync(target, range.data, range.bytes, cudaMemcpyDeviceToHost, stream_));
    target += range.bytes;
  }
  stream_.synchronize();
  seal_snapshot(snapshot);
  ++counters_.preemptions;
  counters_.snapshot_bytes += static_cast<std::int64_t>(snapshot.size());

  if (poison_) {
    // What a resumed request would find where it was, if it were not restored. Pages are poisoned when they are used again.
    std::vector<DeviceRange> left = slot_ranges(s);
    if (state.has_reference) {
      for (const DeviceRange& range : references_->ranges(s.row.reference)) left.push_back(range);
    }
    for (const DeviceRange& range : left) LOOPGAUGE_CUDA_CHECK(cudaMemsetAsync(range.data, 0xFF, range.bytes, stream_));
  }
  release_storage(s);
  kv_.trim();
  s.snapshot = std::move(snapshot);
}

// Throws SnapshotError before anything is allocated, DeviceMemoryError with everything as before: the snapshot stays.
void CudaRun::restore(RequestState& s) {
  const OpenedSnapshot opened = open_snapshot(s.snapshot, owner_of(s));
  const RequestSnapshot& state = opened.state;
  const int slot = kv_.open_request(state.kv);
  std::vector<WindowState> windows;
  try {
    for (std::size_t i = 0; i < state.windows.size(); ++i) windows.push_back(take_window_state());
  } catch (...) {
    kv_.close_request(slot);
    kv_.trim();
    throw;
  }
  s.slot = slot;
  s.complete_windows = state.complete_windows;
  s.committed = state.committed;
  if (runs_ahead() && s.committed > 0) s.committed = s.prompt_length + s.record.fed;  // what has been read meanwhile
  s.encoded = state.encoded;
  s.encoded_ahead = state.encoded_ahead;
  s.unreadable = state.unreadable;
  s.incarnations = state.incarnations;
  for (std::size_t i = 0; i < state.windows.size(); ++i) {
    auto& window = s.windows.at(static_cast<std::size_t>(state.windows[i].window));
    window.emplace(std::move(windows[i]));
    window->scored = state.windows[i].scored;
  }
  s.row = DecodeRow{};
  s.row.position = state.row_position;
  s.row.completed = state.row_completed;
  s.row.last_loop = state.row_last_loop;
  s.row.depth_given = state.row_depth_given;
  s.row.committed = state.row_committed;
  s.row.key = state.row_key;
  if (state.has_reference) {
    s.row.reference = references_->acquire(s.row.key);
    if (state.reference_state == ReferenceStore::State::reusable) {
      references_->mark_source_ready(s.row.reference, s.row.key);
      references_->mark_reusable(s.row.reference, s.row.key);
    }
  }

  const std::byte* source = opened.payload.data();
  std::size_t left = opened.payload.size();
  for (const DeviceRange& range : device_ranges(s)) {
    if (range.bytes > left)
      throw InternalError(s.name() + ": a snapshot of " + std::to_string(opened.payload.size()) + " bytes ends early");
    LOOPGAUGE_CUDA_CHECK(cudaMemcpyAsync(range.data, source, range.bytes, cudaMemcpyHostToDevice, stream_));
    source += range.bytes;
    left -= range.bytes;
  }
  if (left != 0) throw InternalError(s.name() + ": " + std::to_string(left) + " bytes of a snapshot belong to nothing");
  plant_incomplete_restore(s);
  stream_.synchronize();
  s.snapshot = {};
}

// The planted faults: what one part of the snapshot would have brought is lost.
void CudaRun::plant_incomplete_restore(const RequestState& s) {
  if (planted(Fault::resume_without_token) && s.committed > 0 && (s.row.position < 0 || s.row.committed)) {
    std::int32_t* token = chosen_tokens_.as<std::int32_t>() + s.slot;
    const std::int32_t other = (read(token, 1).front() + 1) % model_.vocab;
    LOOPGAUGE_CUDA_CHECK(cudaMemcpyAsync(token, &other, sizeof other, cudaMemcpyHostToDevice, stream_));
    stream_.synchronize();
  }
  if (planted(Fault::resume_without_reference) && s.row.reference >= 0) {
    // A slot that nobody has used: the first key, and no mass.
    for (const DeviceRange& range : references_->ranges(s.row.reference))
      LOOPGAUGE_CUDA_CHECK(cudaMemsetAsync(range.data, 0, range.bytes, stream_));
    const ReferenceView view = references_->view();
    const std::size_t heads = static_cast<std::size_t>(model_.layers) * static_cast<std::size_t>(model_.heads),
                      row_bytes = view.mask_pages * sizeof(std::uint64_t);
    std::uint64_t* masks = view.selected + reference_index(kv_.shape(), s.row.reference, 0, 0) * view.mask_pages;
    LOOPGAUGE_CUDA_CHECK(cudaMemset2DAsync(masks, row_bytes, 1, 1, heads, stream_));
  }
}

}  // namespace loopgauge::optimized
