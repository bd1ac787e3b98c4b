// SPDX-License-Identifier: Apache-2.0
#include "reference/run/actions.hpp"

#include <algorithm>

#include "models/error.hpp"
#include "models/prefix_identity.hpp"
#include "reference/run/delivery.hpp"
#include "reference/run/encoding.hpp"
#include "reference/run/observation.hpp"
#include "reference/run/request_life.hpp"
#include "reference/run/snapshot.hpp"
#include "reference/run/speculation.hpp"

namespace loopgauge::reference {
namespace {

// A request that has ended is not cancelled any more.
template <class P>
void cancel(RunContext<P>& run, RequestState<P>& s) {
  if (s.held == nullptr && s.phase == RequestState<P>::Phase::preempted) restore(run, s);
  if (s.held != nullptr) {
    for (const auto& [_, window] : s.held->windows) observe_decisions(run, s, window);
  }
  s.phase = RequestState<P>::Phase::cancelled;
  close_record(run, s);
  release(run, s);
}

// Windows short of the last loop and the row on its way start over at loop 1 (S-ACT-5).
template <class P>
void rewind(RunContext<P>& run, RequestState<P>& s) {
  s.dirty = false;
  s.late_error.clear();
  if (s.held == nullptr) return;
  RequestStorage<P>& h = *s.held;
  for (std::size_t w = 0; w < h.window_loops.size(); ++w) {
    if (h.window_loops[w] == run.config.loops()) continue;
    const PositionRange range = window_range(static_cast<int>(w), s.prompt_length, run.config.window());
    h.window_loops[w] = 0;
    h.windows.erase(static_cast<int>(w));
    h.kv.poison(range, 1);
    std::fill_n(h.executed_loops.begin() + range.begin, range.size(), std::uint8_t{0});
    // Under `streaming` blocks are windows: those from here on hold a part of their streams.
    while (!h.blocks.empty() && h.blocks.back().positions.begin >= range.begin) h.blocks.pop_back();
  }
  give_up_rows(run, s);
  if (h.row.position < 0 || h.row.finished) return;
  retire_reference(run, s);
  h.kv.poison({h.row.position, h.row.position + 1}, 1);
  h.executed_loops[static_cast<std::size_t>(h.row.position)] = 0;
  h.row = {};
}

template <class P>
std::string identity_of(const RunContext<P>& run, const RequestState<P>& s, int window) {
  const auto tokens = std::span<const std::int32_t>(s.request->prompt)
                          .first(static_cast<std::size_t>(window + 1) * static_cast<std::size_t>(run.config.window()));
  return prefix_identity(run.model_sha256, run.config, published_encoding(run.config), tokens);
}

// The form in which windows are published (S-PFX-2).
KvForm published_form(const EffectiveConfig& config) {
  return published_encoding(config) == PrefixEncoding::blocks ? KvForm::reconstructed : KvForm::exact;
}

template <class T>
std::vector<T> part(const std::vector<T>& values, PositionRange positions, int width) {
  const auto begin = values.begin() + static_cast<std::ptrdiff_t>(positions.begin) * width;
  return {begin, begin + static_cast<std::ptrdiff_t>(positions.size()) * width};
}

template <class P>
PublishedWindow<typename P::Real> published_window(const RunContext<P>& run, RequestState<P>& s, int window) {
  RequestStorage<P>& h = *s.held;
  const PositionRange positions = window_range(window, s.prompt_length, run.config.window());
  PublishedWindow<typename P::Real> result;
  result.positions = positions;
  result.kv = h.kv.rows(published_form(run.config), positions);
  if (run.planted(Fault::publish_before_last_loop)) {  // the last loop's planes as they were before it ran: the loop before
    const std::size_t plane = 2 * static_cast<std::size_t>(run.model.heads * positions.size() * run.model.head_dim);  // K and V
    const std::size_t loops = static_cast<std::size_t>(run.config.loops());
    for (std::size_t layer = 0; layer < static_cast<std::size_t>(run.model.layers); ++layer) {
      const auto last = result.kv.begin() + static_cast<std::ptrdiff_t>((layer * loops + loops - 1) * plane);
      std::copy_n(last - static_cast<std::ptrdiff_t>(plane), plane, last);
    }
  }
  result.executed_loops = part(h.executed_loops, positions, 1);
  if (published_encoding(run.config) == PrefixEncoding::blocks) result.block = h.blocks.at(static_cast<std::size_t>(window));
  const RequestRecord& record = s.record;
  for (std::size_t r = 0; r < kLoops; ++r) {
    if (!record.hidden[r].empty()) result.hidden[r] = part(record.hidden[r].data, positions, run.model.hidden);
  }
  if (!record.gate.empty()) result.gate = part(record.gate.data, positions, kLoops);
  for (std::size_t at = 0; at < 2 && run.config.selects_tokens(); ++at) {
    const auto& active = record.active[at];
    result.scores[at] = part(record.scores[at], positions, 1);
    result.active[at].assign(std::lower_bound(active.begin(), active.end(), positions.begin),
                             std::lower_bound(active.begin(), active.end(), positions.end));
  }
  return result;
}

template <class P>
void publish(RunContext<P>& run, RequestState<P>& s, int windows) {
  for (int w = 0; w < windows; ++w) {
    const std::string identity = identity_of(run, s, w);
    if (run.prefixes.contains(identity)) continue;
    if (s.held == nullptr || s.held->window_loops.at(static_cast<std::size_t>(w)) != run.config.loops()) {
      throw InternalError(name(s) + " publishes window " + std::to_string(w) + ", which it does not hold complete");
    }
    run.prefixes.publish(identity, published_window(run, s, w));
    ++run.counters.published_windows;
  }
}

// The request begins with published windows, and its record with what a cold run would have observed (S-PFX-4).
template <class P>
void reuse(RunContext<P>& run, RequestState<P>& s, int windows) {
  std::vector<HeldWindow<typename P::Real>> held_windows;
  for (int w = 0; w < windows; ++w) {
    held_windows.push_back(run.prefixes.hold(identity_of(run, s, w)));
    if (held_windows.back() == nullptr) throw InternalError(name(s) + " reuses window " + std::to_string(w) + ", which is not published");
  }
  begin_request(run, s);
  RequestStorage<P>& h = *s.held;
  RequestRecord& record = s.record;
  for (const auto& window : held_windows) {
    const PositionRange positions = window->positions;
    const auto place = [&](const auto& from, auto& to, int width) {
      if (!from.empty()) std::copy(from.begin(), from.end(), to.begin() + static_cast<std::ptrdiff_t>(positions.begin) * width);
    };
    h.kv.set_rows(published_form(run.config), positions, window->kv);
    place(window->executed_loops, h.executed_loops, 1);
    if (window->block) {
      h.blocks.push_back(*window->block);
      h.encoded = positions.end;
    }
    for (std::size_t r = 0; r < kLoops; ++r) place(window->hidden[r], record.hidden[r].data, run.model.hidden);
    place(window->gate, record.gate.data, kLoops);
    for (std::size_t at = 0; at < 2; ++at) {
      place(window->scores[at], record.scores[at], 1);
      record.active[at].insert(record.active[at].end(), window->active[at].begin(), window->active[at].end());
    }
  }
  std::fill_n(h.window_loops.begin(), windows, run.config.loops());
  h.held_windows = std::move(held_windows);
  run.counters.reused_windows += windows;
}

template <class P>
void evict(RunContext<P>& run, const RequestState<P>& s, int from) {
  const int end = (s.prompt_length - 1) / run.config.window();
  for (int w = from; w < end; ++w) run.counters.evicted_windows += run.prefixes.evict(identity_of(run, s, w));
}

}  // namespace

template <class P>
void act(RunContext<P>& run, RequestState<P>& s, const Action& action) {
  const bool ended = s.phase == RequestState<P>::Phase::ended;
  switch (action.kind) {
    case ActionKind::cancel:
      if (!ended) cancel(run, s);
      return;
    case ActionKind::preempt:
      if (!ended) preempt(run, s);
      return;
    case ActionKind::resume:
      if (!ended) restore(run, s);
      if (!ended) commit_known_rows(run, s);
      return;
    case ActionKind::rewind:
      rewind(run, s);
      return;
    case ActionKind::publish:
      publish(run, s, action.windows);
      return;
    case ActionKind::reuse:
      reuse(run, s, action.windows);
      return;
    case ActionKind::evict:
      evict(run, s, action.windows);
      return;
    case ActionKind::hand_off:
      throw InternalError(name(s) + ": a handoff is carried out between two executors, by neither of them");
  }
  throw InternalError("unknown action");
}

#define LOOPGAUGE_INSTANTIATE(P) template void act<P>(RunContext<P>&, RequestState<P>&, const Action&);
LOOPGAUGE_FOR_EACH_PROFILE(LOOPGAUGE_INSTANTIATE)
#undef LOOPGAUGE_INSTANTIATE

}  // namespace loopgauge::reference
