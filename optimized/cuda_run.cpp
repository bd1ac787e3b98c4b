// SPDX-License-Identifier: Apache-2.0
#include "optimized/cuda_run.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <string>

#include "models/error.hpp"
#include "optimized/kv/numeric_fault.hpp"
#include "optimized/ops/compact_rows.cuh"
#include "optimized/ops/embedding.cuh"
#include "optimized/ops/exit_gate.cuh"
#include "optimized/ops/exit_step.cuh"
#include "optimized/ops/head_argmax.cuh"
#include "optimized/ops/residual_encode.cuh"
#include "optimized/ops/rms_norm.cuh"
#include "optimized/ops/select_tokens.cuh"
#include "optimized/record_reader.hpp"

namespace loopgauge::optimized {
namespace {

float widen(Bfloat16 value) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(std::bit_cast<std::uint16_t>(value)) << 16);
}

ForwardContext forward_context(const RunContext& context, const EffectiveConfig& config, const RunOptions& options, int longest) {
  ForwardContext forward;
  forward.weights = context.weights;
  forward.rope = context.rope;
  forward.library = context.library;
  forward.linear = context.linear;
  forward.allocator = context.allocator;
  forward.stream = *context.stream;
  forward.sparse_decode = config.s().enabled;
  forward.key_fraction_bp = config.s().key_fraction_bp;
  forward.max_positions = longest;
  forward.fault = options.fault;
  return forward;
}

void copy_on_device(void* target, const void* source, std::size_t bytes, cudaStream_t stream) {
  if (bytes != 0) LOOPGAUGE_CUDA_CHECK(cudaMemcpyAsync(target, source, bytes, cudaMemcpyDeviceToDevice, stream));
}

}  // namespace

int longest_sequence(const Trace& trace) {
  int longest = 0;
  for (const TraceRequest& request : trace.requests) longest = std::max(longest, request.prompt_length() + fed_tokens(request));
  return longest;
}

// Turns the rows of a forward pass into tap records.
class CudaRun::TapObserver final : public RowObserver {
 public:
  TapObserver(CudaRun& run, const std::vector<Part>& parts) : run_(run), parts_(parts) {}

  void observe(std::string_view operation, int layer, const Bfloat16* values, std::int64_t row_stride, int width) override {
    std::size_t rows = 0;
    for (const Part& part : parts_) rows += part.positions.size();
    const auto columns = static_cast<std::size_t>(width);
    std::vector<Bfloat16> copy(rows * columns);
    LOOPGAUGE_CUDA_CHECK(cudaMemcpy2DAsync(copy.data(), columns * sizeof(Bfloat16), values, static_cast<std::size_t>(row_stride) * sizeof(Bfloat16),
                                           columns * sizeof(Bfloat16), rows, cudaMemcpyDeviceToHost, run_.stream_));
    run_.stream_.synchronize();
    std::vector<float> widened(copy.size());
    std::transform(copy.begin(), copy.end(), widened.begin(), widen);
    for (const Part& part : parts_) {
      for (std::size_t i = 0; i < part.positions.size(); ++i) {
        const std::size_t row = static_cast<std::size_t>(part.first_row) + i;
        run_.tap_row(operation, *part.request, operation == "embedding" ? 0 : part.loop, layer, part.positions[i],
                     std::span<const float>(widened).subspan(row * columns, columns));
      }
    }
  }

  void observe_references(int layer) override {
    const KvShape& shape = run_.kv_.shape();
    const ReferenceView view = run_.references_->view();
    for (const Part& part : parts_) {
      if (part.kind != RowKind::decode || part.loop != 2) continue;
      const RequestState& s = *part.request;
      const std::size_t first = reference_index(shape, s.row.reference, layer, 0);
      const std::size_t heads = static_cast<std::size_t>(shape.heads);
      std::vector<float> listed;
      const auto masks = run_.read(view.selected + first * view.mask_pages, heads * view.mask_pages);
      for (std::size_t head = 0; head < heads; ++head) {
        for (int position = 0; position <= s.row.position; ++position) {
          const std::uint64_t mask = masks[head * view.mask_pages + static_cast<std::size_t>(position / kPageTokens)];
          if ((mask >> (position % kPageTokens)) & 1u) listed.push_back(static_cast<float>(position));
        }
      }
      run_.tap_row("sparse_decode.keys", s, 2, layer, s.row.position, listed);
      run_.tap_row("sparse_decode.mass", s, 2, layer, s.row.position, run_.read(view.mass + first, heads));
      run_.tap_row("sparse_decode.c_ref", s, 2, layer, s.row.position,
                   run_.read(view.c_ref + first * static_cast<std::size_t>(shape.head_dim), heads * static_cast<std::size_t>(shape.head_dim)));
    }
  }

 private:
  CudaRun& run_;
  const std::vector<Part>& parts_;
};

