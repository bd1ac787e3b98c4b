// SPDX-License-Identifier: Apache-2.0
// The reference: Ouro with FlashLoop as SPEC.md words it, one item of a plan after the other, one row like another. A row's result depends
// on the rows it reads and on nothing else, so every legal plan gives the same bits; nothing here looks at the mode.
//
// Reading order: prefill() and decode() are the life of a request; run_rows() is the model; attend() is the three kinds of attention;
// flush() and encode_block_stream() are the cache's encoding.
#include "reference/reference_executor.hpp"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <optional>

#include "models/error.hpp"
#include "reference/kv/block_encoder.hpp"
#include "reference/ops/embedding.hpp"
#include "reference/ops/head_argmax.hpp"
#include "reference/ops/linear.hpp"
#include "reference/ops/residual_add.hpp"
#include "reference/ops/rms_norm.hpp"
#include "reference/ops/rope.hpp"
#include "reference/ops/swiglu.hpp"
#include "reference/ops/token_selection.hpp"
#include "reference/request_state.hpp"
#include "reference/weights.hpp"

namespace loopgauge::reference {
namespace {

template <class Real>
std::vector<float> as_float(const Real* values, std::ptrdiff_t count) {
  return std::vector<float>(values, values + count);
}

template <class P>
class Run {
 public:
  using Real = typename P::Real;
  using State = RequestState<P>;
  using Reference = AttentionReference<Real>;

  Run(const ModelConfig& model, const Weights<Real>& weights, const Trace& trace, const EffectiveConfig& config, const RunOptions& options)
      : model_(model),
        weights_(weights),
        trace_(trace),
        config_(config),
        options_(options),
        rope_table_(longest_sequence(trace), model.head_dim, model.rope_theta),
        scale_(attention_scale<P>(model.head_dim)) {
    for (const TraceRequest& request : trace.requests) add_request(request);
  }

  void submit(const Submission& submission) {
    for (const WorkItem& item : submission.items) {
      State& s = requests_.at(static_cast<std::size_t>(item.request));
      if (item.kind == RowKind::prefill) prefill(s, item);
      else decode(s, item);
    }
    ++submission_;
  }

  RunRecord finish();

 private:
  static int longest_sequence(const Trace& trace) {
    int longest = 0;
    for (const TraceRequest& request : trace.requests) longest = std::max(longest, request.prompt_length() + fed_tokens(request));
    return longest;
  }

  void add_request(const TraceRequest& request);

  // ---- life of a request ----
  void prefill(State& s, const WorkItem& item);
  void begin_window_loop(State& s, int window, int loop);
  std::vector<int> select_window(State& s, int window, int loop);
  void inherit_inactive(State& s, int window, int loop);
  void complete_window_loop(State& s, int window, int loop);
  void complete_prompt(State& s);
  void decode(State& s, const WorkItem& item);
  int decide_last_loop(State& s, int loop);
  void commit(State& s);
  void emit(State& s, int position, int depth);

  // ---- the model ----
  void run_rows(State& s, std::span<const int> positions, int loop, RowKind kind);
  void attend(State& s, std::span<const int> positions, int layer, int loop, RowKind kind, const Matrix<Real>& q, Matrix<Real>& output);
  void attend_decode_row(State& s, int position, int layer, int loop, const Real* q, Real* output);
  std::string capture_reference(State& s, int position, int layer, int head, const Real* q, const PlaneView<Real>& keys,
                         const PlaneView<Real>& values, HeadReference<Real>& reference);
  Real gate_of(const State& s, int loop, int position) const;
  void head(const State& s, int loop, int position, std::vector<Real>& logits) const;

  // ---- encoding ----
  int frontier_rule(const State& s, int committed) const;
  int visible_frontier(const State& s, int position, RowKind kind) const;
  void flush(State& s, int frontier);
  void encode_block_stream(State& s, CodecBlock& block, int loop);

  // ---- observation ----
  void tap(std::string_view operation, const State& s, int loop, int layer, std::span<const int> positions, const Matrix<Real>& rows) const;
  void tap_row(std::string_view operation, const State& s, int loop, int layer, int position, const Real* values, std::ptrdiff_t count) const;
  void store_row(State& s, int loop, int position, const Real* row) {
    std::copy(row, row + model_.hidden, s.hidden[static_cast<std::size_t>(loop - 1)].row(position).data());
  }
  const Real* hidden_row(const State& s, int loop, int position) const { return s.hidden[static_cast<std::size_t>(loop - 1)].row(position).data(); }
  bool planted(Fault fault) const { return options_.fault == fault; }
  std::string name(const State& s) const { return "request " + std::to_string(s.index); }
  const RequestRecord* decisions(const State& s) const {
    return options_.decisions == nullptr ? nullptr : &options_.decisions->requests.at(static_cast<std::size_t>(s.index));
  }

