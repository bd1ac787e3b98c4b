// SPDX-License-Identifier: Apache-2.0
#include "optimized/cuda_run.hpp"

#include <algorithm>
#include <limits>
#include <string>

#include "models/error.hpp"
#include "optimized/cuda_run_handoff.hpp"
#include "optimized/kv/numeric_fault.hpp"
#include "optimized/runtime/cuda_check.hpp"

namespace loopgauge::optimized {
namespace {

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

// A block is sealed before its rows are known to belong to the result when the tail is shorter than what is in flight.
void check_in_flight(const RunOptions& options, const EffectiveConfig& config, const Trace& trace) {
  const int in_flight = options.submissions_in_flight;
  if (in_flight < 1) throw ConfigError("submissions in flight: " + std::to_string(in_flight) + " is not at least 1");
  if (in_flight > 1 && config.exit().mode == ExitMode::threshold) {
    throw UnsupportedError(
        "exit threshold needs the gate of a loop before the next one is issued: asynchronous execution has exits full, trace and delayed");
  }
  const auto& q = config.q();
  const bool moves = q.enabled && q.policy != EncodingPolicy::fixed_prompt;
  const bool free_run =
      std::any_of(trace.requests.begin(), trace.requests.end(), [](const TraceRequest& request) { return !request.teacher_forced(); });
  if (moves && free_run && options.speculation.kind == SpeculationKind::none && q.tail < in_flight - 2) {
    throw UnsupportedError("a tail of " + std::to_string(q.tail) + " with " + std::to_string(in_flight) +
                           " submissions in flight would encode rows that may lie past the end of the sequence: use a tail of at least " +
                           std::to_string(in_flight - 2));
  }
}

// The planted faults are in what the host decides.
void check_speculation(const RunOptions& options) {
  if (options.speculation.kind == SpeculationKind::none || options.submissions_in_flight == 1) return;
  for (const Fault fault : {Fault::stale_reference_at_position, Fault::plane_not_truncated, Fault::candidate_sealed, Fault::draft_hidden_shared,
                            Fault::acceptance_off_by_one, Fault::early_flush}) {
    if (options.fault == fault) {
      throw UnsupportedError("fault " + std::string(to_string(fault)) + " of a speculating run is planted with one submission in flight");
    }
  }
}

}  // namespace

CudaRun::CudaRun(const RunContext& context, const Trace& trace, const EffectiveConfig& config, const RunOptions& options)
    : model_(context.weights->config),
      weights_(*context.weights),
      trace_(trace),
      config_(config),
      options_(options),
      allocator_(*context.allocator),
      stream_(*context.stream),
      arenas_(*context.arenas),
      longest_(longest_sequence(trace)),
      model_sha256_(context.model_sha256),
      prefill_step_rows_(context.prefill_step_rows),
      poison_(context.poison),
      device_(context.device),
      forward_(forward_context(context, config, options, longest_)),
      kv_({model_.layers, model_.heads, model_.head_dim}, allocator_, stream_, {config.q().enabled, context.poison}),
      state_gates_(allocator_, MemoryCategory::workspace),
      emitted_states_(allocator_, MemoryCategory::workspace),
      emitted_choices_(allocator_, MemoryCategory::workspace),
      emitted_indices_(allocator_, MemoryCategory::workspace),
      token_draws_(allocator_, MemoryCategory::workspace),
      distributions_(allocator_, MemoryCategory::workspace),
      confirmed_(allocator_, MemoryCategory::workspace),
      encode_tasks_(allocator_, MemoryCategory::conversion_scratch),
      rewrite_tasks_(allocator_, MemoryCategory::conversion_scratch),
      inactive_rows_(allocator_, MemoryCategory::workspace),
      inactive_indices_(allocator_, MemoryCategory::workspace),
      live_indices_(allocator_, MemoryCategory::workspace),
      started_slots_(allocator_, MemoryCategory::workspace),
      started_states_(allocator_, MemoryCategory::workspace),
      draft_outcomes_(allocator_, MemoryCategory::workspace),
      round_outcomes_(allocator_, MemoryCategory::workspace),
      due_blocks_(allocator_, MemoryCategory::conversion_scratch),
      due_again_(allocator_, MemoryCategory::conversion_scratch) {
  check_in_flight(options_, config_, trace);
  check_speculation(options_);
  if (options_.graph_replay) graphs_.emplace();
  open_ticket();
  const auto live = static_cast<std::size_t>(std::min(static_cast<int>(trace.requests.size()), kMaxRequests));
  int references_per_request = std::max(live_rows(), planted(Fault::stale_reference_slot) ? 2 : 1);
  if (planted(Fault::stale_reference_at_position)) references_per_request *= 2;
  if (config_.s().enabled) references_.emplace(kv_.shape(), static_cast<int>(live) * references_per_request, longest_, allocator_);
  decode_states_ = allocator_.allocate_array<Bfloat16>(MemoryCategory::hidden_rows,
                                                        live * static_cast<std::size_t>(live_rows()) * static_cast<std::size_t>(model_.hidden));
  exits_ = allocator_.allocate_array<ExitState>(MemoryCategory::workspace, live);
  chosen_tokens_ = allocator_.allocate_array<std::int32_t>(MemoryCategory::workspace, live);
  const bool draws_drafts = options_.speculation.kind != SpeculationKind::none &&
                            std::any_of(trace.requests.begin(), trace.requests.end(), [](const TraceRequest& request) { return request.temperature != 0.0f; });
  if (draws_drafts) {
    draft_distributions_ = allocator_.allocate_array<float>(
        MemoryCategory::workspace, live * static_cast<std::size_t>(live_rows()) * static_cast<std::size_t>(model_.vocab));
  }
  gates_ = allocator_.allocate_array<float>(MemoryCategory::workspace, kMaxRequests);
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
    s.begun_loops.assign(windows, 0);
    s.completed_loops.assign(windows, 0);
    s.record.prompt_length = s.prompt_length;
    s.record.tokens = request.forced;
    s.record.executions.assign(static_cast<std::size_t>(s.capacity) * kLoops, 0);
    if (config_.selects_tokens()) {
      for (auto& scores : s.record.scores)
        scores.assign(static_cast<std::size_t>(s.prompt_length), std::numeric_limits<float>::quiet_NaN());
    }
    const float nan = std::numeric_limits<float>::quiet_NaN();
    for (int loop = 1; options_.record.hidden && loop <= config_.loops(); ++loop) {
      s.record.hidden[static_cast<std::size_t>(loop - 1)] = Tensor<float>({s.capacity, model_.hidden}, nan);
    }
    if (options_.record.gate) s.record.gate = Tensor<float>({s.capacity, kLoops}, nan);
  }
  if (runs_ahead()) prepare_speculation();
  if (options_.stage == Stage::prefill) source_ = std::make_unique<HandoffSource>(*this);
  if (options_.stage == Stage::decode) target_ = std::make_unique<HandoffTarget>(*this);
  allocator_.on_pressure([this](std::size_t missing_bytes) { return relieve_pressure(missing_bytes); });
}