CudaRun::CudaRun(const RunContext& context, const Trace& trace, const EffectiveConfig& config, const RunOptions& options)
    : model_(context.weights->config),
      weights_(*context.weights),
      trace_(trace),
      config_(config),
      options_(options),
      allocator_(*context.allocator),
      stream_(*context.stream),
      longest_(longest_sequence(trace)),
      forward_(forward_context(context, config, options, longest_)),
      kv_({model_.layers, model_.heads, model_.head_dim}, allocator_, stream_, {config.q().enabled, context.poison}),
      tokens_(allocator_, MemoryCategory::workspace),
      indices_(allocator_, MemoryCategory::workspace),
      gates_(allocator_, MemoryCategory::workspace),
      emitted_states_(allocator_, MemoryCategory::workspace),
      emitted_tokens_(allocator_, MemoryCategory::workspace),
      candidates_(allocator_, MemoryCategory::workspace),
      selected_(allocator_, MemoryCategory::workspace),
      selection_scratch_(allocator_, MemoryCategory::workspace),
      encode_tasks_(allocator_, MemoryCategory::conversion_scratch),
      inactive_rows_(allocator_, MemoryCategory::workspace) {
  const int live = std::min(static_cast<int>(trace.requests.size()), kMaxRequests);
  if (config_.s().enabled) references_.emplace(kv_.shape(), live, longest_, allocator_);
  decode_states_ = allocator_.allocate_array<Bfloat16>(MemoryCategory::hidden_rows, static_cast<std::size_t>(live) * model_.hidden);
  survival_ = allocator_.allocate_array<float>(MemoryCategory::workspace, static_cast<std::size_t>(live));
  verdicts_ = allocator_.allocate_array<ExitVerdict>(MemoryCategory::workspace, static_cast<std::size_t>(live));
  numeric_fault_ = allocator_.allocate_array<std::uint64_t>(MemoryCategory::workspace, 1);
  LOOPGAUGE_CUDA_CHECK(cudaMemsetAsync(numeric_fault_.data(), 0xFF, sizeof(std::uint64_t), stream_));
  static_assert(kNoNumericFault == ~std::uint64_t{0});

  for (const TraceRequest& request : trace.requests) {
    RequestState& s = requests_.emplace_back();
    s.request = &request;
    s.index = static_cast<int>(requests_.size()) - 1;
    s.prompt_length = request.prompt_length();
    s.capacity = s.prompt_length + fed_tokens(request);
    const auto windows = static_cast<std::size_t>(window_count(s.prompt_length, config_.window()));
    for (auto& active : s.active) active.resize(windows);
    s.windows.resize(windows);
    s.record.prompt_length = s.prompt_length;
    s.record.tokens = request.forced;
    if (config_.selects_tokens()) {
      for (auto& scores : s.record.scores) scores.assign(static_cast<std::size_t>(s.prompt_length), std::numeric_limits<float>::quiet_NaN());
    }
    const float nan = std::numeric_limits<float>::quiet_NaN();
    for (int loop = 1; options_.record.hidden && loop <= config_.loops(); ++loop) {
      s.record.hidden[static_cast<std::size_t>(loop - 1)] = Tensor<float>({s.capacity, model_.hidden}, nan);
    }
    if (options_.record.gate) s.record.gate = Tensor<float>({s.capacity, kLoops}, nan);
  }
}

CudaRun::~CudaRun() {
  // Work in flight reads buffers that are about to be freed; a failure here is reported by the next run.
  static_cast<void>(cudaStreamSynchronize(stream_));
}

template <class T>
std::vector<T> CudaRun::read(const T* source, std::size_t count) {
  std::vector<T> values(count);
  if (count != 0) LOOPGAUGE_CUDA_CHECK(cudaMemcpyAsync(values.data(), source, count * sizeof(T), cudaMemcpyDeviceToHost, stream_));
  stream_.synchronize();
  return values;
}

const RequestRecord* CudaRun::decisions(const RequestState& s) const {
  return options_.decisions == nullptr ? nullptr : &options_.decisions->requests.at(static_cast<std::size_t>(s.index));
}

// ------------------------------------------------------------------------------------------------------------------- submissions

