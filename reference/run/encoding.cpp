// SPDX-License-Identifier: Apache-2.0
#include "reference/run/encoding.hpp"

#include <algorithm>

#include "reference/kv/block_encoder.hpp"

namespace loopgauge::reference {
namespace {

template <class P>
void encode_block_stream(const RunContext<P>& run, RequestState<P>& s, CodecBlock& block, int loop) {
  CodecStream& stream = block.streams[static_cast<std::size_t>(loop - 1)];
  for (int position = block.positions.begin; position < block.positions.end; ++position) {
    if (s.held->executed_loops[static_cast<std::size_t>(position)] >= loop) stream.rows.push_back(position);
  }
  encode_stream<typename P::Real>(s.held->kv, run.model, block.positions, loop, stream, run.options.fault, name(s));
}

}  // namespace

template <class P>
int frontier_rule(const RunContext<P>& run, const RequestState<P>& s, int committed) {
  const int frontier = encoded_frontier(run.config, s.prompt_length, committed);
  if (!run.planted(Fault::early_flush) || !run.config.q().enabled) return frontier;
  const int early = encoded_frontier(run.config, s.prompt_length, committed + kGroupSize);
  return std::max(frontier, std::min(early, committed / kGroupSize * kGroupSize));
}

// A prefill row under `streaming` sees every window before its own encoded; a decode row sees the frontier of committed length `position`.
template <class P>
int visible_frontier(const RunContext<P>& run, const RequestState<P>& s, int position, RowKind kind) {
  const auto& q = run.config.q();
  if (!q.enabled) return 0;
  if (kind == RowKind::prefill) return q.policy == EncodingPolicy::streaming ? position / run.config.window() * run.config.window() : 0;
  if (run.planted(Fault::candidate_sealed)) return s.held->encoded;
  return q.timing == EncodingTiming::serial_aligned ? frontier_rule(run, s, position) : std::min(s.held->encoded, s.held->unreadable);
}

template <class P>
void encode_to(const RunContext<P>& run, RequestState<P>& s, int frontier) {
  RequestStorage<P>& h = *s.held;
  for (const PositionRange& range : block_cuts(run.config, s.prompt_length, h.encoded, frontier)) {
    h.blocks.push_back({range, {}});
    for (int loop = 1; loop <= run.config.loops(); ++loop) encode_block_stream(run, s, h.blocks.back(), loop);
    h.encoded = range.end;
  }
}

template <class P>
void encode_window_loop(const RunContext<P>& run, RequestState<P>& s, int window, int loop) {
  RequestStorage<P>& h = *s.held;
  const PositionRange range = window_range(window, s.prompt_length, run.config.window());
  if (loop == 1) h.blocks.push_back({range, {}});
  encode_block_stream(run, s, h.blocks.at(static_cast<std::size_t>(window)), loop);  // windows complete a loop in ascending order
  if (loop == run.config.loops()) h.encoded = range.end;
}

template <class P>
void encode_again(RunContext<P>& run, RequestState<P>& s, int end) {
  RequestStorage<P>& h = *s.held;
  const PositionRange rows{h.unreadable, std::min(end, h.encoded)};
  if (rows.begin >= rows.end) return;
  for (CodecBlock& block : h.blocks) {
    const PositionRange part{std::max(rows.begin, block.positions.begin), std::min(rows.end, block.positions.end)};
    if (part.begin >= part.end) continue;
    for (int loop = 1; loop <= run.config.loops(); ++loop) {
      encode_rows_again<typename P::Real>(h.kv, run.model, loop, block.streams[static_cast<std::size_t>(loop - 1)], part, name(s));
    }
  }
  run.counters.rewritten_rows += rows.size();
  h.unreadable = rows.end < h.encoded ? rows.end : kNoPosition;
}

template <class P>
void drop_blocks_beyond(RequestState<P>& s, int frontier) {
  RequestStorage<P>& h = *s.held;
  while (!h.blocks.empty() && h.blocks.back().positions.end > frontier) h.blocks.pop_back();
  h.encoded = std::min(h.encoded, frontier);
}

#define LOOPGAUGE_INSTANTIATE(P)                                                                \
  template int frontier_rule<P>(const RunContext<P>&, const RequestState<P>&, int);             \
  template int visible_frontier<P>(const RunContext<P>&, const RequestState<P>&, int, RowKind); \
  template void encode_to<P>(const RunContext<P>&, RequestState<P>&, int);                      \
  template void encode_window_loop<P>(const RunContext<P>&, RequestState<P>&, int, int);        \
  template void encode_again<P>(RunContext<P>&, RequestState<P>&, int);                         \
  template void drop_blocks_beyond<P>(RequestState<P>&, int);
LOOPGAUGE_FOR_EACH_PROFILE(LOOPGAUGE_INSTANTIATE)
#undef LOOPGAUGE_INSTANTIATE

}  // namespace loopgauge::reference
