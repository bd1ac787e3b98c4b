// SPDX-License-Identifier: Apache-2.0
#include "reference/run/observation.hpp"

#include <algorithm>

#include "models/cut_rows.hpp"
#include "reference/run/recurrent_model.hpp"

namespace loopgauge::reference {
namespace {

constexpr float kNothing = std::numeric_limits<float>::quiet_NaN();

// Logical values of every plane as they are read at the end: reconstructed where encoded.
template <class P>
void record_planes(const RunContext<P>& run, RequestState<P>& s, int length) {
  const ModelConfig& model = run.model;
  for (int layer = 0; layer < model.layers; ++layer) {
    for (int loop = 1; loop <= kLoops; ++loop) {
      KvPlane plane;
      for (const KvTensor tensor : {KvTensor::key, KvTensor::value}) {
        if (loop > run.config.loops()) continue;
        Tensor<float>& out = tensor == KvTensor::key ? plane.k : plane.v;
        out = Tensor<float>({model.heads, length, model.head_dim});
        for (int h = 0; h < model.heads; ++h) {
          const auto view = s.held->kv.view(tensor, layer, loop, h, s.held->encoded);
          for (int position = 0; position < length; ++position) {
            std::copy_n(view.row(position), model.head_dim, out.row(h).data() + static_cast<std::ptrdiff_t>(position) * model.head_dim);
          }
        }
      }
      s.record.kv.push_back(std::move(plane));
    }
  }
}

}  // namespace

template <class P>
void open_record(const RunContext<P>& run, RequestState<P>& s) {
  RequestRecord& record = s.record;
  record.prompt_length = s.prompt_length;
  record.executions.assign(static_cast<std::size_t>(s.capacity) * kLoops, 0);
  if (run.config.selects_tokens()) {
    for (auto& scores : record.scores) scores.assign(static_cast<std::size_t>(s.prompt_length), kNothing);
  }
  if (run.options.record.hidden) {
    for (int r = 0; r < run.config.loops(); ++r) record.hidden[static_cast<std::size_t>(r)] = Tensor<float>({s.capacity, run.model.hidden});
  }
  if (run.options.record.gate) record.gate = Tensor<float>({s.capacity, kLoops}, kNothing);
}

template <class P>
void observe_position(const RunContext<P>& run, RequestState<P>& s, int position) {
  for (int loop = 1; loop <= run.config.loops(); ++loop) {
    const std::size_t r = static_cast<std::size_t>(loop - 1);
    if (run.options.record.hidden)
      std::copy_n(hidden_row(run, s, loop, position), run.model.hidden, s.record.hidden[r].row(position).data());
    if (run.options.record.gate) s.record.gate.row(position)[r] = static_cast<float>(gate_of(run, s, loop, position));
  }
}

template <class P>
void observe_decisions(const RunContext<P>& run, RequestState<P>& s, const WindowState<typename P::Real>& window) {
  if (!run.config.selects_tokens()) return;
  for (std::size_t at = 0; at < 2; ++at) {
    const auto& active = window.active[at + 2];
    if (active.empty()) continue;
    std::copy(window.scores[at].begin(), window.scores[at].end(), s.record.scores[at].begin() + window.positions.begin);
    s.record.active[at].insert(s.record.active[at].end(), active.begin(), active.end());
  }
}

template <class P>
void close_record(RunContext<P>& run, RequestState<P>& s) {
  RequestRecord& record = s.record;
  const bool cancelled = s.phase == RequestState<P>::Phase::cancelled;
  const int rows = static_cast<int>(record.encoded_frontier.size());  // of the logits: 1 + fed, or none of an incomplete prompt
  // On the prefill side of a handoff the prompt's rows are all that there is, and it forms no logits.
  const bool prompt_only = run.options.stage == Stage::prefill && !cancelled;
  const int length = rows == 0 && !prompt_only ? 0 : s.prompt_length + record.fed;
  record.outcome = cancelled ? RequestOutcome::cancelled : RequestOutcome::completed;
  if (s.request->teacher_forced() && !prompt_only) {
    record.tokens = s.request->forced;
    if (cancelled) record.tokens.resize(static_cast<std::size_t>(record.fed));
  }
  record.exit_depths.resize(record.tokens.size(), 0);
  if (rows > 0 && run.options.record.logits) record.logits.shape = {rows, run.model.vocab};
  for (auto& hidden : record.hidden) cut_rows(hidden, length);
  cut_rows(record.gate, length);
  const std::size_t positions = static_cast<std::size_t>(s.prompt_length + record.fed);
  for (const std::uint8_t count : record.executions) run.counters.recomputed_rows += std::max(0, count - 1);
  record.executions.resize(positions * kLoops);
  if (cancelled || prompt_only || s.held == nullptr) return;
  if (run.options.record.kv) record_planes(run, s, length);
  if (run.options.record.codec) record.blocks = std::move(s.held->blocks);
}

#define LOOPGAUGE_INSTANTIATE(P)                                                                           \
  template void open_record<P>(const RunContext<P>&, RequestState<P>&);                                    \
  template void observe_position<P>(const RunContext<P>&, RequestState<P>&, int);                          \
  template void observe_decisions<P>(const RunContext<P>&, RequestState<P>&, const WindowState<P::Real>&); \
  template void close_record<P>(RunContext<P>&, RequestState<P>&);
LOOPGAUGE_FOR_EACH_PROFILE(LOOPGAUGE_INSTANTIATE)
#undef LOOPGAUGE_INSTANTIATE

}  // namespace loopgauge::reference