void CudaRun::submit(const Submission& submission) {
  if (submission.items.size() == 1) {
    const WorkItem& item = submission.items.front();
    RequestState& s = requests_.at(static_cast<std::size_t>(item.request));
    if (item.kind == RowKind::decode) {
      for (int loop = item.loop_first; loop <= item.loop_last; ++loop) {
        std::vector<Part> parts;
        if (auto part = decode_part(s, item.begin, loop)) parts.push_back(std::move(*part));
        run_step(parts);
      }
    } else {
      for (int window = item.begin / config_.window(); window * config_.window() < item.end; ++window) {
        const PositionRange range = window_range(window, s.prompt_length, config_.window());
        for (int loop = item.loop_first; loop <= item.loop_last; ++loop) {
          std::vector<Part> parts;
          parts.push_back(*prefill_part(s, window, {std::max(range.begin, item.begin), std::min(range.end, item.end)}, loop));
          run_step(parts);
        }
      }
    }
  } else {
    // Every item advances by one loop. Windows of one item follow each other, so step k holds the k-th window of every item.
    for (int k = 0, more = 1; more != 0; ++k) {
      more = 0;
      std::vector<Part> parts;
      for (const WorkItem& item : submission.items) {
        RequestState& s = requests_.at(static_cast<std::size_t>(item.request));
        if (item.kind == RowKind::decode) {
          if (k > 0) continue;
          if (auto part = decode_part(s, item.begin, item.loop_first)) parts.push_back(std::move(*part));
          continue;
        }
        const int window = item.begin / config_.window() + k;
        if (window * config_.window() >= item.end) continue;
        const PositionRange range = window_range(window, s.prompt_length, config_.window());
        parts.push_back(*prefill_part(s, window, {std::max(range.begin, item.begin), std::min(range.end, item.end)}, item.loop_first));
        more = 1;
      }
      run_step(parts);
    }
  }
  ++submission_;
}

std::optional<CudaRun::Part> CudaRun::prefill_part(RequestState& s, int window, PositionRange piece, int loop) {
  open(s);
  const PositionRange range = window_range(window, s.prompt_length, config_.window());
  if (piece.begin == range.begin) begin_window_loop(s, window, loop);
  Part part{&s, RowKind::prefill, piece, loop, window, {}, 0};
  for (const std::int32_t position : s.active[static_cast<std::size_t>(loop - 1)][static_cast<std::size_t>(window)]) {
    if (position >= piece.begin && position < piece.end) part.positions.push_back(position);
  }
  return part;
}

// Nothing for a row past EOS, or after the row's last loop: planned, never run.
std::optional<CudaRun::Part> CudaRun::decode_part(RequestState& s, int position, int loop) {
  const auto step = static_cast<std::size_t>(position - s.prompt_length);
  if (s.stopped || step >= s.record.tokens.size()) return std::nullopt;
  if (loop == 1) {
    s.row = DecodeRow{};
    s.row.position = position;
    s.row.key = {s.generation, s.incarnations++};
    s.row.last_loop = config_.loops();
    if (config_.exit().mode == ExitMode::trace) s.row.last_loop = s.request->exit_depths.at(step);
    if (const RequestRecord* forced = decisions(s); has_exit_rule() && forced != nullptr && step < forced->exit_depths.size() &&
                                                    forced->exit_depths[step] != 0) {
      s.row.last_loop = forced->exit_depths[step];
      s.row.depth_given = true;
    }
    s.record.keys.emplace_back();
    if (references_) s.row.reference = references_->acquire(s.row.key);
    const float alive = 1.0f;
    LOOPGAUGE_CUDA_CHECK(cudaMemcpyAsync(survival_.as<float>() + s.slot, &alive, sizeof alive, cudaMemcpyHostToDevice, stream_));
  }
  if (s.row.position != position) throw InternalError(s.name() + ": decode item at position " + std::to_string(position) + " out of turn");
  if (s.row.committed) return std::nullopt;
  if (references_ && loop >= 3) references_->require_reusable(s.row.reference, s.row.key);
  return Part{&s, RowKind::decode, {position, position + 1}, loop, -1, {position}, 0};
}

void CudaRun::run_step(std::vector<Part>& parts) {
  const RowBatch batch = make_batch(parts);
  if (batch.size() > 0) {
    kv_.upload();
    Bfloat16* const rows = forward_.input(batch.size());
    load_inputs(parts, rows);
    std::optional<TapObserver> observer;
    if (options_.tap != nullptr) {
      observer.emplace(*this, parts);
      if (parts.front().loop == 1) observer->observe("embedding", -1, rows, model_.hidden, model_.hidden);
    }
    forward_.run(batch, kv_, references_ ? &*references_ : nullptr, numeric_fault_.as<std::uint64_t>(), observer ? &*observer : nullptr);
    store_outputs(parts);
  }
  for (Part& part : parts) {
    RequestState& s = *part.request;
    if (part.kind == RowKind::decode) {
      complete_decode_loop(s, part.loop);
    } else {
      record_states(s,
                    s.windows[static_cast<std::size_t>(part.window)]->states.as<Bfloat16>() +
                        static_cast<std::size_t>(part.piece.begin - part.window * config_.window()) * model_.hidden,
                    part.piece, part.loop);
      if (part.piece.end == window_range(part.window, s.prompt_length, config_.window()).end) complete_window_loop(s, part.window, part.loop);
    }
  }
  encode_pending();
  emit_pending();
}

