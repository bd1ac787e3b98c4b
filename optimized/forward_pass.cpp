// SPDX-License-Identifier: Apache-2.0
#include "optimized/forward_pass.hpp"

#include <algorithm>

#include "optimized/ops/decode_projections.cuh"
#include "optimized/ops/kv_append.cuh"
#include "optimized/ops/residual_add.cuh"
#include "optimized/ops/rms_norm.cuh"
#include "optimized/ops/rope.cuh"
#include "optimized/ops/swiglu.cuh"
#include "optimized/ops/update_score.cuh"

namespace loopgauge::optimized {

ForwardPass::ForwardPass(const ForwardContext& context)
    : context_(context),
      width_(context.weights->config.projection_width()),
      shape_{context.weights->config.layers, context.weights->config.heads, context.weights->config.head_dim},
      stream_rows_(*context.allocator, MemoryCategory::workspace),
      previous_(*context.allocator, MemoryCategory::workspace),
      output_(*context.allocator, MemoryCategory::workspace),
      normed_(*context.allocator, MemoryCategory::workspace),
      qkv_(*context.allocator, MemoryCategory::workspace),
      attended_(*context.allocator, MemoryCategory::workspace),
      projected_(*context.allocator, MemoryCategory::workspace),
      gate_up_(*context.allocator, MemoryCategory::workspace),
      activated_(*context.allocator, MemoryCategory::workspace),
      scores_(*context.allocator, MemoryCategory::workspace),
      logits_(*context.allocator, MemoryCategory::workspace),
      projection_arrivals_(*context.allocator, MemoryCategory::workspace),
      attention_workspace_(*context.allocator, MemoryCategory::workspace),
      attention_arrivals_(*context.allocator, MemoryCategory::workspace),
      attention_logits_(*context.allocator, MemoryCategory::workspace),
      prefill_workspace_(*context.allocator, MemoryCategory::workspace),
      row_sources_(*context.allocator, MemoryCategory::workspace),
      rows_(*context.allocator, MemoryCategory::workspace),
      written_rows_(*context.allocator, MemoryCategory::workspace),
      dense_rows_(*context.allocator, MemoryCategory::workspace),
      reference_rows_(*context.allocator, MemoryCategory::workspace),
      sparse_rows_(*context.allocator, MemoryCategory::workspace),
      positions_(*context.allocator, MemoryCategory::workspace),
      mask_positions_(*context.allocator, MemoryCategory::workspace),
      tokens_(*context.allocator, MemoryCategory::workspace),
      sources_of_states_(*context.allocator, MemoryCategory::workspace),
      targets_of_states_(*context.allocator, MemoryCategory::workspace),
      tiles_(*context.allocator, MemoryCategory::workspace) {}

Bfloat16* ForwardPass::input(int rows) {
  const ModelConfig& model = context_.weights->config;
  const auto n = static_cast<std::size_t>(rows);
  previous_.reserve<Bfloat16>(n * model.hidden);
  output_.reserve<Bfloat16>(n * model.hidden);
  normed_.reserve<Bfloat16>(n * model.hidden);
  qkv_.reserve<Bfloat16>(n * 3 * width_);
  attended_.reserve<Bfloat16>(n * width_);
  projected_.reserve<Bfloat16>(n * model.hidden);
  gate_up_.reserve<Bfloat16>(n * 2 * model.intermediate);
  activated_.reserve<Bfloat16>(n * model.intermediate);
  scores_.reserve<float>(n);
  projection_arrivals_.reserve<std::uint32_t>(static_cast<std::size_t>(model.layers + 1) * kProjectionArrivals);
  return stream_rows_.reserve<Bfloat16>(n * model.hidden);
}

void ForwardPass::stage(const RowBatch& batch, PinnedArena& arena) {
  const cudaStream_t stream = context_.stream;
  arena_ = &arena;
  const auto rows = static_cast<std::size_t>(batch.size()), decode_rows = static_cast<std::size_t>(batch.decode_rows);
  row_sources_.upload<RowSource>(batch.rows, arena, stream);
  rows_.reserve<QueryRow>(rows);
  if (context_.fault == Fault::plane_not_truncated) written_rows_.reserve<QueryRow>(rows);
  for (GrowableBuffer* numbers : {&positions_, &mask_positions_, &tokens_, &sources_of_states_, &targets_of_states_}) {
    numbers->reserve<std::int32_t>(rows);
  }
  for (GrowableBuffer* kind : {&dense_rows_, &reference_rows_, &sparse_rows_}) kind->reserve<QueryRow>(decode_rows);
  const std::vector<PrefillTile> tiles = make_prefill_tiles(batch.segments, shape_.heads);
  tile_count_ = static_cast<int>(tiles.size());
  tiles_.upload<PrefillTile>(tiles, arena, stream);

  kinds_ = {};
  max_length_ = batch.decode_length;
  for (std::size_t i = 0; i < decode_rows; ++i) {
    const RowSource& row = batch.rows[i];
    if (row.request < 0) continue;
    kinds_.corrected |= context_.sparse_decode && row.loop >= 3;
    kinds_.reference |= context_.sparse_decode && row.loop == 2;
    kinds_.dense |= !context_.sparse_decode || row.loop == 1;
    max_length_ = std::max(max_length_, row.position + 1);
  }
}

void ForwardPass::prepare(const RowBatch& batch, const KvCache& kv, ExitState* exits, const std::int32_t* chosen_tokens,
                          const SpeculationView& speculation) {
  PrepareRowsArguments arguments;
  arguments.kv = kv.view();
  arguments.sources = row_sources_.as<RowSource>();
  arguments.count = batch.size();
  arguments.decode_rows = batch.decode_rows;
  arguments.sparse_decode = context_.sparse_decode;
  arguments.speculation = speculation;
  arguments.exits = exits;
  arguments.chosen_tokens = chosen_tokens;
  arguments.rows = rows_.as<QueryRow>();
  arguments.positions = positions_.as<std::int32_t>();
  arguments.mask_positions = context_.fault == Fault::contiguous_causal_mask ? mask_positions_.as<std::int32_t>() : nullptr;
  arguments.written = context_.fault == Fault::plane_not_truncated ? written_rows_.as<QueryRow>() : nullptr;
  arguments.tokens = tokens_.as<std::int32_t>();
  arguments.sources_of_states = sources_of_states_.as<std::int32_t>();
  arguments.targets_of_states = targets_of_states_.as<std::int32_t>();
  // Each kind of attention sees the decode rows in place; rows of another kind are padding to it.
  arguments.dense = dense_rows_.as<QueryRow>();
  arguments.at_reference = reference_rows_.as<QueryRow>();
  arguments.corrected = sparse_rows_.as<QueryRow>();
  prepare_rows(arguments, context_.stream);
}

std::uint64_t ForwardPass::address_version() const {
  std::uint64_t growths = 0;
  for (const GrowableBuffer* buffer :
       {&stream_rows_, &previous_, &output_, &normed_, &qkv_, &attended_, &projected_, &gate_up_, &activated_, &scores_, &projection_arrivals_, &attention_workspace_,
        &attention_arrivals_, &attention_logits_, &row_sources_, &rows_, &written_rows_, &dense_rows_, &reference_rows_, &sparse_rows_, &positions_, &tokens_, &sources_of_states_,
        &targets_of_states_}) {
    growths += buffer->growths();
  }
  return growths;
}

void ForwardPass::run(const RowBatch& batch, KvCache& kv, const ReferenceStore* references, std::uint64_t* numeric_fault, RowObserver* observer) {
  if (fuses_projections(batch, observer)) return run_fused(batch, kv, references, numeric_fault);
  const DeviceWeights& weights = *context_.weights;
  const ModelConfig& model = weights.config;
  const cudaStream_t stream = context_.stream;
  const int rows = batch.size();
  const float epsilon = model.rms_norm_eps;

  Bfloat16* const x = stream_rows_.as<Bfloat16>();
  Bfloat16* const normed = normed_.as<Bfloat16>();
  Bfloat16* const qkv = qkv_.as<Bfloat16>();
  Bfloat16* const projected = projected_.as<Bfloat16>();
  const std::int64_t qkv_stride = 3 * static_cast<std::int64_t>(width_);
  const auto* positions = positions_.as<std::int32_t>();
  GrowableBuffer& written = context_.fault == Fault::plane_not_truncated ? written_rows_ : rows_;
  const auto* rope_cosine = context_.rope->cosine.as<Bfloat16>();
  const auto* rope_sine = context_.rope->sine.as<Bfloat16>();
  const auto seen = [&](std::string_view operation, int layer, const Bfloat16* values, std::int64_t stride, int width) {
    if (observer != nullptr) observer->observe(operation, layer, values, stride, width);
  };
  const auto project = [&](const Bfloat16* from, const DeviceBuffer& weight, Bfloat16* to, int in, int out) {
    const int decode_rows = batch.decode_rows;
    linear(*context_.library, for_decode_rows(context_.linear), from, in, weight.as<Bfloat16>(), to, decode_rows, in, out, stream);
    linear(*context_.library, context_.linear, from + static_cast<std::size_t>(decode_rows) * in, in, weight.as<Bfloat16>(),
           to + static_cast<std::size_t>(decode_rows) * out, rows - decode_rows, in, out, stream);
  };
  // residual += norm(projected), and the norm behind it (null: none), in one pass; an observer wants the rows between them.
  const auto add_normed = [&](const DeviceBuffer& weight, const DeviceBuffer* next, std::string_view norm_name, std::string_view add_name, int layer) {
    const auto* const w = weight.as<Bfloat16>();
    if (observer == nullptr) {
      if (next != nullptr) rms_norm_residual_add_rms_norm(projected, w, x, next->as<Bfloat16>(), normed, rows, model.hidden, epsilon, stream);
      else rms_norm_residual_add(projected, w, x, rows, model.hidden, epsilon, stream);
      return;
    }
    rms_norm(projected, w, normed, rows, model.hidden, epsilon, stream);
    seen(norm_name, layer, normed, model.hidden, model.hidden);
    residual_add(x, normed, static_cast<std::size_t>(rows) * model.hidden, stream);
    seen(add_name, layer, x, model.hidden, model.hidden);
    if (next != nullptr) rms_norm(x, next->as<Bfloat16>(), normed, rows, model.hidden, epsilon, stream);
  };

  // The rows that the loop began with outlive it: the score compares them with what the final norm makes.
  if (batch.take_scores) {
    LOOPGAUGE_CUDA_CHECK(cudaMemcpyAsync(previous_.data(), x, static_cast<std::size_t>(rows) * model.hidden * sizeof(Bfloat16),
                                         cudaMemcpyDeviceToDevice, stream));
  }

  const int layers = batch.layers < 0 ? model.layers : std::min(batch.layers, model.layers);
  for (int layer = 0; layer < layers; ++layer) {
    const DeviceLayerWeights& w = weights.layers[static_cast<std::size_t>(layer)];
    const bool swapped = context_.fault == Fault::swapped_norms;
    const DeviceBuffer& after_attention = swapped ? w.post_attention_layernorm : w.input_layernorm_2;
    const DeviceBuffer& before_mlp = swapped ? w.input_layernorm_2 : w.post_attention_layernorm;

    if (layer == 0) rms_norm(x, w.input_layernorm.as<Bfloat16>(), normed, rows, model.hidden, epsilon, stream);
    seen("rms_norm.input_layernorm", layer, normed, model.hidden, model.hidden);
    project(normed, w.qkv, qkv, model.hidden, 3 * width_);
    seen("linear.q_proj", layer, qkv, qkv_stride, width_);
    seen("linear.k_proj", layer, qkv + width_, qkv_stride, width_);
    seen("linear.v_proj", layer, qkv + 2 * width_, qkv_stride, width_);
    if (observer == nullptr && context_.fault == Fault::none) {
      rope_and_kv_append(qkv, qkv_stride, positions, rope_cosine, rope_sine, rows_.as<QueryRow>(), kv.view(), layer, rows, stream);
    } else {
      const int rotated_heads = context_.fault == Fault::key_before_rope ? model.heads : 2 * model.heads;  // q and k lie side by side
      rope(qkv, qkv_stride, positions, rope_cosine, rope_sine, rows, rotated_heads, model.head_dim, stream);
      seen("rope.q", layer, qkv, qkv_stride, width_);
      seen("rope.k", layer, qkv + width_, qkv_stride, width_);
      kv_append(qkv + width_, qkv + 2 * width_, qkv_stride, written.as<QueryRow>(), kv.view(), layer, rows, stream);
    }
    attention(batch, layer, kv, references, numeric_fault, observer, false);
    seen("attention.output", layer, attended_.as<Bfloat16>(), width_, width_);
    project(attended_.as<Bfloat16>(), w.o_proj, projected, width_, model.hidden);
    seen("linear.o_proj", layer, projected, model.hidden, model.hidden);
    add_normed(after_attention, &before_mlp, "rms_norm.input_layernorm_2", "residual_add.attention", layer);

    seen("rms_norm.post_attention_layernorm", layer, normed, model.hidden, model.hidden);
    project(normed, w.gate_up, gate_up_.as<Bfloat16>(), model.hidden, 2 * model.intermediate);
    seen("linear.gate_proj", layer, gate_up_.as<Bfloat16>(), 2 * model.intermediate, model.intermediate);
    seen("linear.up_proj", layer, gate_up_.as<Bfloat16>() + model.intermediate, 2 * model.intermediate, model.intermediate);
    swiglu(gate_up_.as<Bfloat16>(), activated_.as<Bfloat16>(), rows, model.intermediate, stream);
    seen("swiglu", layer, activated_.as<Bfloat16>(), model.intermediate, model.intermediate);
    project(activated_.as<Bfloat16>(), w.down_proj, projected, model.intermediate, model.hidden);
    seen("linear.down_proj", layer, projected, model.hidden, model.hidden);
    const DeviceBuffer* const next = layer + 1 < layers ? &weights.layers[static_cast<std::size_t>(layer) + 1].input_layernorm : nullptr;
    add_normed(w.post_attention_layernorm_2, next, "rms_norm.post_attention_layernorm_2", "residual_add.mlp", layer);
  }
  if (layers < model.layers) return;

  auto* output = output_.as<Bfloat16>();
  final_norm_update_score(x, weights.norm.as<Bfloat16>(), previous_.as<Bfloat16>(), output, batch.take_scores ? scores_.as<float>() : nullptr,
                          rows, model.hidden, epsilon, stream);
  if (context_.fault == Fault::aliased_hidden_rows && batch.take_scores && batch.rows.back().loop == 3) {
    // The planted fault: the loop-4 score compares the new rows with themselves.
    final_norm_update_score(x, weights.norm.as<Bfloat16>(), output, output, scores_.as<float>(), rows, model.hidden, epsilon, stream);
  }
  seen("rms_norm.norm", -1, output, model.hidden, model.hidden);
}

bool ForwardPass::fuses_projections(const RowBatch& batch, const RowObserver* observer) const {
  const ModelConfig& model = context_.weights->config;
  return observer == nullptr && context_.fault == Fault::none && batch.layers < 0 && batch.decode_rows == batch.size() &&
         for_decode_rows(context_.linear) == LinearImplementation::split_k &&
         decode_projections_cover(batch.size(), model.hidden, model.heads, model.head_dim, model.intermediate);
}

void ForwardPass::run_fused(const RowBatch& batch, KvCache& kv, const ReferenceStore* references, std::uint64_t* numeric_fault) {
  const DeviceWeights& weights = *context_.weights;
  const ModelConfig& model = weights.config;
  const cudaStream_t stream = context_.stream;
  DecodeProjectionsArguments arguments;
  arguments.rows = batch.size();
  arguments.hidden = model.hidden;
  arguments.heads = model.heads;
  arguments.head_dim = model.head_dim;
  arguments.intermediate = model.intermediate;
  arguments.epsilon = model.rms_norm_eps;
  arguments.query_rows = rows_.as<QueryRow>();
  arguments.positions = positions_.as<std::int32_t>();
  arguments.cosine = context_.rope->cosine.as<Bfloat16>();
  arguments.sine = context_.rope->sine.as<Bfloat16>();
  arguments.kv = kv.view();
  arguments.residual = stream_rows_.as<Bfloat16>();
  arguments.residual_after_attention = normed_.as<Bfloat16>();
  arguments.projected = projected_.as<Bfloat16>();
  arguments.activated = activated_.as<Bfloat16>();
  arguments.qkv = qkv_.as<Bfloat16>();
  LOOPGAUGE_CUDA_CHECK(cudaMemsetAsync(projection_arrivals_.data(), 0,
                                       static_cast<std::size_t>(model.layers + 1) * kProjectionArrivals * sizeof(std::uint32_t), stream));
  for (int next = 0; next <= model.layers; ++next) {
    arguments.arrivals = projection_arrivals_.as<std::uint32_t>() + next * kProjectionArrivals;
    if (next > 0) {
      const DeviceLayerWeights& behind = weights.layers[static_cast<std::size_t>(next - 1)];
      attention(batch, next - 1, kv, references, numeric_fault, nullptr, true);
      arguments.attended = attended_.as<Bfloat16>();
      arguments.o_proj = behind.o_proj.as<Bfloat16>();
      arguments.norm_after_attention = behind.input_layernorm_2.as<Bfloat16>();
      arguments.norm_before_mlp = behind.post_attention_layernorm.as<Bfloat16>();
      arguments.gate_up = behind.gate_up.as<Bfloat16>();
      arguments.down_proj = behind.down_proj.as<Bfloat16>();
      arguments.norm_after_mlp = behind.post_attention_layernorm_2.as<Bfloat16>();
    }
    arguments.qkv_weight = nullptr;
    if (next < model.layers) {
      const DeviceLayerWeights& ahead = weights.layers[static_cast<std::size_t>(next)];
      arguments.input_norm = ahead.input_layernorm.as<Bfloat16>();
      arguments.qkv_weight = ahead.qkv.as<Bfloat16>();
      arguments.next_layer = next;
    }
    decode_projections(arguments, stream);
  }
  rms_norm_residual_add(projected_.as<Bfloat16>(), weights.layers.back().post_attention_layernorm_2.as<Bfloat16>(), normed_.as<Bfloat16>(),
                        batch.size(), model.hidden, model.rms_norm_eps, stream);
  final_norm_update_score(normed_.as<Bfloat16>(), weights.norm.as<Bfloat16>(), nullptr, output_.as<Bfloat16>(), nullptr, batch.size(), model.hidden,
                          model.rms_norm_eps, stream);
}

const float* ForwardPass::logits(const Bfloat16* states, int rows) {
  const ModelConfig& model = context_.weights->config;
  float* result = logits_.reserve<float>(static_cast<std::size_t>(rows) * model.vocab);
  linear(*context_.library, for_decode_rows(context_.linear), states, model.hidden, context_.weights->lm_head.as<Bfloat16>(), result, rows, model.hidden, model.vocab,
         context_.stream);
  return result;
}

}  // namespace loopgauge::optimized