CudaRun::~CudaRun() {
  allocator_.on_pressure({});
  // Work in flight reads buffers that are about to be freed; a failure here is reported by the next run.
  static_cast<void>(cudaStreamSynchronize(stream_));
  give_arenas_back();
}

const RequestRecord* CudaRun::decisions(const RequestState& s) const {
  return options_.decisions == nullptr ? nullptr : &options_.decisions->requests.at(static_cast<std::size_t>(s.index));
}

void CudaRun::submit(const Submission& submission) {
  take_in_activations();
  while (submissions_in_flight() >= options_.submissions_in_flight) deliver_oldest();
  submission_ = static_cast<int>(counters_.submissions++);
  // Whether a planned failure has anything to fail is asked for its own sake, not to prepare a submission.
  if (!submission.actions.empty() || (runs_ahead() && submission.failure != PlannedFailure::none)) settle();
  for (const Action& action : submission.actions) act(action);
  require_stage(submission.items);
  failure_ = submission.failure;
  const std::size_t deliveries = ticket_->deliveries.size();
  try {
    run_items(submission.items);
  } catch (const PlannedFailureHappened&) {
    ++counters_.failures;
  } catch (const DeviceMemoryError&) {
    if (submission.failure != PlannedFailure::allocation || failure_ != PlannedFailure::none) throw;
    ticket_->deliveries.resize(std::min(deliveries, ticket_->deliveries.size()));  // nothing has begun
    ++counters_.failures;
  }
  failure_ = PlannedFailure::none;
  for (RequestState& s : requests_) s.settled.reset();
  close_ticket();
  counters_.most_in_flight = std::max(counters_.most_in_flight, static_cast<std::int64_t>(submissions_in_flight()));
  if (!asynchronous()) deliver_oldest();
}

void CudaRun::require_stage(const std::vector<WorkItem>& items) const {
  if (options_.stage == Stage::whole) return;
  for (const WorkItem& item : items) {
    const RequestState& s = requests_.at(static_cast<std::size_t>(item.request));
    if ((options_.stage == Stage::prefill) != (item.kind == RowKind::prefill)) throw InternalError(s.name() + ": an item of the other side of the handoff");
    if (options_.stage == Stage::decode && s.slot < 0 && !s.finished) throw InternalError(s.name() + ": an item of a request that was not handed in");
  }
}