RowBatch CudaRun::make_batch(std::vector<Part>& parts) {
  // Decode rows first, then prefill rows, each in the order of the items.
  std::stable_partition(parts.begin(), parts.end(), [](const Part& part) { return part.kind == RowKind::decode; });
  RowBatch batch;
  for (Part& part : parts) {
    RequestState& s = *part.request;
    part.first_row = batch.size();
    if (part.positions.empty()) continue;
    kv_.reserve(s.slot, part.loop, part.positions);
    kv_.set_active(s.slot, part.loop, part.positions);
    const int frontier = visible_frontier(s, part.piece.begin, part.kind);
    for (const std::int32_t position : part.positions) {
      batch.rows.push_back({s.slot, position, part.loop, frontier, part.kind == RowKind::decode ? s.row.reference : -1});
      if (planted(Fault::contiguous_causal_mask)) batch.mask_positions.push_back(contiguous_position(s, part, position));
    }
    if (part.kind == RowKind::decode) {
      ++batch.decode_rows;
      // A step without recorded keys (the recorded run stopped or left before loop 2) selects for itself.
      const RequestRecord* forced = decisions(s);
      const auto step = static_cast<std::size_t>(part.piece.begin - s.prompt_length);
      const bool has_keys = forced != nullptr && step < forced->keys.size() && !forced->keys[step].layers.empty();
      batch.forced_keys.push_back(has_keys ? &forced->keys[step] : nullptr);
    } else {
      batch.segments.push_back({s.slot, part.loop, frontier, part.first_row, static_cast<std::int32_t>(part.positions.size())});
      batch.take_scores |= config_.selects_tokens() && (part.loop == 2 || part.loop == 3);
    }
  }
  return batch;
}

// The planted fault: compact row i of a window stands at window_begin + i in the causal mask.
std::int32_t CudaRun::contiguous_position(const RequestState& s, const Part& part, std::int32_t position) const {
  if (part.kind == RowKind::decode) return position;
  const auto& active = s.active[static_cast<std::size_t>(part.loop - 1)][static_cast<std::size_t>(part.window)];
  const auto rank = std::lower_bound(active.begin(), active.end(), position) - active.begin();
  return part.window * config_.window() + static_cast<std::int32_t>(rank);
}

void CudaRun::load_inputs(const std::vector<Part>& parts, Bfloat16* rows) {
  std::vector<std::int32_t> tokens, indices;  // per batch row: its token at loop 1, its row in the window after it
  for (const Part& part : parts) {
    const RequestState& s = *part.request;
    for (const std::int32_t position : part.positions) {
      tokens.push_back(part.loop > 1                  ? 0
                       : part.kind == RowKind::decode ? s.record.tokens[static_cast<std::size_t>(position - s.prompt_length)]
                                                      : s.request->prompt[static_cast<std::size_t>(position)]);
      indices.push_back(part.kind == RowKind::decode ? s.slot : position - part.window * config_.window());
    }
  }
  const std::int32_t* device_tokens = tokens_.upload<std::int32_t>(tokens, stream_);
  const std::int32_t* device_indices = indices_.upload<std::int32_t>(indices, stream_);
  for (const Part& part : parts) {
    RequestState& s = *part.request;
    Bfloat16* target = rows + static_cast<std::size_t>(part.first_row) * model_.hidden;
    const int count = static_cast<int>(part.positions.size());
    if (part.loop == 1) {
      embedding(device_tokens + part.first_row, weights_.embed_tokens.as<Bfloat16>(), target, count, model_.hidden, stream_);
    } else {
      const Bfloat16* source = part.kind == RowKind::decode ? decode_states_.as<Bfloat16>()
                                                            : s.windows[static_cast<std::size_t>(part.window)]->states.as<Bfloat16>();
      gather_rows(source, device_indices + part.first_row, target, count, model_.hidden, stream_);
    }
  }
}

// Scatters H[r] to the requests' states; the rows' indices are still on the device.
void CudaRun::store_outputs(const std::vector<Part>& parts) {
  const std::int32_t* indices = indices_.as<std::int32_t>();
  for (const Part& part : parts) {
    RequestState& s = *part.request;
    const int count = static_cast<int>(part.positions.size());
    const Bfloat16* source = forward_.output() + static_cast<std::size_t>(part.first_row) * model_.hidden;
    if (part.kind == RowKind::decode) {
      scatter_rows(source, indices + part.first_row, decode_states_.as<Bfloat16>(), count, model_.hidden, stream_);
      continue;
    }
    WindowState& window = *s.windows[static_cast<std::size_t>(part.window)];
    scatter_rows(source, indices + part.first_row, window.states.as<Bfloat16>(), count, model_.hidden, stream_);
    if (config_.selects_tokens() && (part.loop == 2 || part.loop == 3)) {
      const auto next = static_cast<std::size_t>(part.loop - 2);
      float* target = window.scores.as<float>() + next * static_cast<std::size_t>(config_.window()) + window.scored[next];
      copy_on_device(target, forward_.scores() + part.first_row, static_cast<std::size_t>(count) * sizeof(float), stream_);
      window.scored[next] += count;
    }
  }
}

