// SPDX-License-Identifier: Apache-2.0
// One run of a trace on the device: the life of its requests, from prompt windows to committed tokens. The arithmetic is in forward_pass; here
// is what is enqueued when, what the host decides, and what is read back for the record.
//
// A submission is issued without reading anything: how many rows a selection finds is known, which ones is not, and the token that a row
// chooses is embedded where it was chosen. What the host wants to know travels to page-locked memory of the submission's ticket, and is acted
// upon when the ticket is delivered: at once with one submission in flight, later with more (S-ASYNC-1).
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "models/executor.hpp"
#include "models/handoff/transfer.hpp"
#include "models/sampling.hpp"
#include "optimized/forward_pass.hpp"
#include "optimized/kv/kv_cache.hpp"
#include "optimized/kv/reference_store.hpp"
#include "optimized/ops/draw_tokens.cuh"
#include "optimized/ops/head_argmax.cuh"
#include "optimized/ops/residual_encode.cuh"
#include "optimized/ops/speculative_rows.cuh"
#include "optimized/prefix_store.hpp"
#include "optimized/request_state.hpp"
#include "optimized/runtime/growable_buffer.hpp"
#include "optimized/runtime/pinned_arena.hpp"
#include "optimized/runtime/stream.hpp"
#include "optimized/snapshot.hpp"
#include "optimized/step_graphs.hpp"

namespace loopgauge::optimized {

struct RunContext {
  const DeviceWeights* weights = nullptr;
  const DeviceRopeTable* rope = nullptr;             // covers longest_sequence(trace)
  CublasLt* library = nullptr;
  LinearImplementation linear = LinearImplementation::automatic;
  DeviceAllocator* allocator = nullptr;
  const Stream* stream = nullptr;                    // the allocator's
  std::vector<PinnedArena>* arenas = nullptr;        // of former runs, for the next ones: page-locking memory waits for the whole device
  std::string model_sha256;
  int prefill_step_rows = 0;                         // CudaExecutorOptions
  bool poison = false;
  int device = 0;                                    // CUDA ordinal
};

class CudaRun {
 public:
  // Throws UnsupportedError or ConfigError for options outside what this executor can do. `trace` outlives the run.
  CudaRun(const RunContext& context, const Trace& trace, const EffectiveConfig& config, const RunOptions& options);
  ~CudaRun();

  void submit(const Submission& submission);
  RunRecord finish();
  // The ends of handoffs (S-PD); null but in the stage that has them.
  handoff::Source* handoff_source();
  handoff::Target* handoff_target();

 private:
  // One item's share of a step: rows of one request that advance by one loop.
  struct Part {
    RequestState* request = nullptr;
    RowKind kind = RowKind::prefill;
    PositionRange piece;                             // decode: one position
    int loop = 1;
    int window = -1;                                 // prefill
    int first_rank = 0;                              // prefill: the part's first row among those of the window that execute the loop
    int rows = 1;                                    // that execute the loop
    int first_row = 0;                               // in the batch
    int live = -1;                                   // index of a speculative row among the request's live rows; negative: none. Where rows run
                                                     // ahead, `piece` is all positions that it may have
  };
  struct Emission {
    RequestState* request;
    int position;
    int depth;                                       // last loop of the row; 0: the device knows
  };
  // Work of a speculating run between two events, and what it was for.
  struct TimedSpan {
    Event begin{Event::Timing::on}, end{Event::Timing::on};
    double draft = 0, verify = 0, accept = 0;        // shares, 1 together
  };
  // A submission whose results have not been read.
  struct Ticket {
    int submission = 0;
    bool joined = false;                             // no submission's own: its results are read with those of the one before
    PinnedArena arena;                               // what went to the device, what comes back
    Event done;
    const std::uint64_t* numeric_fault = nullptr;
    std::vector<int> owners;                         // request index by slot, as it is for this submission; -1: nobody's
    std::vector<std::function<void()>> deliveries;
    std::vector<std::unique_ptr<TimedSpan>> spans;   // the first `timed` of them have ended
    std::size_t timed = 0;
  };
  // A window that a request began with, and whose record says what a cold run would have observed of it.
  struct ReusedWindow {
    int request, window, publisher;
  };
  class TapObserver;
  class HandoffSource;
  class HandoffTarget;
  struct PlannedFailureHappened {};                  // thrown where a launch breaks off on purpose