void CudaRun::run_items(const std::vector<WorkItem>& items) {
  if (!items.empty() && items.front().kind != RowKind::prefill && items.front().kind != RowKind::decode) {
    return runs_ahead() ? speculate_ahead(items) : speculate(items);
  }
  if (items.size() == 1) {
    const WorkItem& item = items.front();
    RequestState& s = requests_.at(static_cast<std::size_t>(item.request));
    if (item.kind == RowKind::decode) {
      for (int loop = item.loop_first; loop <= item.loop_last; ++loop) {
        std::vector<Part> parts;
        if (auto part = decode_part(s, item.begin, loop)) parts.push_back(*part);
        run_step(parts);
      }
      return;
    }
    for (int window = item.begin / config_.window(); window * config_.window() < item.end;) {
      int end = window;
      for (int loop = item.loop_first, rows = 0; loop <= item.loop_last; ++loop) {
        std::vector<Part> parts;
        if (loop == item.loop_first) {
          end = join_windows(item, window, loop, rows, parts);
        } else {
          for (int w = window; w < end; ++w) add_window(item, w, loop, parts);
        }
        run_step(parts);
      }
      window = end;
    }
    return;
  }
  // Every item advances by one loop. Windows of one item that do not join follow each other: a step holds the next ones of every item.
  std::vector<int> next;
  for (const WorkItem& item : items) next.push_back(item.begin / config_.window());
  for (bool first = true, more = true; more; first = false) {
    more = false;
    std::vector<Part> parts;
    int rows = 0;
    for (std::size_t i = 0; i < items.size(); ++i) {
      const WorkItem& item = items[i];
      if (item.kind == RowKind::decode) {
        if (!first) continue;
        if (auto part = decode_part(requests_.at(static_cast<std::size_t>(item.request)), item.begin, item.loop_first)) parts.push_back(*part);
        continue;
      }
      if (next[i] * config_.window() >= item.end) continue;
      next[i] = join_windows(item, next[i], item.loop_first, rows, parts);
      more = true;
    }
    run_step(parts);
  }
}

void CudaRun::add_window(const WorkItem& item, int window, int loop, std::vector<Part>& parts) {
  RequestState& s = requests_.at(static_cast<std::size_t>(item.request));
  const PositionRange range = window_range(window, s.prompt_length, config_.window());
  if (auto part = prefill_part(s, window, {std::max(range.begin, item.begin), std::min(range.end, item.end)}, loop)) parts.push_back(*part);
}

// The item's next windows from `window` on that go through `loop` in one step, and where they end: one, and as many more as the step has room for,
// of whose rows `rows` counts. Rows of a step write K and V before any of them reads (S-KVA-1) and a selection reads its own window's scores only, so that
// a later window sees what it would see after the earlier ones; but under `streaming` it sees them encoded.
int CudaRun::join_windows(const WorkItem& item, int window, int loop, int& rows, std::vector<Part>& parts) {
  const RequestState& s = requests_.at(static_cast<std::size_t>(item.request));
  const bool joins = !config_.q().enabled || config_.q().policy != EncodingPolicy::streaming;
  const int first = window;
  while (window * config_.window() < item.end) {
    const int more = window_rows(s, window, loop);
    if (window > first && (!joins || rows + more > prefill_step_rows_)) break;
    add_window(item, window, loop, parts);
    rows += more;
    ++window;
  }
  return window;
}

RunRecord CudaRun::finish() {
  take_in_activations();
  while (!in_flight_.empty()) deliver_oldest();
  prefixes_.clear();
  RunRecord result;
  result.held_at_drain = held();
  record_reused_windows();
  result.executor = "optimized";
  result.profile = std::string(to_string(options_.profile));
  result.trace = trace_.name;
  result.config_json = config_.canonical_json();
  for (RequestState& s : requests_) {
    if (!s.finished) {
      const bool emitted = !s.record.encoded_frontier.empty();
      if (!emitted && options_.stage == Stage::whole) throw InternalError(s.name() + ": the plan ended before the prompt was complete");
      if (emitted) finish_request(s);  // of a plan that is not complete: what it holds is counted above
    }
    close_record(s);
    result.requests.push_back(std::move(s.record));
  }
  close_ticket();  // ending a request encodes what is due
  deliver_oldest();
  result.counters = counters_;
  if (options_.speculation.kind != SpeculationKind::none) result.speculation_times = times_;
  return result;
}

}  // namespace loopgauge::optimized