// ---------------------------------------------------------------------------------------------------------------- life of a request

void CudaRun::open(RequestState& s) {
  if (s.slot >= 0 || s.finished) return;
  s.slot = kv_.open_request(s.capacity);
  s.generation = generations_++;
}

// Decides which positions of the window execute the loop; the others keep their state, which is how they inherit.
void CudaRun::begin_window_loop(RequestState& s, int window, int loop) {
  auto& state = s.windows[static_cast<std::size_t>(window)];
  if (loop == 1) {
    if (spare_windows_.empty()) {
      const auto rows = static_cast<std::size_t>(config_.window());
      spare_windows_.push_back({allocator_.allocate_array<Bfloat16>(MemoryCategory::hidden_rows, rows * model_.hidden),
                                config_.selects_tokens() ? allocator_.allocate_array<float>(MemoryCategory::workspace, rows * 2) : DeviceBuffer{},
                                {}});
    }
    state.emplace(std::move(spare_windows_.back()));
    spare_windows_.pop_back();
    state->scored = {};
  }
  auto& active = s.active[static_cast<std::size_t>(loop - 1)][static_cast<std::size_t>(window)];
  const PositionRange range = window_range(window, s.prompt_length, config_.window());
  if (loop >= 3 && config_.selects_tokens()) {
    active = select_window(s, window, loop);
    auto& record = s.record.active[static_cast<std::size_t>(loop - 3)];
    record.insert(record.end(), active.begin(), active.end());
    if (planted(Fault::double_final_norm)) normalize_inactive_again(s, window, loop);
  } else {
    active.clear();
    for (int position = range.begin; position < range.end; ++position) active.push_back(position);
  }
}

std::vector<std::int32_t> CudaRun::select_window(RequestState& s, int window, int loop) {
  const auto next = static_cast<std::size_t>(loop - 3);
  const std::vector<std::int32_t>& candidates = s.active[static_cast<std::size_t>(loop - 2)][static_cast<std::size_t>(window)];
  const PositionRange range = window_range(window, s.prompt_length, config_.window());
  const WindowState& state = *s.windows[static_cast<std::size_t>(window)];
  const float* device_scores = state.scores.as<float>() + next * static_cast<std::size_t>(config_.window());
  if (state.scored[next] != static_cast<int>(candidates.size())) {
    throw InternalError(s.name() + ", window " + std::to_string(window) + ", loop " + std::to_string(loop) + ": " + std::to_string(state.scored[next]) +
                        " of " + std::to_string(candidates.size()) + " candidates are scored");
  }
  const int count = std::min(budget(config_.t().retention_bp[static_cast<std::size_t>(loop - 1)], range.size()), static_cast<int>(candidates.size()));

  // The selection is enqueued before the host looks at the scores, so that one wait serves both.
  const RequestRecord* forced = decisions(s);
  std::int32_t* selected = selected_.reserve<std::int32_t>(static_cast<std::size_t>(config_.window()));
  if (forced == nullptr) {
    const std::int32_t* device_candidates = candidates_.upload<std::int32_t>(candidates, stream_);
    void* scratch = selection_scratch_.reserve<std::byte>(select_tokens_scratch_bytes(config_.window()));
    select_tokens(device_candidates, device_scores, static_cast<int>(candidates.size()), count, selected, scratch, stream_);
  }
  const std::vector<float> scores = read(device_scores, candidates.size());
  check_numeric_fault();
  for (std::size_t i = 0; i < candidates.size(); ++i) {
    if (!std::isfinite(scores[i])) {
      throw NumericError(s.name() + ", window " + std::to_string(window) + ", loop " + std::to_string(loop) + ", position " +
                         std::to_string(candidates[i]) + ": the selection score is not finite");
    }
    s.record.scores[next][static_cast<std::size_t>(candidates[i])] = scores[i];
    tap_row("update_score", s, loop, -1, candidates[i], std::span<const float>(&scores[i], 1));
  }
  if (forced != nullptr) {
    const auto& all = forced->active[next];
    return {std::lower_bound(all.begin(), all.end(), range.begin), std::lower_bound(all.begin(), all.end(), range.end)};
  }
  return read(selected, static_cast<std::size_t>(count));
}

