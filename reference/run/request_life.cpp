// SPDX-License-Identifier: Apache-2.0
#include "reference/run/request_life.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "models/error.hpp"
#include "reference/ops/rms_norm.hpp"
#include "reference/ops/token_selection.hpp"
#include "reference/run/encoding.hpp"
#include "reference/run/observation.hpp"
#include "reference/run/recurrent_model.hpp"
#include "reference/run/speculation.hpp"
#include "reference/run/token_choice.hpp"

namespace loopgauge::reference {
namespace {

// ------------------------------------------------------------------------------------------------------------------------- prefill

template <class P>
std::vector<int> select_window(RunContext<P>& run, RequestState<P>& s, int window, int loop) {
  WindowState<typename P::Real>& state = s.held->windows.at(window);
  auto& scores = state.scores[static_cast<std::size_t>(loop - 3)];
  scores = score_window(run, s, window, loop);
  for (int position = state.positions.begin; position < state.positions.end; ++position) {
    const auto& score = scores[static_cast<std::size_t>(position - state.positions.begin)];
    if (!std::isnan(score)) run.tap_row("update_score", s, loop, -1, position, &score, 1);
  }
  if (const RequestRecord* forced = run.decisions(s)) {
    const auto& all = forced->active[static_cast<std::size_t>(loop - 3)];
    const std::vector<int> given(std::lower_bound(all.begin(), all.end(), state.positions.begin),
                                 std::lower_bound(all.begin(), all.end(), state.positions.end));
    if (!given.empty()) return given;
  }
  if (const auto pooled = run.pooled_selection.find({s.index, window}); pooled != run.pooled_selection.end()) return pooled->second;
  const std::vector<int>& candidates = state.active[static_cast<std::size_t>(loop - 2)];
  using Real = typename P::Real;
  const int reserved = run.config.reserved_position(s.prompt_length);
  const auto score_of = [&](int position) {
    return position == reserved ? std::numeric_limits<Real>::infinity()
                                : scores[static_cast<std::size_t>(position - state.positions.begin)];
  };
  int rows = state.positions.size();
  if (run.planted(Fault::budget_of_previous_set)) rows = static_cast<int>(candidates.size());
  const int count = budget(run.config.t().retention_bp[static_cast<std::size_t>(loop - 1)], rows);
  if (run.planted(Fault::reserved_last_token)) {
    std::vector<int> selected = select_tokens(std::span<const int>(candidates).first(candidates.size() - 1), count - 1, score_of);
    selected.push_back(candidates.back());
    return selected;
  }
  return select_tokens(std::span<const int>(candidates), count, score_of);
}

// Rows that are not active keep the hidden bits and inherit K/V of the loop before (S-TSEL-7).
template <class P>
void inherit_inactive(RunContext<P>& run, RequestState<P>& s, int window, int loop) {
  const WindowState<typename P::Real>& state = s.held->windows.at(window);
  const auto& active = state.active[static_cast<std::size_t>(loop - 1)];
  for (int position = state.positions.begin; position < state.positions.end; ++position) {
    if (std::binary_search(active.begin(), active.end(), position)) continue;
    Matrix<typename P::Real> row = Eigen::Map<Matrix<typename P::Real>>(hidden_row(run, s, loop - 1, position), 1, run.model.hidden);
    if (run.planted(Fault::double_final_norm)) rms_norm<P>(row, run.weights.norm, run.model.rms_norm_eps, row);
    std::copy_n(row.data(), run.model.hidden, hidden_row(run, s, loop, position));
    s.held->kv.inherit_row(loop, position);
  }
}

// Decides which positions of the window execute the loop and lets the others inherit.
template <class P>
void begin_window_loop(RunContext<P>& run, RequestState<P>& s, int window, int loop) {
  auto& windows = s.held->windows;
  if (loop == 1) {
    const PositionRange range = window_range(window, s.prompt_length, run.config.window());
    windows.insert_or_assign(window, WindowState<typename P::Real>(range, run.config.loops(), run.model.hidden));
  }
  WindowState<typename P::Real>& state = windows.at(window);
  auto& active = state.active[static_cast<std::size_t>(loop - 1)];
  if (loop >= 3 && run.config.selects_tokens()) {
    active = select_window(run, s, window, loop);
    inherit_inactive(run, s, window, loop);
  } else {
    active.clear();
    for (int position = state.positions.begin; position < state.positions.end; ++position) active.push_back(position);
  }
}

template <class P>
std::vector<int> active_rows(const RequestState<P>& s, int window, int loop, PositionRange piece) {
  std::vector<int> positions;
  for (const int position : s.held->windows.at(window).active[static_cast<std::size_t>(loop - 1)]) {
    if (position >= piece.begin && position < piece.end) positions.push_back(position);
  }
  return positions;
}

// Of a row that nothing can undo: its logits choose the next token.
template <class P>
void emit_chosen(RunContext<P>& run, RequestState<P>& s, int position, int depth) {
  std::vector<typename P::Real> logits = logits_of(run, s, depth, position);
  const std::int32_t token = choose_token<P>(*s.request, position + 1, logits).token;
  emit(run, s, position, depth, std::move(logits), token);
}

template <class P>
void complete_prompt(RunContext<P>& run, RequestState<P>& s) {
  s.held->committed = s.prompt_length;
  encode_to(run, s, frontier_rule(run, s, s.prompt_length));
  if (run.options.stage == Stage::prefill) {
    const auto* row = hidden_row(run, s, run.config.loops(), s.prompt_length - 1);
    s.held->final_hidden.assign(row, row + run.model.hidden);
    return;
  }
  emit_chosen(run, s, s.prompt_length - 1, run.config.loops());
}

template <class P>
void complete_window_loop(RunContext<P>& run, RequestState<P>& s, int window, int loop) {
  RequestStorage<P>& h = *s.held;
  h.window_loops[static_cast<std::size_t>(window)] = loop;
  WindowState<typename P::Real>& state = h.windows.at(window);
  const bool full_window = state.positions.size() == run.config.window();
  if (run.config.q().enabled && run.config.q().policy == EncodingPolicy::streaming && full_window) encode_window_loop(run, s, window, loop);
  if (loop < run.config.loops()) return;
  for (int position = state.positions.begin; position < state.positions.end; ++position) observe_position(run, s, position);
  observe_decisions(run, s, state);
  if (state.positions.end == s.prompt_length) complete_prompt(run, s);
  h.windows.erase(window);
}

template <class P>
void prefill(RunContext<P>& run, RequestState<P>& s, const WorkItem& item) {
  for (int window = item.begin / run.config.window(); window * run.config.window() < item.end; ++window) {
    const PositionRange range = window_range(window, s.prompt_length, run.config.window());
    const PositionRange piece{std::max(range.begin, item.begin), std::min(range.end, item.end)};
    for (int loop = item.loop_first; loop <= item.loop_last; ++loop) {
      if (piece.begin == range.begin) begin_window_loop(run, s, window, loop);
      run_rows(run, s, active_rows(s, window, loop, piece), loop, RowKind::prefill);
      if (piece.end == range.end) complete_window_loop(run, s, window, loop);
    }
  }
}

// -------------------------------------------------------------------------------------------------------------------------- decode

template <class P>
void begin_row(RunContext<P>& run, RequestState<P>& s, int position) {
  RequestStorage<P>& h = *s.held;
  const std::size_t step = static_cast<std::size_t>(position - s.prompt_length);
  DecodeRow<P> row;
  row.position = position;
  row.incarnation = h.incarnations++;
  row.token = s.request->teacher_forced() ? s.request->forced[step] : h.tokens.at(step);
  if (h.token_lost) row.token = (row.token + 1) % run.model.vocab;
  h.token_lost = false;
  row.last_loop = run.config.exit().mode == ExitMode::trace ? s.request->exit_depths.at(step) : run.config.loops();
  if (const RequestRecord* forced = run.decisions(s);
      forced != nullptr && step < forced->exit_depths.size() && forced->exit_depths[step] != 0) {
    row.last_loop = forced->exit_depths[step];
    row.depth_given = true;
  }
  h.row = std::move(row);
  s.row_keys.clear();
}

// The exit rule's verdict after a loop: the last loop of the row as far as it is known (S-EXIT-2..4).
template <class P>
int decide_last_loop(const RunContext<P>& run, RequestState<P>& s, int loop) {
  DecodeRow<P>& row = s.held->row;
  const ExitMode mode = run.config.exit().mode;
  if (mode == ExitMode::full || mode == ExitMode::trace || row.depth_given) return row.last_loop;
  const auto gate = gate_of(run, s, loop, row.position);
  run.tap_row("exit_gate", s, loop, -1, row.position, &gate, 1);
  if (!std::isfinite(gate)) {
    throw NumericError(name(s) + ", position " + std::to_string(row.position) + ", loop " + std::to_string(loop) +
                       ": the exit gate is not finite");
  }
  if (!row.hazard.fires(run.config.exit(), loop, gate)) return row.last_loop;
  const int decided = mode == ExitMode::threshold ? loop : std::min(run.config.loops(), loop + 1);
  return std::min(row.last_loop, decided);  // the first decision stands
}

// The row has executed its last loop: deeper planes inherit, its reference retires, its logits choose the next token.
template <class P>
void finish_row(RunContext<P>& run, RequestState<P>& s) {
  RequestStorage<P>& h = *s.held;
  const int position = h.row.position, depth = h.row.last_loop;
  for (int loop = depth + 1; loop <= run.config.loops(); ++loop) {
    std::copy_n(hidden_row(run, s, depth, position), run.model.hidden, hidden_row(run, s, loop, position));
    h.kv.inherit_row(loop, position);
  }
  retire_reference(run, s);
  h.row.finished = true;
  ++h.rows_finished;
  observe_position(run, s, position);
  // What later rows see encoded under `serial_aligned` does not wait for the commit. Blocks of rows past the end are dropped with them.
  if (run.config.q().timing == EncodingTiming::serial_aligned) encode_to(run, s, frontier_rule(run, s, position + 1));
  emit_chosen(run, s, position, depth);
  commit_known_rows(run, s);
}

template <class P>
void run_row_loops(RunContext<P>& run, RequestState<P>& s, const WorkItem& item) {
  DecodeRow<P>& row = s.held->row;
  for (int loop = item.loop_first; loop <= item.loop_last && !row.finished; ++loop) {
    if (loop == 2 && run.config.s().enabled) row.reference = run.references.acquire(s.generation, row.incarnation);
    const int position[] = {item.begin};
    run_rows(run, s, position, loop, RowKind::decode);
    row.completed_loops = loop;
    row.last_loop = decide_last_loop(run, s, loop);
    if (loop == row.last_loop) {
      finish_row(run, s);
    } else if (loop == 3 && row.reference >= 0 && run.planted(Fault::slot_reused_early)) {
      run.references.retire(row.reference);
      row.reference_given_away = true;
    }
  }
}

template <class P>
void decode(RunContext<P>& run, RequestState<P>& s, const WorkItem& item) {
  RequestStorage<P>& h = *s.held;
  const int step = item.begin - s.prompt_length;
  if (step == h.rows_finished && item.loop_first == 1) begin_row(run, s, item.begin);
  if (h.row.position != item.begin || h.row.completed_loops != item.loop_first - 1) {
    throw InternalError(name(s) + ": decode item at position " + std::to_string(item.begin) + ", loop " + std::to_string(item.loop_first) +
                        " out of turn");
  }
  try {
    run_row_loops(run, s, item);
  } catch (const NumericError& error) {
    // A row that proves to lie past the end of the sequence is no part of the run, its errors neither.
    if (token_is_known(s, step)) throw;
    s.late_error = error.what();
    s.late_error_step = step;
  }
}

}  // namespace

template <class P>
std::unique_ptr<RequestStorage<P>> make_storage(const RunContext<P>& run, const RequestState<P>& s) {
  return std::make_unique<RequestStorage<P>>(run.model, s.capacity, window_count(s.prompt_length, run.config.window()), run.config.q().enabled);
}

template <class P>
void allocate_storage(const RunContext<P>& run, RequestState<P>& s) {
  s.held = make_storage(run, s);
}

template <class P>
void begin_request(RunContext<P>& run, RequestState<P>& s) {
  allocate_storage(run, s);
  s.generation = run.generations++;
  s.phase = RequestState<P>::Phase::live;
}

template <class P>
bool is_work(const RequestState<P>& s, const WorkItem& item) {
  if (s.phase == RequestState<P>::Phase::ended || !s.late_error.empty()) return false;
  if (item.kind != RowKind::prefill && item.kind != RowKind::decode) return is_speculative_work(s, item);
  return item.kind == RowKind::prefill || s.held == nullptr || item.begin - s.prompt_length >= s.held->rows_finished;
}

template <class P>
void emit_prompt(RunContext<P>& run, RequestState<P>& s) {
  emit_chosen(run, s, s.prompt_length - 1, run.config.loops());
}

template <class P>
void emit(RunContext<P>& run, RequestState<P>& s, int position, int depth, std::vector<typename P::Real> logits, std::int32_t token) {
  RowResult<typename P::Real> result;
  result.request = s.index;
  result.generation = s.generation;
  result.position = position;
  result.depth = depth;
  result.logits = std::move(logits);
  result.token = token;
  if (const auto keys = s.row_keys.find(position); keys != s.row_keys.end()) {
    result.keys = std::move(keys->second);
    s.row_keys.erase(keys);
  }
  if (!s.request->teacher_forced()) {
    s.held->tokens.push_back(token);
    s.held->ended |= token == s.request->eos_token_id;
  }
  run.ticket.results.push_back(std::move(result));
}

template <class P>
bool token_is_known(const RequestState<P>& s, int step) {
  if (s.request->teacher_forced()) return true;
  const auto& tokens = s.record.tokens;
  return static_cast<std::size_t>(step) < tokens.size() && tokens[static_cast<std::size_t>(step)] != s.request->eos_token_id;
}

template <class P>
void retire_reference(RunContext<P>& run, RequestState<P>& s) {
  DecodeRow<P>& row = s.held->row;
  if (row.reference >= 0 && !row.reference_given_away) run.references.retire(row.reference);
  row.reference = -1;
}

template <class P>
void advance(RunContext<P>& run, RequestState<P>& s, const WorkItem& item) {
  if (item.kind == RowKind::prefill)
    prefill(run, s, item);
  else if (item.kind == RowKind::decode)
    decode(run, s, item);
  else
    speculate(run, s, item);
}

template <class P>
std::vector<typename P::Real> score_window(RunContext<P>& run, RequestState<P>& s, int window, int loop) {
  using Real = typename P::Real;
  const WindowState<Real>& state = s.held->windows.at(window);
  const int older = run.planted(Fault::aliased_hidden_rows) && loop == 4 ? loop - 1 : loop - 2;
  std::vector<Real> scores(static_cast<std::size_t>(state.positions.size()), std::numeric_limits<Real>::quiet_NaN());
  for (const int position : state.active[static_cast<std::size_t>(loop - 2)]) {
    const Real score = update_score<P>(hidden_row(run, s, loop - 1, position), hidden_row(run, s, older, position), run.model.hidden);
    if (!std::isfinite(score)) {
      throw NumericError(name(s) + ", window " + std::to_string(window) + ", loop " + std::to_string(loop) + ", position " +
                         std::to_string(position) + ": the selection score is not finite");
    }
    scores[static_cast<std::size_t>(position - state.positions.begin)] = score;
  }
  return scores;
}

template <class P>
void break_off(RunContext<P>& run, RequestState<P>& s, const WorkItem& item) {
  RequestStorage<P>& h = *s.held;
  const int loop = item.loop_first, layers = std::max(1, run.model.layers / 2);
  if (item.kind == RowKind::decode) {
    if (loop == 1) begin_row(run, s, item.begin);
    if (loop == 2 && run.config.s().enabled) h.row.reference = run.references.acquire(s.generation, h.row.incarnation);
    const int position[] = {item.begin};
    run_rows(run, s, position, loop, RowKind::decode, layers);
    h.kv.poison({item.begin, item.end}, loop);
    return;
  }
  if (item.kind != RowKind::prefill) return break_off_speculation(run, s, item, layers);
  const int window = item.begin / run.config.window();
  const PositionRange range = window_range(window, s.prompt_length, run.config.window());
  if (item.begin == range.begin) begin_window_loop(run, s, window, loop);
  run_rows(run, s, active_rows(s, window, loop, {item.begin, std::min(range.end, item.end)}), loop, RowKind::prefill, layers);
  // The window starts over in any case, its earlier pieces too. A decision of the failed submission is none.
  h.kv.poison(range, loop);
  WindowState<typename P::Real>& state = h.windows.at(window);
  for (int r = loop; r <= run.config.loops(); ++r)
    state.hidden[static_cast<std::size_t>(r - 1)].setConstant(std::numeric_limits<typename P::Real>::quiet_NaN());
  if (item.begin == range.begin) state.active[static_cast<std::size_t>(loop - 1)].clear();
}

template <class P>
void commit_known_rows(RunContext<P>& run, RequestState<P>& s) {
  if (s.held == nullptr) return;  // a preempted request commits when it is back
  RequestStorage<P>& h = *s.held;
  while (h.committed >= s.prompt_length && h.committed < s.prompt_length + h.rows_finished &&
         (run.speculates() || token_is_known(s, h.committed - s.prompt_length))) {
    if (run.config.s().enabled && h.executed_loops[static_cast<std::size_t>(h.committed)] == 2) ++run.counters.unused_statistics_rows;
    ++h.committed;
    encode_to(run, s, frontier_rule(run, s, h.committed));
  }
}

#define LOOPGAUGE_INSTANTIATE(P)                                                 \
  template std::unique_ptr<RequestStorage<P>> make_storage<P>(const RunContext<P>&, const RequestState<P>&); \
  template void allocate_storage<P>(const RunContext<P>&, RequestState<P>&);     \
  template void begin_request<P>(RunContext<P>&, RequestState<P>&);              \
  template void advance<P>(RunContext<P>&, RequestState<P>&, const WorkItem&);   \
  template bool is_work<P>(const RequestState<P>&, const WorkItem&);             \
  template void emit_prompt<P>(RunContext<P>&, RequestState<P>&);                \
  template void emit<P>(RunContext<P>&, RequestState<P>&, int, int, std::vector<P::Real>, std::int32_t); \
  template bool token_is_known<P>(const RequestState<P>&, int);                  \
  template void retire_reference<P>(RunContext<P>&, RequestState<P>&);           \
  template void break_off<P>(RunContext<P>&, RequestState<P>&, const WorkItem&); \
  template void commit_known_rows<P>(RunContext<P>&, RequestState<P>&);          \
  template std::vector<P::Real> score_window<P>(RunContext<P>&, RequestState<P>&, int, int);
LOOPGAUGE_FOR_EACH_PROFILE(LOOPGAUGE_INSTANTIATE)
#undef LOOPGAUGE_INSTANTIATE

}  // namespace loopgauge::reference
