// SPDX-License-Identifier: Apache-2.0
// Which kind of attention the rows of a batch need, and what loop 2 leaves behind for loops 3 and 4.
#include <algorithm>

#include "optimized/forward_pass.hpp"
#include "optimized/ops/attention_decode.cuh"
#include "optimized/ops/reference_statistics.cuh"
#include "optimized/ops/select_keys.cuh"
#include "optimized/ops/sparse_correction.cuh"

namespace loopgauge::optimized {

void ForwardPass::attention(const RowBatch& batch, int layer, KvCache& kv, const ReferenceStore* references, std::uint64_t* numeric_fault,
                            RowObserver* observer, bool behind_projections) {
  if (batch.decode_rows > 0) decode_attention(batch, layer, kv, references, numeric_fault, observer, behind_projections);
  if (tile_count_ > 0) {
    AttentionPrefillArguments arguments;
    arguments.kv = kv.view();
    arguments.layer = layer;
    arguments.q = qkv_.as<Bfloat16>();
    arguments.q_row_stride = 3 * static_cast<std::int64_t>(width_);
    arguments.positions = (context_.fault == Fault::contiguous_causal_mask ? mask_positions_ : positions_).as<std::int32_t>();
    arguments.tiles = tiles_.as<PrefillTile>();
    arguments.tile_count = tile_count_;
    arguments.encoded_history = std::any_of(batch.segments.begin(), batch.segments.end(), [](const PrefillSegment& s) { return s.encoded_frontier > 0; });
    if (arguments.encoded_history) {
      arguments.row_count = batch.size();
      arguments.max_length = context_.max_positions;
      arguments.workspace = prefill_workspace_.reserve<std::byte>(attention_prefill_workspace_bytes(shape_, arguments.row_count, arguments.max_length));
    }
    arguments.output = attended_.as<Bfloat16>();
    arguments.fault = context_.fault;
    attention_prefill(arguments, context_.stream);
  }
}

void ForwardPass::decode_attention(const RowBatch& batch, int layer, KvCache& kv, const ReferenceStore* references, std::uint64_t* numeric_fault,
                                   RowObserver* observer, bool behind_projections) {
  const cudaStream_t stream = context_.stream;
  const int rows = batch.decode_rows;
  const std::int64_t q_stride = 3 * static_cast<std::int64_t>(width_);
  // An observer sees the references of a layer before what follows from it, and a planted fault acts where it is planted.
  const std::int64_t logit_stride = page_count(context_.max_positions) * kPageTokens;
  const int group = observer != nullptr || context_.fault != Fault::none ? 1 : reference_group_layers(shape_, rows, logit_stride);
  const int in_group = layer % group, layers = batch.layers < 0 ? shape_.layers : std::min(batch.layers, shape_.layers);
  const std::uint64_t growths = attention_arrivals_.growths();
  const std::size_t arrivals = static_cast<std::size_t>(kinds_.reference ? group : 1) * static_cast<std::size_t>(rows) * static_cast<std::size_t>(shape_.heads);
  attention_arrivals_.reserve<std::uint32_t>(arrivals);
  if (attention_arrivals_.growths() != growths) {  // every launch leaves them zero
    LOOPGAUGE_CUDA_CHECK(cudaMemsetAsync(attention_arrivals_.data(), 0, arrivals * sizeof(std::uint32_t), stream));
  }
  const QueryRow* const written_rows = behind_projections ? rows_.as<QueryRow>() : nullptr;  // kernels of attention then follow one another early
  const int written_count = behind_projections ? rows : 0;
  if (kinds_.dense) {
    AttentionDecodeArguments arguments;
    arguments.kv = kv.view();
    arguments.layer = layer;
    arguments.q = qkv_.as<Bfloat16>();
    arguments.q_row_stride = q_stride;
    arguments.rows = dense_rows_.as<QueryRow>();
    arguments.row_count = rows;
    arguments.max_length = max_length_;
    arguments.encoded_history = kv.quantized();
    arguments.output = attended_.as<Bfloat16>();
    arguments.workspace = attention_workspace_.reserve<std::byte>(attention_decode_workspace_bytes(shape_, rows));
    arguments.arrivals = attention_arrivals_.as<std::uint32_t>();
    arguments.fault = context_.fault;
    arguments.written_rows = written_rows;
    arguments.written_count = written_count;
    attention_decode(arguments, stream);
  }

  // What loop 2 leaves behind for the rows of `query_rows`: statistics, and once the group of layers is complete, which nothing needs before
  // loop 3, the selected keys, m and C_ref of all of them.
  const auto capture_references = [&](const QueryRow* query_rows, Bfloat16* output) {
    const std::size_t layer_logits = static_cast<std::size_t>(rows) * static_cast<std::size_t>(shape_.heads) * static_cast<std::size_t>(logit_stride);
    float* const logits = attention_logits_.reserve<float>(static_cast<std::size_t>(group) * layer_logits);
    ReferenceStatisticsArguments arguments;
    arguments.kv = kv.view();
    arguments.layer = layer;
    arguments.q = qkv_.as<Bfloat16>();
    arguments.q_row_stride = q_stride;
    arguments.rows = query_rows;
    arguments.row_count = rows;
    arguments.max_length = max_length_;
    arguments.reference = references->view();
    arguments.logit_stride = logit_stride;
    arguments.logits = logits + static_cast<std::size_t>(in_group) * layer_logits;
    arguments.encoded_history = kv.quantized();
    arguments.output = output;
    arguments.arrivals = attention_arrivals_.as<std::uint32_t>();
    arguments.workspace = attention_workspace_.reserve<std::byte>(reference_statistics_workspace_bytes(shape_, rows, group));
    arguments.numeric_fault = numeric_fault;
    arguments.fault = context_.fault;
    arguments.written_rows = written_rows;
    arguments.written_count = written_count;
    reference_statistics(arguments, stream);
    if (in_group + 1 < group && layer + 1 < layers) return;

    arguments.layer = layer - in_group;
    arguments.layer_count = in_group + 1;
    arguments.logits = logits;
    SelectKeysArguments selection;
    selection.shape = shape_;
    selection.layer = arguments.layer;
    selection.layer_count = arguments.layer_count;
    selection.rows = query_rows;
    selection.row_count = rows;
    selection.key_fraction_bp = context_.key_fraction_bp;
    selection.logits = logits;
    selection.logit_stride = logit_stride;
    selection.reference = references->view();
    selection.numeric_fault = numeric_fault;
    selection.fault = context_.fault;
    select_keys(selection, stream);  // forced keys replace its masks, its check of the logits stays
    for (int selected = arguments.layer; selected <= layer; ++selected) force_keys(batch, selected, *references);
    reference_contribution(arguments, stream);
  };

  if (kinds_.reference) {
    capture_references(reference_rows_.as<QueryRow>(), attended_.as<Bfloat16>());
    if (observer != nullptr) observer->observe_references(layer);
  }
  if (kinds_.corrected) {
    SparseCorrectionArguments arguments;
    arguments.kv = kv.view();
    arguments.layer = layer;
    arguments.q = qkv_.as<Bfloat16>();
    arguments.q_row_stride = q_stride;
    arguments.rows = sparse_rows_.as<QueryRow>();
    arguments.row_count = rows;
    arguments.max_length = max_length_;
    arguments.reference = references->view();
    arguments.output = attended_.as<Bfloat16>();
    arguments.encoded_history = kv.quantized();
    arguments.workspace = attention_workspace_.reserve<std::byte>(sparse_correction_workspace_bytes(shape_, rows));
    arguments.arrivals = attention_arrivals_.as<std::uint32_t>();
    arguments.fault = context_.fault;
    arguments.written_rows = written_rows;
    sparse_correction(arguments, stream);
    if (context_.fault == Fault::loop3_reference_at_loop4) {
      // The planted fault: loop 3 overwrites the reference that loop 4 is to use. Loop 4 recaptures too, which nothing reads.
      capture_references(sparse_rows_.as<QueryRow>(), gate_up_.reserve<Bfloat16>(static_cast<std::size_t>(rows) * width_));
    }
  }
}

void ForwardPass::force_keys(const RowBatch& batch, int layer, const ReferenceStore& references) {
  const ReferenceView view = references.view();
  for (int i = 0; i < batch.decode_rows; ++i) {
    const RowSource& row = batch.rows[static_cast<std::size_t>(i)];
    const StepKeys* forced = batch.forced_keys[static_cast<std::size_t>(i)];
    if (forced == nullptr || row.reference < 0 || row.loop < 2) continue;
    const Tensor<std::int32_t>& keys = forced->layers.at(static_cast<std::size_t>(layer));
    masks_.assign(static_cast<std::size_t>(shape_.heads) * view.mask_pages, 0);
    for (int head = 0; head < shape_.heads; ++head) {
      for (const std::int32_t position : keys.row(head)) {
        masks_[static_cast<std::size_t>(head) * view.mask_pages + static_cast<std::size_t>(position / kPageTokens)] |=
            std::uint64_t{1} << (position % kPageTokens);
      }
    }
    std::uint64_t* target = view.selected + reference_index(shape_, row.reference, layer, 0) * view.mask_pages;
    copy_to_device<std::uint64_t>(target, masks_, *arena_, context_.stream);
  }
}

}  // namespace loopgauge::optimized