// The planted fault: rows that inherit are normed a second time.
void CudaRun::normalize_inactive_again(RequestState& s, int window, int loop) {
  const auto& active = s.active[static_cast<std::size_t>(loop - 1)][static_cast<std::size_t>(window)];
  const PositionRange range = window_range(window, s.prompt_length, config_.window());
  std::vector<std::int32_t> inactive;
  for (int position = range.begin; position < range.end; ++position) {
    if (!std::binary_search(active.begin(), active.end(), position)) inactive.push_back(position - range.begin);
  }
  const int count = static_cast<int>(inactive.size());
  Bfloat16* states = s.windows[static_cast<std::size_t>(window)]->states.as<Bfloat16>();
  const std::int32_t* rows = indices_.upload<std::int32_t>(inactive, stream_);
  Bfloat16* again = inactive_rows_.reserve<Bfloat16>(static_cast<std::size_t>(count) * model_.hidden);
  gather_rows(states, rows, again, count, model_.hidden, stream_);
  rms_norm(again, weights_.norm.as<Bfloat16>(), again, count, model_.hidden, model_.rms_norm_eps, stream_);
  scatter_rows(again, rows, states, count, model_.hidden, stream_);
}

void CudaRun::complete_window_loop(RequestState& s, int window, int loop) {
  const PositionRange range = window_range(window, s.prompt_length, config_.window());
  const bool last_loop = loop == config_.loops();
  if (config_.q().enabled && config_.q().policy == EncodingPolicy::streaming && range.size() == config_.window()) {
    // The block is made before its late streams are known: their sizes are the budgets.
    std::array<std::uint32_t, kLoops> capacity;
    capacity.fill(static_cast<std::uint32_t>(range.size()));
    for (std::size_t late = 2; config_.selects_tokens() && late < kLoops; ++late) {
      capacity[late] = std::min(capacity[late - 1], static_cast<std::uint32_t>(budget(config_.t().retention_bp[late], range.size())));
    }
    encode(s, range, loop, loop, capacity);
    if (last_loop) {
      s.encoded = range.end;
      pending_releases_.emplace_back(&s, range);
    }
  }
  if (!last_loop) return;
  WindowState& state = *s.windows[static_cast<std::size_t>(window)];
  if (range.end == s.prompt_length) {
    const std::size_t row_bytes = static_cast<std::size_t>(model_.hidden) * sizeof(Bfloat16);
    copy_on_device(decode_state(s), state.states.as<Bfloat16>() + static_cast<std::size_t>(range.size() - 1) * model_.hidden, row_bytes, stream_);
    complete_prompt(s);
  }
  spare_windows_.push_back(std::move(state));
  s.windows[static_cast<std::size_t>(window)].reset();
  if (range.end == s.prompt_length) spare_windows_.clear();  // a request in decode holds one row; the next prompt brings its own windows
}

void CudaRun::complete_prompt(RequestState& s) {
  s.committed = s.prompt_length;
  flush(s, frontier_rule(s, s.committed));
  pending_emissions_.push_back({&s, s.prompt_length - 1});
}

void CudaRun::complete_decode_loop(RequestState& s, int loop) {
  record_states(s, decode_state(s), {s.row.position, s.row.position + 1}, loop);
  if (references_ && loop == 2) {
    references_->mark_source_ready(s.row.reference, s.row.key);
    references_->mark_reusable(s.row.reference, s.row.key);
    if (options_.record.keys) {
      const int count = budget(config_.s().key_fraction_bp, s.row.position + 1);
      s.record.keys.back() = read_keys(kv_.shape(), references_->view(), s.row.reference, s.row.position, count, stream_);
    }
  }
  decide_last_loop(s, loop);
  if (loop == s.row.last_loop) commit(s);
}

// The exit rule's verdict after a loop: the last loop of the row as far as it is known.
void CudaRun::decide_last_loop(RequestState& s, int loop) {
  if (!has_exit_rule()) return;
  const ExitRule& rule = config_.exit();
  float* gate = gates_.reserve<float>(1);
  exit_gate(decode_state(s), weights_.early_exit_gate.as<Bfloat16>(), weights_.early_exit_bias.as<Bfloat16>(), gate, 1, model_.hidden, stream_);
  exit_step(gate, survival_.as<float>() + s.slot, verdicts_.as<ExitVerdict>() + s.slot, 1, loop, rule.threshold, rule.min_loops, stream_);
  if (options_.tap != nullptr) tap_row("exit_gate", s, loop, -1, s.row.position, read(gate, 1));
  const ExitVerdict verdict = read(verdicts_.as<ExitVerdict>() + s.slot, 1).front();
  if (verdict == ExitVerdict::gate_not_finite) {
    throw NumericError(s.name() + ", position " + std::to_string(s.row.position) + ", loop " + std::to_string(loop) + ": the exit gate is not finite");
  }
  if (verdict == ExitVerdict::goes_on || s.row.depth_given) return;
  const int decided = rule.mode == ExitMode::threshold ? loop : std::min(config_.loops(), loop + 1);
  s.row.last_loop = std::min(s.row.last_loop, decided);  // the first decision stands
}

