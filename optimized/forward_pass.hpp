// SPDX-License-Identifier: Apache-2.0
// One loop of the shared layers for a batch of rows: the model, with no notion of a request's life.
#pragma once

#include <compare>
#include <cstdint>
#include <string_view>
#include <vector>

#include "models/executor.hpp"
#include "models/run_record.hpp"
#include "optimized/device_weights.hpp"
#include "optimized/kv/kv_cache.hpp"
#include "optimized/kv/reference_store.hpp"
#include "optimized/ops/attention_prefill.cuh"
#include "optimized/ops/linear.cuh"
#include "optimized/ops/prepare_rows.cuh"
#include "optimized/runtime/growable_buffer.hpp"
#include "optimized/runtime/stream.hpp"

namespace loopgauge::optimized {

// Rows that advance by one loop together: decode rows first, then the active rows of prefill segments. Positions of rows that a selection
// found are on the device only; how many there are is known.
struct RowBatch {
  std::vector<RowSource> rows;
  int decode_rows = 0;
  std::vector<PrefillSegment> segments;                // cover rows [decode_rows, rows.size())
  std::vector<const StepKeys*> forced_keys;            // [decode_rows]: keys to take at loop 2 instead of selecting; null: select
  bool take_scores = false;                            // the final norm also scores the rows against their loop input
  int decode_length = 0;                               // decode attention is launched for rows of so many positions, of more where a row has more
  int layers = -1;                                     // the pass breaks off after so many; negative: it does not (a planned failure)

  int size() const { return static_cast<int>(rows.size()); }
};

// Sees intermediate rows of a forward pass; `values` [batch rows, width] are valid until the call returns.
class RowObserver {
 public:
  virtual ~RowObserver() = default;
  virtual void observe(std::string_view operation, int layer, const Bfloat16* values, std::int64_t row_stride, int width) = 0;
  // After loop 2's reference of one layer is complete.
  virtual void observe_references(int layer) = 0;
};

// Device storage of the cosine and sine tables.
struct DeviceRopeTable {
  DeviceBuffer cosine, sine;                           // [positions, head_dim / 2] BF16
  int positions = 0;
};

struct ForwardContext {
  const DeviceWeights* weights = nullptr;
  const DeviceRopeTable* rope = nullptr;
  CublasLt* library = nullptr;
  LinearImplementation linear = LinearImplementation::automatic;
  DeviceAllocator* allocator = nullptr;
  cudaStream_t stream = nullptr;
  bool sparse_decode = false;                          // switch S
  int key_fraction_bp = 0;
  int max_positions = 0;                               // longest sequence of the run: scratch is sized by it once
  Fault fault = Fault::none;
};

class ForwardPass {
 public:
  explicit ForwardPass(const ForwardContext& context);

  // Room for `rows` rows of the residual stream.
  Bfloat16* input(int rows);
  // The three steps of a loop, in this order. stage() brings the batch's description to the device; nothing after it copies from the host
  // (forced keys apart), so that prepare() and what follows can be captured once and replayed for every batch of the same extents.
  void stage(const RowBatch& batch, PinnedArena& arena);
  // What the rows are, as far as only the device knows: positions, tokens, rows that have ended. `exits` and `chosen_tokens` [slots];
  // `speculation` is of rows with RowSource::live. Afterwards the caller fills input() with the loop's input.
  void prepare(const RowBatch& batch, const KvCache& kv, ExitState* exits, const std::int32_t* chosen_tokens, const SpeculationView& speculation = {});
  // Advances the rows by one loop. `references` may be null when S is off; `numeric_fault` is one device word.
  void run(const RowBatch& batch, KvCache& kv, const ReferenceStore* references, std::uint64_t* numeric_fault, RowObserver* observer);

  // Of the batch that was prepared last, on the device: what prepare_rows says of the members of the same names.
  const QueryRow* rows() { return rows_.as<QueryRow>(); }
  const std::int32_t* tokens() { return tokens_.as<std::int32_t>(); }
  const std::int32_t* sources_of_states() { return sources_of_states_.as<std::int32_t>(); }
  const std::int32_t* targets_of_states() { return targets_of_states_.as<std::int32_t>(); }
  // Kinds of attention among the staged decode rows; with the extents they decide which kernels run.
  struct Kinds {
    bool dense = false, reference = false, corrected = false;
    auto operator<=>(const Kinds&) const = default;
  };
  Kinds kinds() const { return kinds_; }
  int decode_length() const { return max_length_; }
  // Changes whenever memory that a pass uses has moved.
  std::uint64_t address_version() const;

  // Results of the last run, [rows, hidden] H[r] and [rows] scores; valid until the next input().
  const Bfloat16* output() { return output_.as<Bfloat16>(); }
  const float* scores() { return scores_.as<float>(); }

  // FP32 logits [rows, vocab] of normed states [rows, hidden]; valid until the next call.
  const float* logits(const Bfloat16* states, int rows);

 private:
  // One launch between two attentions instead of a launch an operation, with the same bits: for few decode rows that nobody observes.
  bool fuses_projections(const RowBatch& batch, const RowObserver* observer) const;
  void run_fused(const RowBatch& batch, KvCache& kv, const ReferenceStore* references, std::uint64_t* numeric_fault);
  // `behind_projections`: the kernel in front in the stream is decode_projections.
  void attention(const RowBatch& batch, int layer, KvCache& kv, const ReferenceStore* references, std::uint64_t* numeric_fault,
                 RowObserver* observer, bool behind_projections);
  void decode_attention(const RowBatch& batch, int layer, KvCache& kv, const ReferenceStore* references, std::uint64_t* numeric_fault,
                        RowObserver* observer, bool behind_projections);
  void force_keys(const RowBatch& batch, int layer, const ReferenceStore& references);

  ForwardContext context_;
  int width_ = 0;                                      // heads * head_dim
  KvShape shape_;

  GrowableBuffer stream_rows_, previous_, output_;     // residual stream, the loop's input, H[r]
  GrowableBuffer normed_, qkv_, attended_, projected_, gate_up_, activated_, scores_, logits_;
  GrowableBuffer projection_arrivals_, attention_workspace_, attention_arrivals_, attention_logits_, prefill_workspace_;
  GrowableBuffer row_sources_, rows_, written_rows_, dense_rows_, reference_rows_, sparse_rows_, positions_, mask_positions_, tokens_, sources_of_states_,
      targets_of_states_, tiles_;

  Kinds kinds_;                                        // of the staged batch
  PinnedArena* arena_ = nullptr;                       // what the staged batch came through
  int max_length_ = 0, tile_count_ = 0;
  std::vector<std::uint64_t> masks_;
};

}  // namespace loopgauge::optimized
