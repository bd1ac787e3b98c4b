// SPDX-License-Identifier: Apache-2.0
// The checkpoint's weights as the reference's operations take them: matrices as BF16 bit patterns where they lie in the
// checkpoint, which must outlive this; vectors widened (exactly).
#pragma once

#include <vector>

#include "models/checkpoint.hpp"
#include "reference/numeric/bfloat16.hpp"
#include "reference/ops/matrix.hpp"

namespace loopgauge::reference {

inline WeightView matrix_of(const Tensor<Bfloat16Bits>& tensor) {
  return WeightView(tensor.data.data(), tensor.extent(0), tensor.extent(1));
}

template <class Real>
Vector<Real> widen_vector(const Tensor<Bfloat16Bits>& tensor) {
  Vector<Real> vector(static_cast<std::ptrdiff_t>(tensor.data.size()));
  for (std::size_t i = 0; i < tensor.data.size(); ++i) vector[static_cast<std::ptrdiff_t>(i)] = bfloat16_to_float(tensor.data[i]);
  return vector;
}

template <class Real>
struct Weights {
  struct Layer {
    WeightView q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj;  // [out, in]
    Vector<Real> input_layernorm, input_layernorm_2, post_attention_layernorm, post_attention_layernorm_2;
  };

  WeightView embed_tokens, lm_head;  // [vocab, hidden]
  std::vector<Layer> layers;
  Vector<Real> norm, early_exit_gate;  // [hidden]
  Real early_exit_bias;

  explicit Weights(const Checkpoint& checkpoint)
      : embed_tokens(matrix_of(checkpoint.embed_tokens)),
        lm_head(matrix_of(checkpoint.lm_head)),
        norm(widen_vector<Real>(checkpoint.norm)),
        early_exit_gate(widen_vector<Real>(checkpoint.early_exit_gate)),
        early_exit_bias(bfloat16_to_float(checkpoint.early_exit_bias.data.at(0))) {
    for (const LayerWeights& layer : checkpoint.layers) {
      layers.push_back({matrix_of(layer.q_proj), matrix_of(layer.k_proj), matrix_of(layer.v_proj),
                        matrix_of(layer.o_proj), matrix_of(layer.gate_proj), matrix_of(layer.up_proj),
                        matrix_of(layer.down_proj), widen_vector<Real>(layer.input_layernorm),
                        widen_vector<Real>(layer.input_layernorm_2), widen_vector<Real>(layer.post_attention_layernorm),
                        widen_vector<Real>(layer.post_attention_layernorm_2)});
    }
  }
};

}  // namespace loopgauge::reference