  // Submissions in flight: cuda_run_tickets.
  bool asynchronous() const { return options_.submissions_in_flight > 1; }
  void open_ticket();
  void give_arenas_back();
  void close_ticket(bool joined = false);
  int submissions_in_flight() const;
  // Results of requests that were handed in since the last submission are read with that one's.
  void take_in_activations();
  void note_owners();
  void deliver(Ticket& ticket);
  void deliver_oldest();
  // Waits for everything that was enqueued and delivers what the open ticket has so far; only synchronous execution may.
  void deliver_early();
  // Waits for the device, so that what the host keeps of K/V is complete. Reads no result.
  void settle();
  void on_delivery(std::function<void()> delivery) { ticket_->deliveries.push_back(std::move(delivery)); }
  void check_numeric_fault(const Ticket& ticket) const;
  // `count` values of device memory as they are at this place of the stream; theirs from delivery on.
  template <class T>
  const T* download(const T* source, std::size_t count) {
    T* target = ticket_->arena.take<T>(count);
    if (count != 0) LOOPGAUGE_CUDA_CHECK(cudaMemcpyAsync(target, source, count * sizeof(T), cudaMemcpyDeviceToHost, stream_));
    return target;
  }
  // Waits for the stream: for observers, for planted faults, and for exits that the next loop depends on.
  template <class T>
  std::vector<T> read(const T* source, std::size_t count) {
    std::vector<T> values(count);
    if (count != 0) LOOPGAUGE_CUDA_CHECK(cudaMemcpyAsync(values.data(), source, count * sizeof(T), cudaMemcpyDeviceToHost, stream_));
    stream_.synchronize();
    return values;
  }

  // Actions: cuda_run_actions. Everything that was issued has run.
  void act(const Action& action);
  void cancel(RequestState& s);
  void rewind(RequestState& s);
  void release_row(RequestState& s);
  void release_storage(RequestState& s);
  SnapshotOwner owner_of(const RequestState& s) const;
  std::vector<DeviceRange> slot_ranges(const RequestState& s);
  std::vector<DeviceRange> device_ranges(RequestState& s);
  void preempt(RequestState& s);
  void restore(RequestState& s);
  void plant_incomplete_restore(const RequestState& s);

  // Published windows: cuda_run_prefixes.
  std::string identity_of(const RequestState& s, int window) const;
  void publish(RequestState& s, int windows);
  void use_in_order(const RequestState& s, int windows);
  void reuse(RequestState& s, int windows);
  void evict(const RequestState& s, int from);
  bool relieve_pressure(std::size_t missing_bytes);
  void record_reused_windows();

  void require_stage(const std::vector<WorkItem>& items) const;
  void run_items(const std::vector<WorkItem>& items);
  void add_window(const WorkItem& item, int window, int loop, std::vector<Part>& parts);
  int join_windows(const WorkItem& item, int window, int loop, int& rows, std::vector<Part>& parts);

  // Batches: cuda_run_batch.
  std::optional<Part> prefill_part(RequestState& s, int window, PositionRange piece, int loop);
  std::optional<Part> decode_part(RequestState& s, int position, int loop);
  void run_step(std::vector<Part>& parts);
  RowBatch make_batch(std::vector<Part>& parts);
  void add_rows(RowBatch& batch, const Part& part);
  int reference_slot(const RequestState& s, int loop) const;
  void run_batch(const std::vector<Part>& parts, RowBatch& batch);
  void enqueue_batch(const std::vector<Part>& parts, const RowBatch& batch);
  bool can_replay(const RowBatch& batch) const;
  void load_inputs(const std::vector<Part>& parts, int decode_rows, Bfloat16* rows);
  void store_outputs(const std::vector<Part>& parts, int decode_rows);
  void step_exits(int decode_rows);

  // Prompt windows: cuda_run_windows.
  void open(RequestState& s);
  int window_rows(const RequestState& s, int window, int loop) const;
  std::int32_t* window_positions(RequestState& s, int window, int loop);
  WindowState take_window_state();
  void begin_window_loop(RequestState& s, int window, int loop);
  void select_window(RequestState& s, int window, int loop);
  void record_selection(RequestState& s, int window, int loop, const float* scores, const std::int32_t* selected);
  void normalize_inactive_again(RequestState& s, int window, int loop);
  void complete_window_loop(RequestState& s, int window, int loop);

