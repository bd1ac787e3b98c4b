// SPDX-License-Identifier: Apache-2.0
// What is encoded when, and what a query sees of it.
#include <algorithm>
#include <string>
#include <utility>

#include "models/error.hpp"
#include "optimized/cuda_run.hpp"
#include "optimized/kv/activity_maps.cuh"
#include "optimized/ops/residual_encode.cuh"

namespace loopgauge::optimized {

int CudaRun::frontier_rule(const RequestState& s, int committed) const {
  const int frontier = encoded_frontier(config_, s.prompt_length, committed);
  if (!planted(Fault::early_flush) || !config_.q().enabled) return frontier;
  return std::max(frontier,
                  std::min(encoded_frontier(config_, s.prompt_length, committed + kGroupSize), committed / kGroupSize * kGroupSize));
}

// Positions below it are read reconstructed. But of speculative rows one representation is stored, so what a row must see is what is encoded now.
int CudaRun::visible_frontier(const RequestState& s, int position, RowKind kind) const {
  const auto& q = config_.q();
  if (!q.enabled) return 0;
  if (kind == RowKind::prefill) return q.policy == EncodingPolicy::streaming ? position / config_.window() * config_.window() : 0;
  // Later rows of a round see blocks that are encoded beside their BF16 rows (S-SPEC-8), and so do those after a round that was sealed before
  // it was decided.
  const int sealed = options_.speculation.kind == SpeculationKind::none ? s.encoded : std::max(s.encoded, s.encoded_ahead);
  if (planted(Fault::candidate_sealed)) return sealed;
  int visible = s.encoded;
  if (q.timing == EncodingTiming::serial_aligned) visible = frontier_rule(s, position);
  if (seals_unverified()) visible = std::min(sealed, s.unreadable);
  if (visible < s.encoded || visible > sealed) {
    throw InternalError(s.name() + ", position " + std::to_string(position) + ": the query must see " + std::to_string(visible) +
                        " positions encoded, " + std::to_string(s.encoded) + " to " + std::to_string(sealed) + " are");
  }
  return visible;
}

// A block is as large as its members. Synchronous execution reads them; asynchronous execution leaves room for what is possible.
void CudaRun::seal(RequestState& s, PositionRange block) {
  if (!asynchronous() && !members_known(s, block)) deliver_early();
  const bool known = members_known(s, block);
  encode(s, block, 1, config_.loops(), known ? std::array<std::uint32_t, kLoops>{} : largest_streams(s, block), known);
}

// What later rows of a round see encoded and earlier ones do not: both representations stay until flush() reaches the block.
void CudaRun::seal_ahead(RequestState& s, int frontier) {
  for (const PositionRange& range : block_cuts(config_, s.prompt_length, std::max(s.encoded, s.encoded_ahead), frontier)) {
    seal(s, range);
    s.encoded_ahead = range.end;
  }
}

bool CudaRun::seals_unverified() const {
  const auto& q = config_.q();
  return options_.speculation.kind == SpeculationKind::block && q.enabled && q.timing == EncodingTiming::execution_dependent &&
         q.flush == FlushRule::eager;
}

// The rows of a round before `rows_end` have run and are not decided: those that stand in sealed blocks are encoded again under the parameters of
// their groups, and further blocks are sealed (S-SPEC-8, S-SPEC-9). Their BF16 rows stay until they are committed.
void CudaRun::seal_unverified(RequestState& s, int rows_end) {
  const int sealed = std::max(s.encoded, s.encoded_ahead);
  const PositionRange rows{s.unreadable, std::min(rows_end, sealed)};
  if (rows.begin < rows.end) {
    pending_rewrites_.push_back({s.slot, rows.begin, rows.end, 1, config_.loops()});
    counters_.rewritten_rows += rows.size();
    s.unreadable = rows.end < sealed ? rows.end : kNoPosition;
  }
  seal_ahead(s, frontier_rule(s, rows_end));
  encode_pending();
}

void CudaRun::flush(RequestState& s, int frontier) {
  for (const PositionRange& range : block_cuts(config_, s.prompt_length, s.encoded, frontier)) {
    if (range.begin >= s.encoded_ahead) seal(s, range);
    pending_releases_.emplace_back(&s, range);
    s.encoded = range.end;
  }
  // The planted fault: the next block is encoded beside its BF16 rows, where the kernels that ignore the frontier find it.
  const PositionRange next{s.encoded, s.encoded + kGroupSize};
  const bool ahead = planted(Fault::tail_read_as_encoded) && config_.q().enabled && next.begin >= s.encoded_ahead && next.end <= s.committed;
  if (ahead && next.begin % kPageTokens == 0) {
    seal(s, next);
    s.encoded_ahead = next.end;
  }
}

// The host has read which rows of the block executed which loop.
bool CudaRun::members_known(const RequestState& s, PositionRange block) const {
  if (config_.selects_tokens()) {
    for (int window = block.begin / config_.window(); window * config_.window() < std::min(block.end, s.prompt_length); ++window) {
      const auto w = static_cast<std::size_t>(window);
      if (s.active[2][w].empty() || s.active[3][w].empty()) return false;
    }
  }
  return !asynchronous() || !has_exit_rule() || block.end <= s.prompt_length + s.record.fed;
}

std::array<std::uint32_t, kLoops> CudaRun::largest_streams(const RequestState& s, PositionRange block) const {
  std::array<std::uint32_t, kLoops> rows{};
  for (int loop = 1; loop <= kLoops; ++loop) {
    int most = std::max(0, block.end - std::max(block.begin, s.prompt_length));
    for (int window = block.begin / config_.window(); window * config_.window() < std::min(block.end, s.prompt_length); ++window) {
      const PositionRange range = window_range(window, s.prompt_length, config_.window());
      most += std::min(window_rows(s, window, loop), std::min(range.end, block.end) - std::max(range.begin, block.begin));
    }
    rows[static_cast<std::size_t>(loop - 1)] = static_cast<std::uint32_t>(most);
  }
  return rows;
}

void CudaRun::encode(RequestState& s, PositionRange block, int loop_first, int loop_last, const std::array<std::uint32_t, kLoops>& capacity,
                     bool members_known) {
  pending_encodes_.push_back(kv_.prepare_encode(s.slot, block, loop_first, loop_last, capacity, members_known));
}

// One launch for every block and stream that became due in this step; then the BF16 pages that held them are free.
void CudaRun::encode_pending() {
  if (pending_encodes_.empty() && pending_releases_.empty() && pending_rewrites_.empty()) return;
  kv_.upload(ticket_->arena);
  launch_encoding(encode_tasks_.upload<EncodeTask>(pending_encodes_, ticket_->arena, stream_), pending_encodes_.size());
  pending_encodes_.clear();
  residual_encode_again(encoding_of(rewrite_tasks_.upload<EncodeTask>(pending_rewrites_, ticket_->arena, stream_), pending_rewrites_.size()), stream_);
  pending_rewrites_.clear();
  bool decoding = false;
  for (const auto& [request, range] : std::exchange(pending_releases_, {})) {
    for (int loop = 1; loop <= config_.loops(); ++loop) kv_.release_planes(request->slot, loop, range);
    decoding |= request->committed > 0;
  }
  // Between windows of a prompt the pages serve the next window; after it nobody needs them soon.
  if (decoding) kv_.trim();
}

ResidualEncodeArguments CudaRun::encoding_of(const EncodeTask* tasks, std::size_t count) {
  ResidualEncodeArguments arguments;
  arguments.kv = kv_.view();
  arguments.tasks = tasks;
  arguments.task_count = static_cast<int>(count);
  arguments.numeric_fault = numeric_fault_.as<std::uint64_t>();
  arguments.fault = options_.fault;
  return arguments;
}

// Of tasks on the device. Ranks are counted there: rows of a block may be known nowhere else.
void CudaRun::launch_encoding(const EncodeTask* blocks, std::size_t count) {
  const ResidualEncodeArguments arguments = encoding_of(blocks, count);
  rank_rows(arguments.kv, arguments.tasks, arguments.task_count, stream_);
  residual_encode(arguments, stream_);
}

}  // namespace loopgauge::optimized