// The row has executed all its loops: it is absent from deeper activity maps and so inherits; the tail may flush.
void CudaRun::commit(RequestState& s) {
  const int position = s.row.position, depth = s.row.last_loop;
  for (int loop = depth + 1; loop <= config_.loops(); ++loop) record_states(s, decode_state(s), {position, position + 1}, loop);
  s.record.exit_depths.push_back(static_cast<std::uint8_t>(depth));
  if (references_) references_->release(s.row.reference, s.row.key);
  s.row.committed = true;
  s.committed = position + 1;
  ++s.record.fed;
  flush(s, frontier_rule(s, s.committed));
  pending_emissions_.push_back({&s, position});
}

// Logits of the rows that were committed in this step and, in a free run, the tokens they choose.
void CudaRun::emit_pending() {
  if (pending_emissions_.empty()) return;
  const std::vector<Emission> emissions = std::exchange(pending_emissions_, {});
  const int rows = static_cast<int>(emissions.size());
  Bfloat16* states = emitted_states_.reserve<Bfloat16>(emissions.size() * static_cast<std::size_t>(model_.hidden));
  for (std::size_t i = 0; i < emissions.size(); ++i) {
    copy_on_device(states + i * static_cast<std::size_t>(model_.hidden), decode_state(*emissions[i].request),
                   static_cast<std::size_t>(model_.hidden) * sizeof(Bfloat16), stream_);
  }
  const float* logits = forward_.logits(states, rows);
  auto* choices = emitted_tokens_.reserve<HeadChoice>(emissions.size());
  head_argmax(logits, choices, rows, model_.vocab, stream_);
  const std::vector<HeadChoice> chosen = read(choices, emissions.size());
  check_numeric_fault();
  const auto vocab = static_cast<std::size_t>(model_.vocab);
  for (std::size_t i = 0; i < emissions.size(); ++i) {
    RequestState& s = *emissions[i].request;
    const int position = emissions[i].position;
    if (chosen[i].first_non_finite >= 0) {
      throw NumericError(s.name() + ", position " + std::to_string(position) + ": logit of token " + std::to_string(chosen[i].first_non_finite) +
                         " is not finite");
    }
    if (options_.record.logits || options_.tap != nullptr) {
      const std::vector<float> row = read(logits + i * vocab, vocab);
      tap_row("logits", s, position < s.prompt_length ? config_.loops() : s.row.last_loop, -1, position, row);
      if (options_.record.logits) s.record.logits.data.insert(s.record.logits.data.end(), row.begin(), row.end());
    }
    s.record.encoded_frontier.push_back(s.encoded);
    if (!s.request->teacher_forced() && static_cast<int>(s.record.tokens.size()) < s.request->max_new_tokens) {
      s.record.tokens.push_back(chosen[i].token);
      s.stopped = chosen[i].token == s.request->eos_token_id;
    }
    if (s.stopped || s.record.fed == s.fed_limit()) finish_request(s);
  }
}

// Nothing more will run for this request: its K/V goes to the record, then its memory is free for others.
void CudaRun::finish_request(RequestState& s) {
  RequestRecord& record = s.record;
  const int length = s.prompt_length + record.fed;
  kv_.upload();
  if (options_.record.kv) record.kv = read_planes(kv_, s.slot, length, s.encoded, config_.loops(), allocator_, stream_);
  if (options_.record.codec) record.blocks = read_blocks(kv_, s.slot, stream_);
  for (auto& hidden : record.hidden) {
    if (hidden.empty()) continue;
    hidden.shape[0] = length;
    hidden.data.resize(static_cast<std::size_t>(length) * model_.hidden);
  }
  if (options_.record.gate) {
    record.gate.shape[0] = length;
    record.gate.data.resize(static_cast<std::size_t>(length) * kLoops);
  }
  record.exit_depths.resize(record.tokens.size(), 0);
  if (options_.record.logits) record.logits.shape = {1 + record.fed, model_.vocab};
  if (!options_.record.keys) record.keys.clear();
  kv_.close_request(s.slot);
  s.slot = -1;
  s.finished = true;
}

// ------------------------------------------------------------------------------------------------------------------------- encoding

int CudaRun::frontier_rule(const RequestState& s, int committed) const {
  const int frontier = encoded_frontier(config_, s.prompt_length, committed);
  if (!planted(Fault::early_flush) || !config_.q().enabled) return frontier;
  return std::max(frontier, std::min(encoded_frontier(config_, s.prompt_length, committed + kGroupSize), committed / kGroupSize * kGroupSize));
}