  // Decode rows and the end of a request: cuda_run_requests.
  void complete_prompt(RequestState& s);
  void complete_decode_loop(RequestState& s, const Part& part);
  void record_keys(RequestState& s, int position, int reference);
  std::pair<const std::uint64_t*, const float*> download_keys(int reference);
  void keep_keys(RequestState& s, int position, const std::uint64_t* masks, const float* mass);
  void take_exit(RequestState& s, const Part& part);
  void complete_row(RequestState& s, int loop);
  void release_reference(RequestState& s);
  void finish_request(RequestState& s);
  void close_record(RequestState& s);
  void count_prefill(RequestState& s, const Part& part);
  void count_execution(RequestState& s, int position, int loop);
  HeldResources held() const;

  // Speculation: cuda_run_speculation.
  // What the logits of a live row say of the row after it, or without one choose.
  struct Verdict {
    HeadChoice choice;                               // the candidate, or the token in its place
    bool confirmed = false;
    bool ends = false;                               // the token ends the sequence
    const float* logits = nullptr;                   // on the device
  };
  void speculate(const std::vector<WorkItem>& items);
  bool is_speculative_work(const RequestState& s, const WorkItem& item) const;
  void begin_live_row(RequestState& s, std::int32_t token, bool drawn = false);
  void begin_pending_row(RequestState& s);
  std::vector<Part> live_parts(RequestState& s, const WorkItem& item, int loop);
  Part live_part(RequestState& s, std::size_t index, int loop);
  void advance_live_rows(std::vector<Part> parts);
  void complete_live_loop(RequestState& s, const Part& part);
  void propose(RequestState& s);
  void count_doubled_bytes(int positions);
  int doubled_positions(const RequestState& s) const;
  std::vector<Verdict> judge_rows(RequestState& s, std::size_t count);
  void commit_rows(RequestState& s, const SpeculationRound& round, const std::vector<Verdict>& verdicts);
  void decide_round(RequestState& s);
  void settle_pipeline(RequestState& s);
  void give_up_rows(RequestState& s, std::size_t first);
  void begin_span();
  void end_span(double draft, double verify, double accept);
  void add_times(Ticket& ticket);
  float* draft_distribution(const RequestState& s, int state) {
    return draft_distributions_.as<float>() + static_cast<std::size_t>(s.slot * live_rows() + state) * static_cast<std::size_t>(model_.vocab);
  }
  int reference_of(const Part& part) const;
  void leave_behind(RequestState& s, LiveRow& row);
  void share_draft_states(RequestState& s);

  // Speculation with several submissions in flight: cuda_run_speculation_ahead.
  struct DecidedRound {
    const RoundOutcome* outcome;
    const HeadChoice* choices;                       // [rows]: the tokens that are emitted first
    const float* logits;                             // [rows][vocab] or null
  };
  bool runs_ahead() const { return asynchronous() && options_.speculation.kind != SpeculationKind::none && options_.stage != Stage::prefill; }
  void prepare_speculation();
  void start_speculating(const std::vector<Emission>& emissions, const HeadChoice* choices);
  void speculate_ahead(const std::vector<WorkItem>& items);
  bool may_be_speculative_work(const RequestState& s, const WorkItem& item) const;
  PositionRange possible_positions(const RequestState& s, int index) const;
  std::vector<Part> ahead_parts(RequestState& s, const WorkItem& item, int loop);
  void seal_if_due(RequestState& s, int rows, RoundOutcome* outcome);
  void hold_references(RequestState& s);
  void add_ahead_row(RowBatch& batch, const Part& part);
  void advance_ahead(std::vector<Part> parts);
  void record_ahead(const Part& part, const QueryRow* found);
  const float* logits_ahead(int count);
  void propose_ahead(RequestState& s, int index);
  void decide_ahead(RequestState& s);
  void deliver_round(RequestState& s, const DecidedRound& decided);
  void read_speculation();
  void give_up_ahead(RequestState& s);

  // Emission: cuda_run_emission.
  void emit_pending();
  static bool samples(const RequestState& s) { return s.request->temperature != 0.0f && !s.request->teacher_forced(); }
  static float uniform(const RequestState& s, int position, SamplingPurpose purpose) {
    return uniform_draw(s.request->seed, s.request->id, position, purpose);
  }
  void draw(const float* logits, HeadChoice* choices, std::int32_t* confirmed, std::span<TokenDraw> draws);
  void deliver_emission(const Emission& emission, int depth, const HeadChoice& choice, const float* logits);

