// SPDX-License-Identifier: Apache-2.0
#include "reference/run/recurrent_model.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <utility>

#include "models/error.hpp"
#include "reference/ops/embedding.hpp"
#include "reference/ops/linear.hpp"
#include "reference/ops/residual_add.hpp"
#include "reference/ops/rms_norm.hpp"
#include "reference/ops/swiglu.hpp"
#include "reference/run/encoding.hpp"

namespace loopgauge::reference {
namespace {

// Fills `reference` of one head. Returns the error of a logit that cannot be ranked, or nothing.
template <class P>
std::string capture_reference(const RunContext<P>& run, const RequestState<P>& s, int position, int layer, int head,
                              const typename P::Real* q, const PlaneView<typename P::Real>& keys, const PlaneView<typename P::Real>& values,
                              HeadReference<typename P::Real>& reference) {
  using Real = typename P::Real;
  const std::size_t n = static_cast<std::size_t>(position + 1);
  std::vector<Real> logits(n), probabilities(n);
  reference.output.resize(static_cast<std::size_t>(run.model.head_dim));
  attention_dense<P>(q, keys, values, position + 1, run.scale, logits.data(), probabilities.data(), reference.output.data());
  for (std::size_t j = 0; j < n; ++j) {
    if (!std::isfinite(logits[j])) {
      return name(s) + ", position " + std::to_string(position) + ", layer " + std::to_string(layer) + ", head " + std::to_string(head) +
             ": the attention logit of key " + std::to_string(j) + " is not finite";
    }
  }
  const RequestRecord* forced = run.decisions(s);
  const std::size_t step = static_cast<std::size_t>(position - s.prompt_length);
  if (forced != nullptr && step < forced->keys.size() && !forced->keys[step].layers.empty()) {
    const auto chosen = forced->keys[step].layers.at(static_cast<std::size_t>(layer)).row(head);
    reference.keys.assign(chosen.begin(), chosen.end());
  } else {
    if (run.planted(Fault::keys_ranked_in_bfloat16)) {
      for (Real& logit : logits) logit = P::round_bf16(logit);
    }
    reference.keys = select_keys<Real>(logits, budget(run.config.s().key_fraction_bp, position + 1));
  }
  summarize_reference<P>(probabilities, values, reference);
  return {};
}

// The selection of one layer, for the record and the observer.
template <class P>
void observe_reference(const RunContext<P>& run, RequestState<P>& s, int position, int layer,
                       const AttentionReference<typename P::Real>& reference) {
  using Real = typename P::Real;
  StepKeys& step = s.row_keys[position];
  const std::int64_t k = budget(run.config.s().key_fraction_bp, position + 1);
  Tensor<std::int32_t> keys({run.model.heads, k});
  if (step.mass.empty()) step.mass = Tensor<float>({run.model.layers, run.model.heads});
  std::vector<Real> mass, partial, listed;
  for (int h = 0; h < run.model.heads; ++h) {
    const HeadReference<Real>& head = reference.heads[static_cast<std::size_t>(layer * run.model.heads + h)];
    std::copy(head.keys.begin(), head.keys.end(), keys.row(h).begin());
    step.mass.row(layer)[static_cast<std::size_t>(h)] = static_cast<float>(head.mass);
    mass.push_back(head.mass);
    partial.insert(partial.end(), head.partial.begin(), head.partial.end());
    listed.insert(listed.end(), head.keys.begin(), head.keys.end());
  }
  step.layers.push_back(std::move(keys));
  run.tap_row("sparse_decode.keys", s, 2, layer, position, listed.data(), static_cast<std::ptrdiff_t>(listed.size()));
  run.tap_row("sparse_decode.mass", s, 2, layer, position, mass.data(), run.model.heads);
  run.tap_row("sparse_decode.c_ref", s, 2, layer, position, partial.data(), run.model.projection_width());
}

// The reference that loops 3 and 4 correct against, or null where the row has none. Stale state is never read (S-SDA-10).
template <class P>
AttentionReference<typename P::Real>* reference_of(RunContext<P>& run, RequestState<P>& s, int position, int loop) {
  using State = typename AttentionReference<typename P::Real>::State;
  const DecodeRow<P>& row = decode_row(s, position);
  if (row.reference < 0) return nullptr;
  AttentionReference<typename P::Real>& reference = run.references.at(row.reference);
  if (const auto stale = s.held->stale_references.find(position); loop >= 3 && stale != s.held->stale_references.end()) return &stale->second;
  const bool own = reference.belongs_to(s.generation, row.incarnation);
  if (loop == 2 || (own && reference.state == State::reusable)) return &reference;
  if (!run.planted(Fault::slot_reused_early) && !run.planted(Fault::resume_without_reference)) {
    throw InternalError(name(s) + ", position " + std::to_string(row.position) + ", loop " + std::to_string(loop) +
                        ": no attention reference of this token incarnation");
  }
  for (auto& head : reference.heads) {  // somebody else's keys may lie beyond this row
    while (head.keys.size() > 1 && head.keys.back() > row.position) head.keys.pop_back();
    head.keys.front() = std::min(head.keys.front(), row.position);
  }
  return &reference;
}

// The plane that a decode row reads: its own, but for faults of the slot's number.
template <class P>
std::pair<int, int> slot_read(const RunContext<P>& run, int layer, int loop) {
  if (run.planted(Fault::loop_off_by_one) && loop > 1) return {layer, loop - 1};
  if (run.planted(Fault::one_slot_per_layer)) return {layer, run.model.loops};
  if (run.planted(Fault::constant_layer_stride) && layer + 1 == run.model.layers && loop < run.model.loops) return {0, loop + 1};
  return {layer, loop};
}

// K and V of a row into their plane. Where a fault makes several planes one slot, a decode row's value goes where the next read looks; the
// right value overwrites it when its own loop runs.
template <class P>
void write_slots(RunContext<P>& run, RequestState<P>& s, int layer, int loop, RowKind kind, int position, const typename P::Real* k,
                 const typename P::Real* v) {
  const auto write = [&](int to_layer, int to_loop) {
    s.held->kv.write_row(KvTensor::key, to_layer, to_loop, position, k);
    s.held->kv.write_row(KvTensor::value, to_layer, to_loop, position, v);
  };
  if (loop == 3 && s.held->stale_rows.contains(position)) return;
  write(layer, loop);
  if (kind != RowKind::decode || run.planted(Fault::loop_off_by_one)) return;
  if (const std::pair<int, int> read = slot_read(run, layer, loop); read != std::pair(layer, loop)) write(read.first, read.second);
}

// Dense at loops 1 and 2, where loop 2 leaves a reference behind under S; corrected against that reference at loops 3 and 4.
template <class P>
void attend_decode_row(RunContext<P>& run, RequestState<P>& s, int position, int layer, int loop, const typename P::Real* q,
                       typename P::Real* output) {
  using Real = typename P::Real;
  using Reference = AttentionReference<Real>;
  const ModelConfig& model = run.model;
  const int frontier = visible_frontier(run, s, position, RowKind::decode), head_dim = model.head_dim;
  Reference* const slot = run.config.s().enabled && loop >= 2 ? reference_of(run, s, position, loop) : nullptr;
  if (run.config.s().enabled && loop >= 2 && slot == nullptr)
    throw InternalError(name(s) + ": a row without a slot for its attention reference");
  std::vector<std::string> errors(static_cast<std::size_t>(model.heads));
#pragma omp parallel for schedule(static) if (2.0 * model.projection_width() * (position + 1) > kMinParallelWork)
  for (int h = 0; h < model.heads; ++h) {
    const auto [slot_layer, slot_loop] = slot_read(run, layer, loop);
    const auto keys = s.held->kv.view(KvTensor::key, slot_layer, slot_loop, h, frontier);
    const auto values = s.held->kv.view(KvTensor::value, slot_layer, slot_loop, h, frontier);
    const Real* head_query = q + h * head_dim;
    Real* head_output = output + h * head_dim;
    std::string& error = errors[static_cast<std::size_t>(h)];
    if (slot == nullptr) {
      std::vector<Real> probabilities(static_cast<std::size_t>(position + 1));
      const int key_count = run.planted(Fault::mask_without_own_token) ? position : position + 1;
      attention_dense<P>(head_query, keys, values, key_count, run.scale, nullptr, probabilities.data(), head_output);
      continue;
    }
    HeadReference<Real>& reference = slot->heads[static_cast<std::size_t>(layer * model.heads + h)];
    if (loop >= 3) {
      sparse_correction<P>(head_query, keys, values, reference, run.scale, head_output, run.planted(Fault::correction_in_bfloat16));
      if (!run.planted(Fault::loop3_reference_at_loop4) || loop != 3) continue;
    }
    error = capture_reference(run, s, position, layer, h, head_query, keys, values, reference);
    if (loop == 2) std::copy(reference.output.begin(), reference.output.end(), head_output);
  }
  for (const std::string& error : errors) {
    if (!error.empty()) throw NumericError(error);
  }
  if (slot != nullptr && loop == 2) {
    observe_reference(run, s, position, layer, *slot);
    slot->state = layer + 1 == model.layers ? Reference::State::reusable : Reference::State::source_ready;
  }
}

// output [rows, heads * head_dim], BF16 values.
template <class P>
void attend(RunContext<P>& run, RequestState<P>& s, std::span<const int> positions, int layer, int loop, RowKind kind,
            const Matrix<typename P::Real>& q, Matrix<typename P::Real>& output) {
  using Real = typename P::Real;
  const ModelConfig& model = run.model;
  const int rows = static_cast<int>(positions.size()), head_dim = model.head_dim;
  output.resize(rows, model.projection_width());
  if (kind == RowKind::decode) {
    for (int t = 0; t < rows; ++t)
      attend_decode_row(run, s, positions[static_cast<std::size_t>(t)], layer, loop, q.row(t).data(), output.row(t).data());
  } else {
    const double work = 2.0 * rows * model.projection_width() * (positions.back() + 1);
#pragma omp parallel if (work > kMinParallelWork)
    {
      std::vector<Real> probabilities(static_cast<std::size_t>(s.prompt_length));
#pragma omp for schedule(dynamic, 8)
      for (int i = 0; i < rows * model.heads; ++i) {
        const int t = i / model.heads, h = i % model.heads;
        const int position = positions[static_cast<std::size_t>(t)];
        int key_count = position + 1;
        if (run.planted(Fault::contiguous_causal_mask)) {
          const int window = position / run.config.window();
          const auto& active = s.held->windows.at(window).active[static_cast<std::size_t>(loop - 1)];
          key_count = window * run.config.window() + 1 +
                      static_cast<int>(std::lower_bound(active.begin(), active.end(), position) - active.begin());
        }
        const int frontier = visible_frontier(run, s, position, kind);
        attention_dense<P>(q.row(t).data() + h * head_dim, s.held->kv.view(KvTensor::key, layer, loop, h, frontier),
                           s.held->kv.view(KvTensor::value, layer, loop, h, frontier), key_count, run.scale, nullptr, probabilities.data(),
                           output.row(t).data() + h * head_dim);
      }
    }
  }
  for (std::ptrdiff_t i = 0; i < output.size(); ++i) output.data()[i] = P::round_bf16(output.data()[i]);
}

}  // namespace

template <class P>
void run_rows(RunContext<P>& run, RequestState<P>& s, std::span<const int> positions, int loop, RowKind kind, int layers) {
  if (positions.empty()) return;
  using Real = typename P::Real;
  Matrix<Real> x, normed, q, k, v, attention, projected, gate, up, hidden;
  if (loop == 1) {
    std::vector<std::int32_t> tokens;
    for (const int p : positions)
      tokens.push_back(kind == RowKind::prefill ? s.request->prompt[static_cast<std::size_t>(p)] : decode_row(s, p).token);
    embedding<Real>(tokens, run.weights.embed_tokens, x);
    run.tap("embedding", s, 0, -1, positions, x);
  } else {
    x.resize(static_cast<std::ptrdiff_t>(positions.size()), run.model.hidden);
    for (std::size_t t = 0; t < positions.size(); ++t) {
      const bool shared = run.planted(Fault::draft_hidden_shared) && kind == RowKind::decode && loop == run.options.speculation.draft_depth + 1;
      const int position = shared ? positions.back() : positions[t];
      std::copy_n(hidden_row(run, s, loop - 1, position), run.model.hidden, x.row(static_cast<std::ptrdiff_t>(t)).data());
    }
  }

  std::vector<int> rotated(positions.begin(), positions.end());
  if (run.planted(Fault::rope_of_compact_rows) && kind == RowKind::prefill) {
    for (int& position : rotated) {
      const int window = position / run.config.window();
      const auto& active = s.held->windows.at(window).active[static_cast<std::size_t>(loop - 1)];
      position = window * run.config.window() + static_cast<int>(std::lower_bound(active.begin(), active.end(), position) - active.begin());
    }
  }
  const float eps = run.model.rms_norm_eps;
  for (int layer = 0; layer < run.model.layers; ++layer) {
    const auto& w = run.weights.layers[static_cast<std::size_t>(layer)];
    const bool swapped = run.planted(Fault::swapped_norms);
    const Vector<Real>& after_attention = swapped ? w.post_attention_layernorm : w.input_layernorm_2;
    const Vector<Real>& before_mlp = swapped ? w.input_layernorm_2 : w.post_attention_layernorm;

    rms_norm<P>(x, w.input_layernorm, eps, normed);
    run.tap("rms_norm.input_layernorm", s, loop, layer, positions, normed);
    linear<P>(normed, w.q_proj, OutputRounding::bf16, q);
    run.tap("linear.q_proj", s, loop, layer, positions, q);
    linear<P>(normed, w.k_proj, OutputRounding::bf16, k);
    run.tap("linear.k_proj", s, loop, layer, positions, k);
    linear<P>(normed, w.v_proj, OutputRounding::bf16, v);
    run.tap("linear.v_proj", s, loop, layer, positions, v);
    rope<P>(q, rotated, run.model.head_dim, run.rope_table);
    run.tap("rope.q", s, loop, layer, positions, q);
    if (!run.planted(Fault::key_before_rope)) rope<P>(k, rotated, run.model.head_dim, run.rope_table);
    run.tap("rope.k", s, loop, layer, positions, k);
    for (std::size_t t = 0; t < positions.size(); ++t) {
      const auto row = static_cast<std::ptrdiff_t>(t);
      write_slots(run, s, layer, loop, kind, positions[t], k.row(row).data(), v.row(row).data());
    }
    if (layer + 1 == layers) return;
    attend(run, s, positions, layer, loop, kind, q, attention);
    run.tap("attention.output", s, loop, layer, positions, attention);
    linear<P>(attention, w.o_proj, OutputRounding::bf16, projected);
    run.tap("linear.o_proj", s, loop, layer, positions, projected);
    rms_norm<P>(projected, after_attention, eps, normed);
    run.tap("rms_norm.input_layernorm_2", s, loop, layer, positions, normed);
    residual_add<P>(x, normed, x);
    run.tap("residual_add.attention", s, loop, layer, positions, x);

    rms_norm<P>(x, before_mlp, eps, normed);
    run.tap("rms_norm.post_attention_layernorm", s, loop, layer, positions, normed);
    linear<P>(normed, w.gate_proj, OutputRounding::bf16, gate);
    run.tap("linear.gate_proj", s, loop, layer, positions, gate);
    linear<P>(normed, w.up_proj, OutputRounding::bf16, up);
    run.tap("linear.up_proj", s, loop, layer, positions, up);
    swiglu<P>(gate, up, hidden);
    run.tap("swiglu", s, loop, layer, positions, hidden);
    linear<P>(hidden, w.down_proj, OutputRounding::bf16, projected);
    run.tap("linear.down_proj", s, loop, layer, positions, projected);
    rms_norm<P>(projected, w.post_attention_layernorm_2, eps, normed);
    run.tap("rms_norm.post_attention_layernorm_2", s, loop, layer, positions, normed);
    residual_add<P>(x, normed, x);
    if (run.planted(Fault::one_ulp_in_residual_add) && loop == 1 && layer == 0) {
      for (std::ptrdiff_t t = 0; t < x.rows(); ++t) {
        const auto bits = std::bit_cast<std::uint32_t>(static_cast<float>(x(t, 0))) & 0xffff0000u;
        x(t, 0) = static_cast<Real>(std::bit_cast<float>(bits + 0x00010000u));
      }
    }
    run.tap("residual_add.mlp", s, loop, layer, positions, x);
  }

  if (!run.planted(Fault::final_norm_only_at_end) || loop == run.model.loops) rms_norm<P>(x, run.weights.norm, eps, x);
  run.tap("rms_norm.norm", s, loop, -1, positions, x);
  for (std::size_t t = 0; t < positions.size(); ++t) {
    const std::size_t position = static_cast<std::size_t>(positions[t]);
    std::copy_n(x.row(static_cast<std::ptrdiff_t>(t)).data(), run.model.hidden, hidden_row(run, s, loop, positions[t]));
    s.held->executed_loops[position] = static_cast<std::uint8_t>(loop);
    ++run.counters.executed_rows;
    if (kind == RowKind::decode && run.speculates()) continue;  // counted when it is committed, or given up
    count_execution(s, positions[t], loop);
  }
}

template <class P>
void count_execution(RequestState<P>& s, int position, int loop) {
  std::uint8_t& executions = s.record.executions.at(static_cast<std::size_t>(position * kLoops + loop - 1));
  if (executions < std::numeric_limits<std::uint8_t>::max()) ++executions;
}

template <class P>
typename P::Real gate_of(const RunContext<P>& run, RequestState<P>& s, int loop, int position) {
  return exit_gate<P>(hidden_row(run, s, loop, position), run.weights.early_exit_gate.data(), run.weights.early_exit_bias,
                      run.model.hidden);
}

namespace {

// Fault::exit_weighted_logits: each loop's logits with the probability that the row leaves there, the last with what is left.
template <class P>
std::vector<typename P::Real> exit_weighted_logits(const RunContext<P>& run, RequestState<P>& s, int last, int position) {
  using Real = typename P::Real;
  std::vector<Real> sum(static_cast<std::size_t>(run.model.vocab), Real{0});
  Real survival = 1;
  for (int loop = 1; loop <= last; ++loop) {
    const Real leaves = P::sigmoid(gate_of(run, s, loop, position));
    const Real weight = loop == last ? survival : survival * leaves;
    survival -= survival * leaves;
    const Matrix<Real> row = Eigen::Map<const Matrix<Real>>(hidden_row(run, s, loop, position), 1, run.model.hidden);
    Matrix<Real> logits;
    linear<P>(row, run.weights.lm_head, OutputRounding::fp32, logits);
    for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += weight * logits.data()[i];
  }
  return sum;
}

}  // namespace

template <class P>
std::vector<typename P::Real> logits_of(const RunContext<P>& run, RequestState<P>& s, int loop, int position) {
  using Real = typename P::Real;
  const Matrix<Real> row = Eigen::Map<const Matrix<Real>>(hidden_row(run, s, loop, position), 1, run.model.hidden);
  Matrix<Real> result;
  linear<P>(row, run.weights.lm_head, OutputRounding::fp32, result);
  std::vector<Real> logits(result.data(), result.data() + result.size());
  if (run.planted(Fault::exit_weighted_logits)) logits = exit_weighted_logits(run, s, loop, position);
  for (std::size_t i = 0; i < logits.size(); ++i) {
    if (!std::isfinite(logits[i])) {
      throw NumericError(name(s) + ", position " + std::to_string(position) + ": logit of token " + std::to_string(i) + " is not finite");
    }
  }
  run.tap_row("logits", s, loop, -1, position, logits.data(), run.model.vocab);
  return logits;
}

#define LOOPGAUGE_INSTANTIATE(P)                                                                        \
  template void run_rows<P>(RunContext<P>&, RequestState<P>&, std::span<const int>, int, RowKind, int); \
  template void count_execution<P>(RequestState<P>&, int, int);                                         \
  template P::Real gate_of<P>(const RunContext<P>&, RequestState<P>&, int, int);                        \
  template std::vector<P::Real> logits_of<P>(const RunContext<P>&, RequestState<P>&, int, int);
LOOPGAUGE_FOR_EACH_PROFILE(LOOPGAUGE_INSTANTIATE)
#undef LOOPGAUGE_INSTANTIATE

}  // namespace loopgauge::reference
