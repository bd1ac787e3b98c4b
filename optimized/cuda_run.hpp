// SPDX-License-Identifier: Apache-2.0
// One run of a trace on the device: the life of its requests, from prompt windows to committed tokens. The arithmetic is in
// forward_pass; here is what is enqueued when, what the host decides, and what is read back for the record.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "models/executor.hpp"
#include "optimized/forward_pass.hpp"
#include "optimized/kv/kv_cache.hpp"
#include "optimized/kv/reference_store.hpp"
#include "optimized/request_state.hpp"
#include "optimized/runtime/growable_buffer.hpp"
#include "optimized/runtime/stream.hpp"

namespace loopgauge::optimized {

struct RunContext {
  const DeviceWeights* weights = nullptr;
  const DeviceRopeTable* rope = nullptr;             // covers longest_sequence(trace)
  CublasLt* library = nullptr;
  LinearImplementation linear = LinearImplementation::automatic;
  DeviceAllocator* allocator = nullptr;
  const Stream* stream = nullptr;
  bool poison = false;
};

// Positions of the longest request: its prompt and every token that may be forwarded.
int longest_sequence(const Trace& trace);

class CudaRun {
 public:
  // Throws UnsupportedError or ConfigError for options outside what this executor can do. `trace` outlives the run.
  CudaRun(const RunContext& context, const Trace& trace, const EffectiveConfig& config, const RunOptions& options);
  ~CudaRun();

  void submit(const Submission& submission);
  RunRecord finish();

 private:
  // One item's share of a step: rows of one request that advance by one loop.
  struct Part {
    RequestState* request = nullptr;
    RowKind kind = RowKind::prefill;
    PositionRange piece;                             // decode: one position
    int loop = 1;
    int window = -1;                                 // prefill
    std::vector<std::int32_t> positions;             // that execute the loop
    int first_row = 0;                               // in the batch
  };
  struct Emission {
    RequestState* request;
    int position;
  };
  class TapObserver;

  void act(const Action& action);  // cuda_run_actions

  void run_step(std::vector<Part>& parts);
  RowBatch make_batch(std::vector<Part>& parts);
  int reference_slot(const RequestState& s, int loop) const;
  std::int32_t contiguous_position(const RequestState& s, const Part& part, std::int32_t position) const;
  void load_inputs(const std::vector<Part>& parts, Bfloat16* rows);
  void store_outputs(const std::vector<Part>& parts);

  std::optional<Part> prefill_part(RequestState& s, int window, PositionRange piece, int loop);
  std::optional<Part> decode_part(RequestState& s, int position, int loop);

  void open(RequestState& s);
  void begin_window_loop(RequestState& s, int window, int loop);
  std::vector<std::int32_t> select_window(RequestState& s, int window, int loop);
  void normalize_inactive_again(RequestState& s, int window, int loop);
  void complete_window_loop(RequestState& s, int window, int loop);
  void complete_prompt(RequestState& s);
  void complete_decode_loop(RequestState& s, int loop);
  void decide_last_loop(RequestState& s, int loop);
  void commit(RequestState& s);
  void release_reference(RequestState& s);
  void emit_pending();
  void finish_request(RequestState& s);

  int frontier_rule(const RequestState& s, int committed) const;
  int visible_frontier(const RequestState& s, int position, RowKind kind) const;
  void flush(RequestState& s, int frontier);
  void encode(RequestState& s, PositionRange block, int loop_first, int loop_last, const std::array<std::uint32_t, kLoops>& capacity);
  void encode_pending();

  std::unique_ptr<RowObserver> make_tap_observer(const std::vector<Part>& parts);
  void check_numeric_fault();
  void record_states(RequestState& s, const Bfloat16* states, PositionRange positions, int loop);
  void tap_row(std::string_view operation, const RequestState& s, int loop, int layer, int position, std::span<const float> values) const;
  bool planted(Fault fault) const { return options_.fault == fault; }
  const RequestRecord* decisions(const RequestState& s) const;
  bool has_exit_rule() const { return config_.exit().mode == ExitMode::threshold || config_.exit().mode == ExitMode::delayed; }
  Bfloat16* decode_state(const RequestState& s) { return decode_states_.as<Bfloat16>() + static_cast<std::size_t>(s.slot) * model_.hidden; }

  // Waits for the stream.
  template <class T>
  std::vector<T> read(const T* source, std::size_t count) {
    std::vector<T> values(count);
    if (count != 0) LOOPGAUGE_CUDA_CHECK(cudaMemcpyAsync(values.data(), source, count * sizeof(T), cudaMemcpyDeviceToHost, stream_));
    stream_.synchronize();
    return values;
  }

  const ModelConfig& model_;
  const DeviceWeights& weights_;
  const Trace& trace_;
  const EffectiveConfig config_;
  const RunOptions options_;
  DeviceAllocator& allocator_;
  const Stream& stream_;
  const int longest_;

  std::vector<RequestState> requests_;
  ForwardPass forward_;
  KvCache kv_;
  std::optional<ReferenceStore> references_;
  DeviceBuffer decode_states_;                       // [kMaxRequests, hidden]: H of the decode row's last loop; after the prompt, its last row
  DeviceBuffer survival_, verdicts_;                 // [kMaxRequests]: exit hazard
  DeviceBuffer numeric_fault_;                       // one word
  GrowableBuffer tokens_, indices_, gates_, emitted_states_, emitted_tokens_, candidates_, selected_, selection_scratch_, encode_tasks_,
      inactive_rows_;
  std::vector<WindowState> spare_windows_;
  std::vector<EncodeTask> pending_encodes_;
  std::vector<std::pair<RequestState*, PositionRange>> pending_releases_;
  std::vector<Emission> pending_emissions_;
  std::uint64_t generations_ = 0;
  int submission_ = 0;
};

}  // namespace loopgauge::optimized
