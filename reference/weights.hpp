// SPDX-License-Identifier: Apache-2.0
// The checkpoint's BF16 weights widened to the profile's arithmetic type. Widening is exact.
#pragma once

#include <vector>

#include "models/checkpoint.hpp"
#include "reference/numeric/bfloat16.hpp"
#include "reference/ops/matrix.hpp"

namespace loopgauge::reference {

template <class Real>
Matrix<Real> widen_matrix(const Tensor<Bfloat16Bits>& tensor) {
  Matrix<Real> matrix(tensor.extent(0), tensor.extent(1));
  for (std::size_t i = 0; i < tensor.data.size(); ++i) matrix.data()[i] = bfloat16_to_float(tensor.data[i]);
  return matrix;
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
    Matrix<Real> q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj;  // [out, in]
    Vector<Real> input_layernorm, input_layernorm_2, post_attention_layernorm, post_attention_layernorm_2;
  };

  Matrix<Real> embed_tokens, lm_head;  // [vocab, hidden]
  std::vector<Layer> layers;
  Vector<Real> norm, early_exit_gate;  // [hidden]
  Real early_exit_bias;

  explicit Weights(const Checkpoint& checkpoint)
      : embed_tokens(widen_matrix<Real>(checkpoint.embed_tokens)),
        lm_head(widen_matrix<Real>(checkpoint.lm_head)),
        norm(widen_vector<Real>(checkpoint.norm)),
        early_exit_gate(widen_vector<Real>(checkpoint.early_exit_gate)),
        early_exit_bias(bfloat16_to_float(checkpoint.early_exit_bias.data.at(0))) {
    for (const LayerWeights& layer : checkpoint.layers) {
      layers.push_back({widen_matrix<Real>(layer.q_proj), widen_matrix<Real>(layer.k_proj), widen_matrix<Real>(layer.v_proj),
                        widen_matrix<Real>(layer.o_proj), widen_matrix<Real>(layer.gate_proj), widen_matrix<Real>(layer.up_proj),
                        widen_matrix<Real>(layer.down_proj), widen_vector<Real>(layer.input_layernorm),
                        widen_vector<Real>(layer.input_layernorm_2), widen_vector<Real>(layer.post_attention_layernorm),
                        widen_vector<Real>(layer.post_attention_layernorm_2)});
    }
  }
};

}  // namespace loopgauge::reference