  const ModelConfig& model_;
  const Weights<Real>& weights_;
  const Trace& trace_;
  const EffectiveConfig config_;
  const RunOptions options_;
  const RopeTable<P> rope_table_;
  const Real scale_;
  std::vector<State> requests_;
  int submission_ = 0;
};

template <class P>
void Run<P>::add_request(const TraceRequest& request) {
  State s(model_, request.prompt_length() + fed_tokens(request), config_.q().enabled);
  s.request = &request;
  s.index = static_cast<int>(requests_.size());
  s.prompt_length = request.prompt_length();
  for (int loop = 1; loop <= config_.loops(); ++loop) {
    s.hidden[static_cast<std::size_t>(loop - 1)] = Matrix<Real>::Constant(s.capacity, model_.hidden, std::numeric_limits<Real>::quiet_NaN());
    s.active[static_cast<std::size_t>(loop - 1)].resize(static_cast<std::size_t>(window_count(s.prompt_length, config_.window())));
  }
  s.executed_loops.assign(static_cast<std::size_t>(s.capacity), 0);
  s.window_loops.assign(static_cast<std::size_t>(window_count(s.prompt_length, config_.window())), 0);
  s.reference.heads.resize(static_cast<std::size_t>(model_.layers * model_.heads));
  s.record.prompt_length = s.prompt_length;
  s.record.tokens = request.forced;
  if (config_.selects_tokens()) {
    for (auto& scores : s.record.scores) scores.assign(static_cast<std::size_t>(s.prompt_length), std::numeric_limits<float>::quiet_NaN());
  }
  requests_.push_back(std::move(s));
}

// ---------------------------------------------------------------------------------------------------------------- life of a request

template <class P>
void Run<P>::prefill(State& s, const WorkItem& item) {
  for (int window = item.begin / config_.window(); window * config_.window() < item.end; ++window) {
    const PositionRange range = window_range(window, s.prompt_length, config_.window());
    const PositionRange piece{std::max(range.begin, item.begin), std::min(range.end, item.end)};
    for (int loop = item.loop_first; loop <= item.loop_last; ++loop) {
      if (piece.begin == range.begin) begin_window_loop(s, window, loop);
      std::vector<int> positions;
      for (const int position : s.active[static_cast<std::size_t>(loop - 1)][static_cast<std::size_t>(window)]) {
        if (position >= piece.begin && position < piece.end) positions.push_back(position);
      }
      run_rows(s, positions, loop, RowKind::prefill);
      if (piece.end == range.end) complete_window_loop(s, window, loop);
    }
  }
}

// Decides which positions of the window execute the loop and lets the others inherit (S-TSEL-2, S-TSEL-7).
template <class P>
void Run<P>::begin_window_loop(State& s, int window, int loop) {
  auto& active = s.active[static_cast<std::size_t>(loop - 1)][static_cast<std::size_t>(window)];
  if (loop >= 3 && config_.selects_tokens()) {
    active = select_window(s, window, loop);
    auto& record = s.record.active[static_cast<std::size_t>(loop - 3)];
    record.insert(record.end(), active.begin(), active.end());
    inherit_inactive(s, window, loop);
  } else {
    const PositionRange range = window_range(window, s.prompt_length, config_.window());
    active.clear();
    for (int position = range.begin; position < range.end; ++position) active.push_back(position);
  }
}

template <class P>
std::vector<int> Run<P>::select_window(State& s, int window, int loop) {
  const std::vector<int>& candidates = s.active[static_cast<std::size_t>(loop - 2)][static_cast<std::size_t>(window)];
  const PositionRange range = window_range(window, s.prompt_length, config_.window());
  std::map<int, Real> scores;
  for (const int position : candidates) {
    const int older = planted(Fault::aliased_hidden_rows) && loop == 4 ? loop - 1 : loop - 2;
    const Real score = update_score<P>(hidden_row(s, loop - 1, position), hidden_row(s, older, position), model_.hidden);
    if (!std::isfinite(score)) {
      throw NumericError(name(s) + ", window " + std::to_string(window) + ", loop " + std::to_string(loop) + ", position " + std::to_string(position) +
                         ": the selection score is not finite");
    }
    scores[position] = score;
    s.record.scores[static_cast<std::size_t>(loop - 3)][static_cast<std::size_t>(position)] = static_cast<float>(score);
    tap_row("update_score", s, loop, -1, position, &score, 1);
  }
  if (const RequestRecord* forced = decisions(s)) {
    const auto& all = forced->active[static_cast<std::size_t>(loop - 3)];
    return {std::lower_bound(all.begin(), all.end(), range.begin), std::lower_bound(all.begin(), all.end(), range.end)};
  }
  const int count = budget(config_.t().retention_bp[static_cast<std::size_t>(loop - 1)], range.size());
  return select_tokens(std::span<const int>(candidates), count, [&](int position) { return scores.at(position); });
}

template <class P>
void Run<P>::inherit_inactive(State& s, int window, int loop) {
  const auto& active = s.active[static_cast<std::size_t>(loop - 1)][static_cast<std::size_t>(window)];
  const PositionRange range = window_range(window, s.prompt_length, config_.window());
  for (int position = range.begin; position < range.end; ++position) {
    if (std::binary_search(active.begin(), active.end(), position)) continue;
    store_row(s, loop, position, hidden_row(s, loop - 1, position));
    if (planted(Fault::double_final_norm)) {
      Matrix<Real> again = s.hidden[static_cast<std::size_t>(loop - 1)].row(position);
      rms_norm<P>(again, weights_.norm, model_.rms_norm_eps, again);
      store_row(s, loop, position, again.data());
    }
    s.kv.inherit_row(loop, position);
  }
}

template <class P>
void Run<P>::complete_window_loop(State& s, int window, int loop) {
  const PositionRange range = window_range(window, s.prompt_length, config_.window());
  s.window_loops[static_cast<std::size_t>(window)] = loop;
  const bool full_window = range.size() == config_.window();
  if (config_.q().enabled && config_.q().policy == EncodingPolicy::streaming && full_window) {
    if (loop == 1) s.record.blocks.push_back({range, {}});
    encode_block_stream(s, s.record.blocks.at(static_cast<std::size_t>(window)), loop);  // windows complete a loop in ascending order
    if (loop == config_.loops()) s.encoded = range.end;
  }
  if (loop == config_.loops() && range.end == s.prompt_length) complete_prompt(s);
}

template <class P>
void Run<P>::complete_prompt(State& s) {
  s.committed = s.prompt_length;
  flush(s, frontier_rule(s, s.committed));
  emit(s, s.prompt_length - 1, config_.loops());
}

template <class P>
void Run<P>::decode(State& s, const WorkItem& item) {
  const std::size_t step = static_cast<std::size_t>(item.begin - s.prompt_length);
  if (s.stopped || step >= s.record.tokens.size()) return;  // past EOS: planned, never emitted
  if (item.loop_first == 1) {
    s.row = DecodeRow<P>{};
    s.row.position = item.begin;
    s.row.incarnation = s.incarnations++;
    s.row.last_loop = config_.exit().mode == ExitMode::trace ? s.request->exit_depths.at(step) : config_.loops();
    if (const RequestRecord* forced = decisions(s); forced != nullptr && step < forced->exit_depths.size() && forced->exit_depths[step] != 0) {
      s.row.last_loop = forced->exit_depths[step];
      s.row.depth_given = true;
    }
    s.record.keys.emplace_back();
    if (config_.s().enabled) {
      s.reference.state = Reference::State::empty;
      s.reference.position = s.row.position;
      s.reference.incarnation = s.row.incarnation;
    }
  }
  if (s.row.position != item.begin) throw InternalError(name(s) + ": decode item at position " + std::to_string(item.begin) + " out of turn");
  for (int loop = item.loop_first; loop <= item.loop_last && !s.row.committed; ++loop) {
    const int position[] = {item.begin};
    run_rows(s, position, loop, RowKind::decode);
    s.row.completed_loops = loop;
    s.row.last_loop = decide_last_loop(s, loop);
    if (loop == s.row.last_loop) commit(s);
  }
}

// The exit rule's verdict after a loop: the last loop of the row as far as it is known (S-EXIT-2..4).
template <class P>
int Run<P>::decide_last_loop(State& s, int loop) {
  const ExitMode mode = config_.exit().mode;
  if (mode == ExitMode::full || mode == ExitMode::trace || s.row.depth_given) return s.row.last_loop;
  const Real gate = gate_of(s, loop, s.row.position);
  if (!std::isfinite(gate)) {
    throw NumericError(name(s) + ", position " + std::to_string(s.row.position) + ", loop " + std::to_string(loop) + ": the exit gate is not finite");
  }
  const bool fires = s.row.hazard.fires(config_.exit(), loop, gate);
  if (!fires) return s.row.last_loop;
  const int decided = mode == ExitMode::threshold ? loop : std::min(config_.loops(), loop + 1);
  return std::min(s.row.last_loop, decided);  // the first decision stands
}

// The row has executed all its loops: deeper planes inherit, the position becomes final, the tail may flush.
template <class P>
void Run<P>::commit(State& s) {
  const int position = s.row.position, depth = s.row.last_loop;
  for (int loop = depth + 1; loop <= config_.loops(); ++loop) {
    store_row(s, loop, position, hidden_row(s, depth, position));
    s.kv.inherit_row(loop, position);
  }
  s.record.exit_depths.push_back(static_cast<std::uint8_t>(depth));
  s.reference.state = Reference::State::retired;
  s.row.committed = true;
  s.committed = position + 1;
  ++s.record.fed;
  flush(s, frontier_rule(s, s.committed));
  emit(s, position, depth);
}

// Logits of the last committed row and, in a free run, the token they choose.
template <class P>
void Run<P>::emit(State& s, int position, int depth) {
  std::vector<Real> logits;
  head(s, depth, position, logits);
  for (std::size_t i = 0; i < logits.size(); ++i) {
    if (!std::isfinite(logits[i])) {
      throw NumericError(name(s) + ", position " + std::to_string(position) + ": logit of token " + std::to_string(i) + " is not finite");
    }
  }
  tap_row("logits", s, depth, -1, position, logits.data(), model_.vocab);
  s.record.logits.data.insert(s.record.logits.data.end(), logits.begin(), logits.end());
  s.record.encoded_frontier.push_back(s.encoded);
  if (s.request->teacher_forced() || static_cast<int>(s.record.tokens.size()) >= s.request->max_new_tokens) return;
  const int token = argmax(std::span<const Real>(logits));
  s.record.tokens.push_back(token);
  s.stopped = token == s.request->eos_token_id;
}

// ------------------------------------------------------------------------------------------------------------------------ the model

// One loop of the shared layers for rows of one request (S-MODEL-1..3). K and V of all rows are written before any row attends.
template <class P>
void Run<P>::run_rows(State& s, std::span<const int> positions, int loop, RowKind kind) {
  if (positions.empty()) return;
  Matrix<Real> x, normed, q, k, v, attention, projected, gate, up, hidden;
  if (loop == 1) {
    std::vector<std::int32_t> tokens;
    for (const int p : positions) {
      tokens.push_back(p < s.prompt_length ? s.request->prompt[static_cast<std::size_t>(p)]
                                           : s.record.tokens[static_cast<std::size_t>(p - s.prompt_length)]);
    }
    embedding<Real>(tokens, weights_.embed_tokens, x);
    tap("embedding", s, 0, -1, positions, x);
  } else {
    x.resize(static_cast<std::ptrdiff_t>(positions.size()), model_.hidden);
    for (std::size_t t = 0; t < positions.size(); ++t) {
      x.row(static_cast<std::ptrdiff_t>(t)) = s.hidden[static_cast<std::size_t>(loop - 2)].row(positions[t]);
    }
  }

  const float eps = model_.rms_norm_eps;
  for (int layer = 0; layer < model_.layers; ++layer) {
    const auto& w = weights_.layers[static_cast<std::size_t>(layer)];
    const bool swapped = planted(Fault::swapped_norms);
    const Vector<Real>& after_attention = swapped ? w.post_attention_layernorm : w.input_layernorm_2;
    const Vector<Real>& before_mlp = swapped ? w.input_layernorm_2 : w.post_attention_layernorm;

    rms_norm<P>(x, w.input_layernorm, eps, normed);
    tap("rms_norm.input_layernorm", s, loop, layer, positions, normed);
    linear<P>(normed, w.q_proj, OutputRounding::bf16, q);
    tap("linear.q_proj", s, loop, layer, positions, q);
    linear<P>(normed, w.k_proj, OutputRounding::bf16, k);
    tap("linear.k_proj", s, loop, layer, positions, k);
    linear<P>(normed, w.v_proj, OutputRounding::bf16, v);
    tap("linear.v_proj", s, loop, layer, positions, v);
    rope<P>(q, positions, model_.head_dim, rope_table_);
    tap("rope.q", s, loop, layer, positions, q);
    if (!planted(Fault::key_before_rope)) rope<P>(k, positions, model_.head_dim, rope_table_);
    tap("rope.k", s, loop, layer, positions, k);
    for (std::size_t t = 0; t < positions.size(); ++t) {
      s.kv.write_row(KvTensor::key, layer, loop, positions[t], k.row(static_cast<std::ptrdiff_t>(t)).data());
      s.kv.write_row(KvTensor::value, layer, loop, positions[t], v.row(static_cast<std::ptrdiff_t>(t)).data());
    }
    attend(s, positions, layer, loop, kind, q, attention);
    tap("attention.output", s, loop, layer, positions, attention);
    linear<P>(attention, w.o_proj, OutputRounding::bf16, projected);
    tap("linear.o_proj", s, loop, layer, positions, projected);
    rms_norm<P>(projected, after_attention, eps, normed);
    tap("rms_norm.input_layernorm_2", s, loop, layer, positions, normed);
    residual_add<P>(x, normed, x);
    tap("residual_add.attention", s, loop, layer, positions, x);

    rms_norm<P>(x, before_mlp, eps, normed);
    tap("rms_norm.post_attention_layernorm", s, loop, layer, positions, normed);
    linear<P>(normed, w.gate_proj, OutputRounding::bf16, gate);
    tap("linear.gate_proj", s, loop, layer, positions, gate);
    linear<P>(normed, w.up_proj, OutputRounding::bf16, up);
    tap("linear.up_proj", s, loop, layer, positions, up);
    swiglu<P>(gate, up, hidden);
    tap("swiglu", s, loop, layer, positions, hidden);
    linear<P>(hidden, w.down_proj, OutputRounding::bf16, projected);
    tap("linear.down_proj", s, loop, layer, positions, projected);
    rms_norm<P>(projected, w.post_attention_layernorm_2, eps, normed);
    tap("rms_norm.post_attention_layernorm_2", s, loop, layer, positions, normed);
    residual_add<P>(x, normed, x);
    tap("residual_add.mlp", s, loop, layer, positions, x);
  }

  rms_norm<P>(x, weights_.norm, eps, x);
  tap("rms_norm.norm", s, loop, -1, positions, x);
  for (std::size_t t = 0; t < positions.size(); ++t) {
    store_row(s, loop, positions[t], x.row(static_cast<std::ptrdiff_t>(t)).data());
    s.executed_loops[static_cast<std::size_t>(positions[t])] = static_cast<std::uint8_t>(loop);
  }
}

// output [rows, heads * head_dim], BF16 values.
template <class P>
void Run<P>::attend(State& s, std::span<const int> positions, int layer, int loop, RowKind kind, const Matrix<Real>& q, Matrix<Real>& output) {
  const int rows = static_cast<int>(positions.size()), head_dim = model_.head_dim;
  output.resize(rows, model_.projection_width());
  if (kind == RowKind::decode) {
    for (int t = 0; t < rows; ++t) attend_decode_row(s, positions[static_cast<std::size_t>(t)], layer, loop, q.row(t).data(), output.row(t).data());
  } else {
    const double work = 2.0 * rows * model_.projection_width() * (positions.back() + 1);
#pragma omp parallel if (work > kMinParallelWork)
    {
      std::vector<Real> probabilities(static_cast<std::size_t>(s.prompt_length));
#pragma omp for schedule(dynamic, 8)
      for (int i = 0; i < rows * model_.heads; ++i) {
        const int t = i / model_.heads, h = i % model_.heads;
        const int position = positions[static_cast<std::size_t>(t)];
        int key_count = position + 1;
        if (planted(Fault::contiguous_causal_mask)) {
          const int window = position / config_.window();
          const auto& active = s.active[static_cast<std::size_t>(loop - 1)][static_cast<std::size_t>(window)];
          key_count = window * config_.window() + 1 + static_cast<int>(std::lower_bound(active.begin(), active.end(), position) - active.begin());
        }
        const int frontier = visible_frontier(s, position, kind);
        attention_dense<P>(q.row(t).data() + h * head_dim, s.kv.view(KvTensor::key, layer, loop, h, frontier),
                           s.kv.view(KvTensor::value, layer, loop, h, frontier), key_count, scale_, nullptr, probabilities.data(),
                           output.row(t).data() + h * head_dim);
      }
    }
  }
  for (std::ptrdiff_t i = 0; i < output.size(); ++i) output.data()[i] = P::round_bf16(output.data()[i]);
}

// Dense at loops 1 and 2, where loop 2 leaves a reference behind under S; corrected against that reference at loops 3 and 4.
template <class P>
void Run<P>::attend_decode_row(State& s, int position, int layer, int loop, const Real* q, Real* output) {
  const int frontier = visible_frontier(s, position, RowKind::decode), head_dim = model_.head_dim;
  const bool sparse = config_.s().enabled;
  if (sparse && loop >= 3 &&
      (s.reference.state != Reference::State::reusable || s.reference.position != position || s.reference.incarnation != s.row.incarnation)) {
    throw InternalError(name(s) + ", position " + std::to_string(position) + ", loop " + std::to_string(loop) +
                        ": no attention reference of this token incarnation");
  }
  std::vector<std::string> errors(static_cast<std::size_t>(model_.heads));
#pragma omp parallel for schedule(static) if (2.0 * model_.projection_width() * (position + 1) > kMinParallelWork)
  for (int h = 0; h < model_.heads; ++h) {
    const int plane = planted(Fault::loop_off_by_one) && loop > 1 ? loop - 1 : loop;
    const auto keys = s.kv.view(KvTensor::key, layer, plane, h, frontier);
    const auto values = s.kv.view(KvTensor::value, layer, plane, h, frontier);
    const Real* head_query = q + h * head_dim;
    Real* head_output = output + h * head_dim;
    HeadReference<Real>& reference = s.reference.heads[static_cast<std::size_t>(layer * model_.heads + h)];
    std::string& error = errors[static_cast<std::size_t>(h)];
    if (sparse && loop >= 3) {
      sparse_correction<P>(head_query, keys, values, reference, scale_, head_output);
      if (planted(Fault::loop3_reference_at_loop4) && loop == 3) error = capture_reference(s, position, layer, h, head_query, keys, values, reference);
    } else if (sparse && loop == 2) {
      error = capture_reference(s, position, layer, h, head_query, keys, values, reference);
      std::copy(reference.output.begin(), reference.output.end(), head_output);
    } else {
      std::vector<Real> probabilities(static_cast<std::size_t>(position + 1));
      attention_dense<P>(head_query, keys, values, position + 1, scale_, nullptr, probabilities.data(), head_output);
    }
  }
  for (const std::string& error : errors) {
    if (!error.empty()) throw NumericError(error);
  }
  if (sparse && loop == 2) {
    StepKeys& step = s.record.keys.back();
    const std::int64_t k = budget(config_.s().key_fraction_bp, position + 1);
    Tensor<std::int32_t> keys({model_.heads, k});
    if (step.mass.empty()) step.mass = Tensor<float>({model_.layers, model_.heads});
    std::vector<Real> mass, partial, listed;
    for (int h = 0; h < model_.heads; ++h) {
      const HeadReference<Real>& reference = s.reference.heads[static_cast<std::size_t>(layer * model_.heads + h)];
      std::copy(reference.keys.begin(), reference.keys.end(), keys.row(h).begin());
      step.mass.row(layer)[static_cast<std::size_t>(h)] = static_cast<float>(reference.mass);
      mass.push_back(reference.mass);
      partial.insert(partial.end(), reference.partial.begin(), reference.partial.end());
      listed.insert(listed.end(), reference.keys.begin(), reference.keys.end());
    }
    step.layers.push_back(std::move(keys));
    tap_row("sparse_decode.keys", s, loop, layer, position, listed.data(), static_cast<std::ptrdiff_t>(listed.size()));
    tap_row("sparse_decode.mass", s, loop, layer, position, mass.data(), model_.heads);
    tap_row("sparse_decode.c_ref", s, loop, layer, position, partial.data(), model_.projection_width());
    s.reference.state = layer + 1 == model_.layers ? Reference::State::reusable : Reference::State::source_ready;
  }
}

// Fills `reference` of one head. Returns the error of a logit that cannot be ranked, or nothing.
template <class P>
std::string Run<P>::capture_reference(State& s, int position, int layer, int head, const Real* q, const PlaneView<Real>& keys,
                               const PlaneView<Real>& values, HeadReference<Real>& reference) {
  const std::size_t n = static_cast<std::size_t>(position + 1);
  std::vector<Real> logits(n), probabilities(n);
  reference.output.resize(static_cast<std::size_t>(model_.head_dim));
  attention_dense<P>(q, keys, values, position + 1, scale_, logits.data(), probabilities.data(), reference.output.data());
  for (std::size_t j = 0; j < n; ++j) {
    if (!std::isfinite(logits[j])) {
      return name(s) + ", position " + std::to_string(position) + ", layer " + std::to_string(layer) + ", head " + std::to_string(head) +
             ": the attention logit of key " + std::to_string(j) + " is not finite";
    }
  }
  const RequestRecord* forced = decisions(s);
  const std::size_t step = static_cast<std::size_t>(position - s.prompt_length);
  if (forced != nullptr && step < forced->keys.size() && !forced->keys[step].layers.empty()) {
    const auto chosen = forced->keys[step].layers.at(static_cast<std::size_t>(layer)).row(head);
    reference.keys.assign(chosen.begin(), chosen.end());
  } else {
    reference.keys = select_keys<Real>(logits, budget(config_.s().key_fraction_bp, position + 1));
  }
  summarize_reference<P>(probabilities, values, reference);
  return {};
}

template <class P>
typename P::Real Run<P>::gate_of(const State& s, int loop, int position) const {
  const Real gate = exit_gate<P>(hidden_row(s, loop, position), weights_.early_exit_gate.data(), weights_.early_exit_bias, model_.hidden);
  tap_row("exit_gate", s, loop, -1, position, &gate, 1);
  return gate;
}

template <class P>
void Run<P>::head(const State& s, int loop, int position, std::vector<Real>& logits) const {
  const Matrix<Real> row = s.hidden[static_cast<std::size_t>(loop - 1)].row(position);
  Matrix<Real> result;
  linear<P>(row, weights_.lm_head, OutputRounding::fp32, result);
  logits.assign(result.data(), result.data() + result.size());
}

// ------------------------------------------------------------------------------------------------------------------------- encoding

template <class P>
int Run<P>::frontier_rule(const State& s, int committed) const {
  const int frontier = encoded_frontier(config_, s.prompt_length, committed);
  if (!planted(Fault::early_flush) || !config_.q().enabled) return frontier;
  return std::max(frontier, std::min(encoded_frontier(config_, s.prompt_length, committed + kGroupSize), committed / kGroupSize * kGroupSize));
}

// Positions below it are read reconstructed by this query row (S-TIME-1..3). A prefill row under `streaming` sees every window before its
// own encoded; a decode row sees the frontier of committed length `position`, or what is encoded now.
template <class P>
int Run<P>::visible_frontier(const State& s, int position, RowKind kind) const {
  const auto& q = config_.q();
  if (!q.enabled) return 0;
  if (kind == RowKind::prefill) return q.policy == EncodingPolicy::streaming ? position / config_.window() * config_.window() : 0;
  return q.timing == EncodingTiming::serial_aligned ? frontier_rule(s, position) : s.encoded;
}

template <class P>
void Run<P>::flush(State& s, int frontier) {
  for (const PositionRange& range : block_cuts(config_, s.prompt_length, s.encoded, frontier)) {
    s.record.blocks.push_back({range, {}});
    for (int loop = 1; loop <= config_.loops(); ++loop) encode_block_stream(s, s.record.blocks.back(), loop);
    s.encoded = range.end;
  }
}

template <class P>
void Run<P>::encode_block_stream(State& s, CodecBlock& block, int loop) {
  CodecStream& stream = block.streams[static_cast<std::size_t>(loop - 1)];
  for (int position = block.positions.begin; position < block.positions.end; ++position) {
    if (s.executed_loops[static_cast<std::size_t>(position)] >= loop) stream.rows.push_back(position);
  }
  encode_stream<Real>(s.kv, model_, block.positions, loop, stream, options_.fault, name(s));
}

// ---------------------------------------------------------------------------------------------------------------------- observation

template <class P>
void Run<P>::tap_row(std::string_view operation, const State& s, int loop, int layer, int position, const Real* values, std::ptrdiff_t count) const {
  if (options_.tap == nullptr) return;
  options_.tap->record({submission_, s.index, position, loop, layer, operation}, as_float(values, count));
}

template <class P>
void Run<P>::tap(std::string_view operation, const State& s, int loop, int layer, std::span<const int> positions, const Matrix<Real>& rows) const {
  if (options_.tap == nullptr) return;
  for (std::size_t t = 0; t < positions.size(); ++t) {
    tap_row(operation, s, loop, layer, positions[t], rows.row(static_cast<std::ptrdiff_t>(t)).data(), rows.cols());
  }
}

template <class P>
RunRecord Run<P>::finish() {
  RunRecord result;
  result.executor = "reference";
  result.profile = std::string(to_string(options_.profile));
  result.trace = trace_.name;
  result.config_json = config_.canonical_json();
  for (State& s : requests_) {
    if (s.record.encoded_frontier.empty()) throw InternalError(name(s) + ": the plan ended before the prompt was complete");
    RequestRecord& record = s.record;
    const int length = s.prompt_length + record.fed;
    record.exit_depths.resize(record.tokens.size(), 0);
    record.logits.shape = {1 + record.fed, model_.vocab};
    if (!options_.record.logits) record.logits = {};
    if (options_.record.hidden) {
      for (int loop = 1; loop <= config_.loops(); ++loop) {
        auto& out = record.hidden[static_cast<std::size_t>(loop - 1)];
        out = Tensor<float>({length, model_.hidden});
        std::copy_n(s.hidden[static_cast<std::size_t>(loop - 1)].data(), out.data.size(), out.data.begin());
      }
    }
    if (options_.record.gate) {
      record.gate = Tensor<float>({length, kLoops}, std::numeric_limits<float>::quiet_NaN());
      for (int position = 0; position < length; ++position) {
        for (int loop = 1; loop <= config_.loops(); ++loop) {
          record.gate.row(position)[static_cast<std::size_t>(loop - 1)] = static_cast<float>(
              exit_gate<P>(hidden_row(s, loop, position), weights_.early_exit_gate.data(), weights_.early_exit_bias, model_.hidden));
        }
      }
    }
    if (options_.record.kv) {
      for (int layer = 0; layer < model_.layers; ++layer) {
        for (int loop = 1; loop <= kLoops; ++loop) {
          KvPlane plane;
          for (const KvTensor tensor : {KvTensor::key, KvTensor::value}) {
            if (loop > config_.loops()) continue;
            Tensor<float>& out = tensor == KvTensor::key ? plane.k : plane.v;
            out = Tensor<float>({model_.heads, length, model_.head_dim});
            for (int h = 0; h < model_.heads; ++h) {
              const auto view = s.kv.view(tensor, layer, loop, h, s.encoded);
              for (int position = 0; position < length; ++position) {
                std::copy_n(view.row(position), model_.head_dim, out.row(h).data() + static_cast<std::ptrdiff_t>(position) * model_.head_dim);
              }
            }
          }
          record.kv.push_back(std::move(plane));
        }
      }
    }
    if (!options_.record.keys) record.keys.clear();
    if (!options_.record.codec) record.blocks.clear();
    result.requests.push_back(std::move(record));
  }
  return result;
}

// Forced decisions must have the shape that selection would have given: they index rows and keys while threads share out the work.
void check_decisions(const RunRecord& decisions, const Trace& trace, const EffectiveConfig& config, const ModelConfig& model) {
  const auto require = [&](bool holds, std::size_t request, const std::string& what) {
    if (!holds) throw ConfigError("forced decisions do not fit trace " + trace.name + ": request " + std::to_string(request) + ": " + what);
  };
  require(decisions.requests.size() == trace.requests.size(), decisions.requests.size(),
          std::to_string(decisions.requests.size()) + " requests decided, the trace has " + std::to_string(trace.requests.size()));
  for (std::size_t i = 0; i < trace.requests.size(); ++i) {
    const RequestRecord& forced = decisions.requests[i];
    const int prompt_length = trace.requests[i].prompt_length();
    for (std::size_t at = 0; at < forced.active.size() && config.selects_tokens(); ++at) {
      const auto& active = forced.active[at];
      require(!active.empty() && std::is_sorted(active.begin(), active.end(), std::less_equal<>()) && active.front() >= 0 &&
                  active.back() < prompt_length,
              i, "active positions of loop " + std::to_string(at + 3) + " are not ascending positions of the prompt");
    }
    for (std::size_t step = 0; step < forced.keys.size() && config.s().enabled; ++step) {
      const auto& layers = forced.keys[step].layers;
      const int key_count = prompt_length + static_cast<int>(step) + 1;
      require(layers.empty() || layers.size() == static_cast<std::size_t>(model.layers), i, "step " + std::to_string(step) + " lacks layers");
      for (const Tensor<std::int32_t>& keys : layers) {
        const std::string where = "keys of step " + std::to_string(step);
        require(keys.shape == std::vector<std::int64_t>{model.heads, budget(config.s().key_fraction_bp, key_count)}, i, where + " have another shape");
        for (int head = 0; head < model.heads; ++head) {
          const auto row = keys.row(head);
          require(std::is_sorted(row.begin(), row.end(), std::less_equal<>()) && row.front() >= 0 && row.back() < key_count, i,
                  where + " are not ascending positions below " + std::to_string(key_count));
        }
      }
    }
  }
}

// One weight copy per arithmetic type, one run at a time.
class ReferenceExecutor final : public Executor {
 public:
  explicit ReferenceExecutor(const Checkpoint& checkpoint) : checkpoint_(checkpoint) {}

