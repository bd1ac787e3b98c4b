// SPDX-License-Identifier: Apache-2.0
#include "models/checkpoint_layout.hpp"

namespace loopgauge {

namespace {

// Serves the const and the other visitor, so that both see one list.
template <class AnyCheckpoint, class Visit>
void visit_tensors(AnyCheckpoint& checkpoint, const Visit& visit) {
  const ModelConfig& config = checkpoint.config;
  const std::int64_t hidden = config.hidden;
  const std::int64_t width = config.projection_width();
  const std::int64_t intermediate = config.intermediate;

  visit({"model.embed_tokens.weight", {config.vocab, hidden}}, checkpoint.embed_tokens);
  for (std::size_t l = 0; l < checkpoint.layers.size(); ++l) {
    auto& layer = checkpoint.layers[l];
    const std::string prefix = "model.layers." + std::to_string(l) + ".";
    visit({prefix + "self_attn.q_proj.weight", {width, hidden}}, layer.q_proj);
    visit({prefix + "self_attn.k_proj.weight", {width, hidden}}, layer.k_proj);
    visit({prefix + "self_attn.v_proj.weight", {width, hidden}}, layer.v_proj);
    visit({prefix + "self_attn.o_proj.weight", {hidden, width}}, layer.o_proj);
    visit({prefix + "mlp.gate_proj.weight", {intermediate, hidden}}, layer.gate_proj);
    visit({prefix + "mlp.up_proj.weight", {intermediate, hidden}}, layer.up_proj);
    visit({prefix + "mlp.down_proj.weight", {hidden, intermediate}}, layer.down_proj);
    visit({prefix + "input_layernorm.weight", {hidden}}, layer.input_layernorm);
    visit({prefix + "input_layernorm_2.weight", {hidden}}, layer.input_layernorm_2);
    visit({prefix + "post_attention_layernorm.weight", {hidden}}, layer.post_attention_layernorm);
    visit({prefix + "post_attention_layernorm_2.weight", {hidden}}, layer.post_attention_layernorm_2);
  }
  visit({"model.norm.weight", {hidden}}, checkpoint.norm);
  visit({"model.early_exit_gate.weight", {1, hidden}}, checkpoint.early_exit_gate);
  visit({"model.early_exit_gate.bias", {1}}, checkpoint.early_exit_bias);
  visit({"lm_head.weight", {config.vocab, hidden}}, checkpoint.lm_head);
}

}  // namespace

void for_each_tensor(Checkpoint& checkpoint, const std::function<void(const TensorSpec&, Tensor<Bfloat16Bits>&)>& visit) {
  visit_tensors(checkpoint, visit);
}

void for_each_tensor(const Checkpoint& checkpoint, const std::function<void(const TensorSpec&, const Tensor<Bfloat16Bits>&)>& visit) {
  visit_tensors(checkpoint, visit);
}

std::vector<TensorSpec> checkpoint_tensors(const ModelConfig& config) {
  Checkpoint empty;
  empty.config = config;
  empty.layers.resize(static_cast<std::size_t>(config.layers));
  std::vector<TensorSpec> specs;
  for_each_tensor(empty, [&](const TensorSpec& spec, Tensor<Bfloat16Bits>&) { specs.push_back(spec); });
  return specs;
}

std::int64_t element_count(const std::vector<std::int64_t>& shape) {
  std::int64_t count = 1;
  for (const std::int64_t extent : shape) count *= extent;
  return count;
}

std::int64_t parameter_count(const ModelConfig& config) {
  std::int64_t count = 0;
  for (const TensorSpec& spec : checkpoint_tensors(config)) count += element_count(spec.shape);
  return count;
}

std::int64_t kv_bytes_per_token(const ModelConfig& config) {
  return std::int64_t{2} * static_cast<std::int64_t>(sizeof(Bfloat16Bits)) * config.projection_width() * config.layers * config.loops;
}

}  // namespace loopgauge