  // Encoding: cuda_run_encoding.
  int frontier_rule(const RequestState& s, int committed) const;
  int visible_frontier(const RequestState& s, int position, RowKind kind) const;
  void flush(RequestState& s, int frontier);
  void seal(RequestState& s, PositionRange block);
  void seal_ahead(RequestState& s, int frontier);
  void seal_unverified(RequestState& s, int rows_end);
  bool seals_unverified() const;
  // Blocks may hold rows that are given up: by the flush rule, or by a planted fault.
  bool keeps_sealed_candidates() const { return seals_unverified() || planted(Fault::candidate_sealed); }
  bool members_known(const RequestState& s, PositionRange block) const;
  std::array<std::uint32_t, kLoops> largest_streams(const RequestState& s, PositionRange block) const;
  void encode(RequestState& s, PositionRange block, int loop_first, int loop_last, const std::array<std::uint32_t, kLoops>& capacity, bool members_known);
  void encode_pending();
  ResidualEncodeArguments encoding_of(const EncodeTask* tasks, std::size_t count);
  void launch_encoding(const EncodeTask* blocks, std::size_t count);

  // Observation: cuda_run_observation.
  std::unique_ptr<RowObserver> make_tap_observer(const std::vector<Part>& parts, int rows);
  void record_states(RequestState& s, const Bfloat16* states, PositionRange positions, int loop);
  static void widen_row(std::span<const Bfloat16> from, float* to);
  void tap_row(std::string_view operation, const RequestState& s, int loop, int layer, int position, std::span<const float> values) const;
  bool planted(Fault fault) const { return options_.fault == fault; }
  const RequestRecord* decisions(const RequestState& s) const;
  bool has_exit_rule() const { return config_.exit().mode == ExitMode::threshold || config_.exit().mode == ExitMode::delayed; }
  int live_rows() const { return options_.speculation.live_rows(); }
  Bfloat16* decode_state(const RequestState& s, int live = 0) {
    return decode_states_.as<Bfloat16>() + static_cast<std::size_t>(s.slot * live_rows() + live) * static_cast<std::size_t>(model_.hidden);
  }

  const ModelConfig& model_;
  const DeviceWeights& weights_;
  const Trace& trace_;
  const EffectiveConfig config_;
  const RunOptions options_;
  DeviceAllocator& allocator_;
  const Stream& stream_;
  std::vector<PinnedArena>& arenas_;
  const int longest_;
  const std::string model_sha256_;
  const int prefill_step_rows_;
  const bool poison_;
  const int device_;

  std::vector<RequestState> requests_;
  ForwardPass forward_;
  KvCache kv_;
  std::optional<ReferenceStore> references_;
  std::optional<StepGraphs> graphs_;
  PrefixStore prefixes_;
  std::vector<ReusedWindow> reused_;                 // in the order of reuse
  // By slot of the K/V cache:
  DeviceBuffer decode_states_;                       // [live rows][hidden] BF16: H of the decode row's last loop; after the prompt, its last row
  DeviceBuffer exits_;                               // ExitState of the decode row
  DeviceBuffer chosen_tokens_;                       // int32: the token that the last logits chose
  DeviceBuffer draft_distributions_;                 // [live rows][vocab] FP32: what a live row's token was drawn from
  SpeculationView speculation_;                      // where rows run ahead, with the arrays that it points to
  DeviceBuffer speculation_states_, live_tokens_, live_references_, speculation_steps_;
  DeviceBuffer gates_;                               // [decode rows of a batch] FP32
  DeviceBuffer numeric_fault_;                       // one word
  GrowableBuffer state_gates_, emitted_states_, emitted_choices_, emitted_indices_, token_draws_, distributions_, confirmed_, encode_tasks_,
      rewrite_tasks_, inactive_rows_, inactive_indices_, live_indices_, started_slots_, started_states_, draft_outcomes_, round_outcomes_, due_blocks_, due_again_;
  std::vector<WindowState> spare_windows_;
  std::vector<EncodeTask> pending_encodes_, pending_rewrites_;
  std::vector<std::pair<RequestState*, PositionRange>> pending_releases_;
  std::vector<Emission> pending_emissions_;
  std::deque<std::unique_ptr<Ticket>> in_flight_;
  std::vector<std::unique_ptr<Ticket>> spare_tickets_;
  std::unique_ptr<Ticket> ticket_;                   // open: of the submission that is being issued, or comes next
  PlannedFailure failure_ = PlannedFailure::none;    // of the submission that is being issued, until it happens
  RunCounters counters_;
  SpeculationTimes times_;
  std::uint64_t generations_ = 0;
  int submission_ = 0;                               // being issued, or being delivered
  bool activated_ = false;                           // a request was handed in since the last submission
  std::unique_ptr<HandoffSource> source_;
  std::unique_ptr<HandoffTarget> target_;
};

}  // namespace loopgauge::optimized
