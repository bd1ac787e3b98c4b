// SPDX-License-Identifier: Apache-2.0
// What every part of a run of the reference works with: the model, the configuration, the observers, and the pools that requests share.
#pragma once

#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "models/executor.hpp"
#include "models/model_config.hpp"
#include "reference/ops/attention.hpp"
#include "reference/ops/rope.hpp"
#include "reference/run/attention_references.hpp"
#include "reference/run/prefix_store.hpp"
#include "reference/run/request_state.hpp"
#include "reference/weights.hpp"

namespace loopgauge::reference {

// The result of a row, or of the prompt, until it is read.
template <class Real>
struct RowResult {
  int request = 0;
  int generation = 0;
  int position = 0;        // the last of the prompt, or of a decode row
  int depth = kLoops;      // loops that the row executed
  std::int32_t token = 0;  // the greedy one
  std::vector<Real> logits;
  StepKeys keys;
  std::optional<SpeculationRound> round = {};  // that ends with this result
};

// What one submission leaves to be read.
template <class Real>
struct Ticket {
  int submission = 0;
  std::vector<RowResult<Real>> results;
};

template <class P>
struct RunContext {
  using Real = typename P::Real;

  const ModelConfig& model;
  const std::string& model_sha256;
  const Weights<Real>& weights;
  const Trace& trace;
  const EffectiveConfig config;
  const RunOptions options;
  const RopeTable<P> rope_table;
  const Real scale;
  int submission = 0;   // index of the one that runs
  int generations = 0;  // requests begun so far
  AttentionReferencePool<Real> references;
  PrefixStore<Real> prefixes;
  Ticket<Real> ticket;  // of the submission that runs
  RunCounters counters;
  std::map<std::pair<int, int>, std::vector<int>> pooled_selection;  // Fault::scores_across_requests: (request, window) -> active rows

  bool speculates() const { return options.speculation.kind != SpeculationKind::none; }
  bool planted(Fault fault) const { return options.fault == fault; }

  // One row of an operation goes to the observer.
  void tap_row(std::string_view operation, const RequestState<P>& s, int loop, int layer, int position, const Real* values,
               std::ptrdiff_t count) const {
    if (options.tap == nullptr) return;
    options.tap->record({submission, s.index, position, loop, layer, operation}, std::vector<float>(values, values + count));
  }
  void tap(std::string_view operation, const RequestState<P>& s, int loop, int layer, std::span<const int> positions,
           const Matrix<Real>& rows) const {
    if (options.tap == nullptr) return;
    for (std::size_t t = 0; t < positions.size(); ++t) {
      tap_row(operation, s, loop, layer, positions[t], rows.row(static_cast<std::ptrdiff_t>(t)).data(), rows.cols());
    }
  }

  // Of a decision-forced replay; null otherwise.
  const RequestRecord* decisions(const RequestState<P>& s) const {
    return options.decisions == nullptr ? nullptr : &options.decisions->requests.at(static_cast<std::size_t>(s.index));
  }
};

template <class P>
std::string name(const RequestState<P>& s) {
  return "request " + std::to_string(s.index);
}

// The decode row on its way at `position`.
template <class P>
DecodeRow<P>& decode_row(RequestState<P>& s, int position) {
  auto& live = s.held->live;
  return live.empty() ? s.held->row : live.at(static_cast<std::size_t>(position - live.front().position));
}

// H[loop] of a row that is on its way: of an unfinished window or of a decode row. Of a prompt that was handed over it is the last row's H of
// the last loop. [hidden]
template <class P>
typename P::Real* hidden_row(const RunContext<P>& run, RequestState<P>& s, int loop, int position) {
  const std::size_t r = static_cast<std::size_t>(loop - 1);
  if (position >= s.prompt_length) {
    auto& row = decode_row(s, position).hidden[r];
    if (row.empty()) row.assign(static_cast<std::size_t>(run.model.hidden), std::numeric_limits<typename P::Real>::quiet_NaN());
    return row.data();
  }
  if (s.held->windows.empty() && !s.held->final_hidden.empty()) return s.held->final_hidden.data();
  WindowState<typename P::Real>& window = s.held->windows.at(position / run.config.window());
  return window.hidden[r].row(position - window.positions.begin).data();
}

}  // namespace loopgauge::reference