  std::string name() const override { return "reference"; }

  void begin(const Trace& trace, const EffectiveConfig& config, const RunOptions& options) override {
    require_fault_in(options.fault, name());
    if (config.exit().mode == ExitMode::trace) {
      for (std::size_t i = 0; i < trace.requests.size(); ++i) {
        if (trace.requests[i].exit_depths.size() < static_cast<std::size_t>(trace.requests[i].max_new_tokens)) {
          throw ConfigError("exit mode trace needs exit_depths for every new token; trace " + trace.name + " has none for request " +
                            std::to_string(i));
        }
      }
    }
    if (options.decisions != nullptr) check_decisions(*options.decisions, trace, config, checkpoint_.config);
    declared_.reset();
    reordered_.reset();
    double_.reset();
    switch (options.profile) {
      case Profile::declared: declared_.emplace(checkpoint_.config, single_weights(), trace, config, options); break;
      case Profile::reordered: reordered_.emplace(checkpoint_.config, single_weights(), trace, config, options); break;
      case Profile::double_precision: double_.emplace(checkpoint_.config, double_weights(), trace, config, options); break;
    }
  }

  void submit(const Submission& submission) override {
    if (declared_) declared_->submit(submission);
    else if (reordered_) reordered_->submit(submission);
    else if (double_) double_->submit(submission);
    else throw InternalError("submit() before begin()");
  }

  RunRecord finish() override {
    if (!declared_ && !reordered_ && !double_) throw InternalError("finish() before begin()");
    RunRecord record = declared_ ? declared_->finish() : reordered_ ? reordered_->finish() : double_->finish();
    record.model_sha256 = checkpoint_.sha256;
    declared_.reset();
    reordered_.reset();
    double_.reset();
    return record;
  }

 private:
  const Weights<float>& single_weights() {
    if (!single_) single_.emplace(checkpoint_);
    return *single_;
  }
  const Weights<double>& double_weights() {
    if (!double_weights_) double_weights_.emplace(checkpoint_);
    return *double_weights_;
  }

  const Checkpoint& checkpoint_;
  std::optional<Weights<float>> single_;
  std::optional<Weights<double>> double_weights_;
  std::optional<Run<Declared>> declared_;
  std::optional<Run<Reordered>> reordered_;
  std::optional<Run<DoublePrecision>> double_;
};

}  // namespace

std::unique_ptr<Executor> make_reference_executor(const Checkpoint& checkpoint) { return std::make_unique<ReferenceExecutor>(checkpoint); }

}  // namespace loopgauge::reference
