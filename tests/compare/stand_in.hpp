// SPDX-License-Identifier: Apache-2.0
// Stands in for another executor where no device is: the reference in another profile, with a planted fault, on a model whose channels are
// in another order, or with its record altered.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "models/checkpoint.hpp"
#include "models/executor.hpp"
#include "reference/reference_executor.hpp"

namespace loopgauge::test {

// The same function with hidden and intermediate channels in another order: every sum over them is taken in another order, every rounding
// point stays. Channel i of the result is channel hidden[i] of the original.
struct PermutedModel {
  Checkpoint checkpoint;
  std::vector<std::size_t> hidden;
  std::vector<std::vector<std::size_t>> intermediate;  // by layer, in the same sense
};

inline PermutedModel permuted_model(const Checkpoint& original, std::uint32_t seed) {
  using Weights = Tensor<Bfloat16Bits>;
  std::mt19937 generator(seed);
  const auto permutation = [&](int size) {
    std::vector<std::size_t> order(static_cast<std::size_t>(size));
    std::iota(order.begin(), order.end(), std::size_t{0});
    for (std::size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[generator() % i]);
    return order;
  };
  const auto columns = [](Weights& weights, const std::vector<std::size_t>& order) {
    const Weights from = weights;
    for (std::int64_t row = 0; row < from.extent(0); ++row) {
      for (std::size_t i = 0; i < order.size(); ++i) weights.row(row)[i] = from.row(row)[order[i]];
    }
  };
  const auto rows = [](Weights& weights, const std::vector<std::size_t>& order) {
    const Weights from = weights;
    for (std::size_t i = 0; i < order.size(); ++i) {
      const auto row = from.row(static_cast<std::int64_t>(order[i]));
      std::copy(row.begin(), row.end(), weights.row(static_cast<std::int64_t>(i)).begin());
    }
  };
  PermutedModel model{original, permutation(original.config.hidden), {}};
  Checkpoint& c = model.checkpoint;
  for (Weights* weights : {&c.embed_tokens, &c.early_exit_gate, &c.lm_head}) columns(*weights, model.hidden);
  rows(c.norm, model.hidden);
  for (LayerWeights& layer : c.layers) {
    const std::vector<std::size_t> intermediate = permutation(original.config.intermediate);
    for (Weights* weights : {&layer.q_proj, &layer.k_proj, &layer.v_proj, &layer.gate_proj, &layer.up_proj})
      columns(*weights, model.hidden);
    for (Weights* weights : {&layer.gate_proj, &layer.up_proj}) rows(*weights, intermediate);
    columns(layer.down_proj, intermediate);
    model.intermediate.push_back(intermediate);
    for (Weights* weights : {&layer.o_proj, &layer.down_proj, &layer.input_layernorm, &layer.input_layernorm_2,
                             &layer.post_attention_layernorm, &layer.post_attention_layernorm_2}) {
      rows(*weights, model.hidden);
    }
  }
  return model;
}

class StandIn : public Executor {
 public:
  explicit StandIn(const Checkpoint& checkpoint, Profile profile = Profile::declared) : model_{checkpoint, {}, {}}, profile_(profile) {
    start();
  }
  explicit StandIn(PermutedModel model, Profile profile = Profile::declared) : model_(std::move(model)), profile_(profile) { start(); }
  StandIn(const StandIn&) = delete;
  StandIn& operator=(const StandIn&) = delete;

  std::string name() const override { return "optimized"; }
  void begin(const Trace& trace, const EffectiveConfig& config, const RunOptions& options) override {
    RunOptions own = options;
    own.profile = profile_;
    own.fault = fault;
    complete_ = options.record.kv;
    tap_ = options.tap;
    if (tap_ != nullptr) own.tap = &restoring_;
    inner_->begin(trace, config, own);
  }
  void submit(const Submission& submission) override { inner_->submit(submission); }
  RunRecord finish() override {
    RunRecord record = inner_->finish();
    record.executor = name();
    // Orders of addition other than the declared one are the reordered profile's, whatever they are.
    record.profile = to_string(model_.hidden.empty() ? profile_ : Profile::reordered);
    for (RequestRecord& request : record.requests) {
      for (Tensor<float>& hidden : request.hidden) restore(hidden);
    }
    if (alter && complete_) alter(record);
    return record;
  }

  Fault fault = Fault::none;
  std::function<void(RunRecord&)> alter;                                // of records with all groups
  std::function<void(const TapPoint&, std::vector<float>&)> alter_row;  // of observed rows

 private:
  // Puts the channels of observed rows back into the original order.
  class RestoringTap : public Tap {
   public:
    explicit RestoringTap(const StandIn& owner) : owner_(owner) {}
    void record(const TapPoint& point, std::span<const float> values) override {
      std::vector<float> row(values.begin(), values.end());
      const std::string_view name = point.operation;
      const auto is = [&](std::initializer_list<std::string_view> names) {
        return std::find(names.begin(), names.end(), name) != names.end();
      };
      const std::vector<std::size_t>* order = nullptr;
      if (!owner_.model_.hidden.empty()) {
        if (name.starts_with("rms_norm.") || name.starts_with("residual_add.") || is({"embedding", "linear.o_proj", "linear.down_proj"}))
          order = &owner_.model_.hidden;
        if (is({"linear.gate_proj", "linear.up_proj", "swiglu"}))
          order = &owner_.model_.intermediate.at(static_cast<std::size_t>(point.layer));
      }
      for (std::size_t i = 0; order != nullptr && i < row.size(); ++i) row[(*order)[i]] = values[i];
      if (owner_.alter_row) owner_.alter_row(point, row);
      owner_.tap_->record(point, row);
    }

   private:
    const StandIn& owner_;
  };

  void start() { inner_ = reference::make_reference_executor(model_.checkpoint); }
  void restore(Tensor<float>& rows) const {
    if (model_.hidden.empty() || rows.empty()) return;
    const Tensor<float> from = rows;
    for (std::int64_t row = 0; row < from.extent(0); ++row) {
      for (std::size_t i = 0; i < model_.hidden.size(); ++i) rows.row(row)[model_.hidden[i]] = from.row(row)[i];
    }
  }

  PermutedModel model_;
  Profile profile_;
  bool complete_ = false;
  Tap* tap_ = nullptr;
  RestoringTap restoring_{*this};
  std::unique_ptr<Executor> inner_;
};

}  // namespace loopgauge::test