// Positions below it are read reconstructed. One representation is stored, so what a row must see is what is encoded now.
int CudaRun::visible_frontier(const RequestState& s, int position, RowKind kind) const {
  const auto& q = config_.q();
  if (!q.enabled) return 0;
  if (kind == RowKind::prefill) return q.policy == EncodingPolicy::streaming ? position / config_.window() * config_.window() : 0;
  const int visible = q.timing == EncodingTiming::serial_aligned ? frontier_rule(s, position) : s.encoded;
  if (visible != s.encoded) {
    throw InternalError(s.name() + ", position " + std::to_string(position) + ": the query must see " + std::to_string(visible) +
                        " positions encoded, " + std::to_string(s.encoded) + " are");
  }
  return visible;
}

void CudaRun::flush(RequestState& s, int frontier) {
  for (const PositionRange& range : block_cuts(config_, s.prompt_length, s.encoded, frontier)) {
    encode(s, range, 1, config_.loops(), {});
    pending_releases_.emplace_back(&s, range);
    s.encoded = range.end;
  }
}

void CudaRun::encode(RequestState& s, PositionRange block, int loop_first, int loop_last, const std::array<std::uint32_t, kLoops>& capacity) {
  pending_encodes_.push_back(kv_.prepare_encode(s.slot, block, loop_first, loop_last, capacity));
}

// One launch for every block and stream that became due in this step; then the BF16 pages that held them are free.
void CudaRun::encode_pending() {
  if (pending_encodes_.empty()) return;
  kv_.upload();
  ResidualEncodeArguments arguments;
  arguments.kv = kv_.view();
  arguments.tasks = encode_tasks_.upload<EncodeTask>(pending_encodes_, stream_);
  arguments.task_count = static_cast<int>(pending_encodes_.size());
  arguments.numeric_fault = numeric_fault_.as<std::uint64_t>();
  arguments.fault = options_.fault;
  residual_encode(arguments, stream_);
  pending_encodes_.clear();
  bool decoding = false;
  for (const auto& [request, range] : std::exchange(pending_releases_, {})) {
    for (int loop = 1; loop <= config_.loops(); ++loop) kv_.release_planes(request->slot, loop, range);
    decoding |= request->committed > 0;
  }
  // Between windows of a prompt the pages serve the next window; after it nobody needs them soon.
  if (decoding) kv_.trim();
}

// ---------------------------------------------------------------------------------------------------------------------- observation

// Waits for the device. Throws for a value that the specification declares an error, naming where it was met.
void CudaRun::check_numeric_fault() {
  const std::uint64_t word = read(numeric_fault_.as<std::uint64_t>(), 1).front();
  if (word == kNoNumericFault) return;
  const NumericFault fault = unpack_numeric_fault(word);
  int index = -1;
  for (const RequestState& s : requests_) {
    if (s.slot == fault.request) index = s.index;
  }
  throw NumericError(describe(fault, index));
}

// H of `loop` for `positions`, and its gate, where the record keeps them.
void CudaRun::record_states(RequestState& s, const Bfloat16* states, PositionRange positions, int loop) {
  const auto count = static_cast<std::size_t>(positions.size());
  if (options_.record.hidden) {
    const std::vector<Bfloat16> rows = read(states, count * static_cast<std::size_t>(model_.hidden));
    float* out = s.record.hidden[static_cast<std::size_t>(loop - 1)].row(positions.begin).data();
    for (std::size_t i = 0; i < rows.size(); ++i) out[i] = widen(rows[i]);
  }
  if (options_.record.gate) {
    float* gates = gates_.reserve<float>(std::max<std::size_t>(count, static_cast<std::size_t>(config_.window())));
    exit_gate(states, weights_.early_exit_gate.as<Bfloat16>(), weights_.early_exit_bias.as<Bfloat16>(), gates, positions.size(), model_.hidden, stream_);
    const std::vector<float> values = read(gates, count);
    for (std::size_t i = 0; i < count; ++i) s.record.gate.row(positions.begin + static_cast<std::int64_t>(i))[static_cast<std::size_t>(loop - 1)] = values[i];
  }
}

void CudaRun::tap_row(std::string_view operation, const RequestState& s, int loop, int layer, int position, std::span<const float> values) const {
  if (options_.tap != nullptr) options_.tap->record({submission_, s.index, position, loop, layer, operation}, values);
}

RunRecord CudaRun::finish() {
  stream_.synchronize();
  check_numeric_fault();
  RunRecord result;
  result.executor = "optimized";
  result.profile = std::string(to_string(options_.profile));
  result.trace = trace_.name;
  result.config_json = config_.canonical_json();
  for (RequestState& s : requests_) {
    if (s.record.encoded_frontier.empty()) throw InternalError(s.name() + ": the plan ended before the prompt was complete");
    if (!s.finished) finish_request(s);
    result.requests.push_back(std::move(s.record));
  }
  return result;
}

}  // namespace loopgauge::optimized
