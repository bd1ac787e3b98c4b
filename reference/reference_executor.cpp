// SPDX-License-Identifier: Apache-2.0
// The Executor interface of the reference: one run at a time, in the profile that is asked for. The run itself is reference/run/run.hpp.
#include "reference/reference_executor.hpp"

#include <algorithm>
#include <functional>
#include <optional>

#include "models/error.hpp"
#include "reference/run/run.hpp"
#include "reference/weights.hpp"

namespace loopgauge::reference {
namespace {

// Forced decisions must have the shape that selection would have given: they index rows and keys while threads share out the work.
void check_decisions(const RunRecord& decisions, const Trace& trace, const EffectiveConfig& config, const ModelConfig& model) {
  const auto require = [&](bool holds, std::size_t request, const std::string& what) {
    if (!holds) throw ConfigError("forced decisions do not fit trace " + trace.name + ": request " + std::to_string(request) + ": " + what);
  };
  require(decisions.requests.size() == trace.requests.size(), decisions.requests.size(),
          std::to_string(decisions.requests.size()) + " requests decided, the trace has " + std::to_string(trace.requests.size()));
  for (std::size_t i = 0; i < trace.requests.size(); ++i) {
    const RequestRecord& forced = decisions.requests[i];
    const int prompt_length = trace.requests[i].prompt_length();
    for (std::size_t at = 0; at < forced.active.size() && config.selects_tokens(); ++at) {
      const auto& active = forced.active[at];
      if (active.empty() && forced.outcome == RequestOutcome::cancelled) continue;  // before it decided anything
      require(!active.empty() && std::is_sorted(active.begin(), active.end(), std::less_equal<>()) && active.front() >= 0 &&
                  active.back() < prompt_length,
              i, "active positions of loop " + std::to_string(at + 3) + " are not ascending positions of the prompt");
    }
    for (std::size_t step = 0; step < forced.keys.size() && config.s().enabled; ++step) {
      const auto& layers = forced.keys[step].layers;
      const int key_count = prompt_length + static_cast<int>(step) + 1;
      require(layers.empty() || layers.size() == static_cast<std::size_t>(model.layers), i,
              "step " + std::to_string(step) + " lacks layers");
      for (const Tensor<std::int32_t>& keys : layers) {
        const std::string where = "keys of step " + std::to_string(step);
        require(keys.shape == std::vector<std::int64_t>{model.heads, budget(config.s().key_fraction_bp, key_count)}, i,
                where + " have another shape");
        for (int head = 0; head < model.heads; ++head) {
          const auto row = keys.row(head);
          require(std::is_sorted(row.begin(), row.end(), std::less_equal<>()) && row.front() >= 0 && row.back() < key_count, i,
                  where + " are not ascending positions below " + std::to_string(key_count));
        }
      }
    }
  }
}

// One set of widened vectors per arithmetic type, one run at a time.
class ReferenceExecutor final : public Executor {
 public:
  explicit ReferenceExecutor(const Checkpoint& checkpoint) : checkpoint_(checkpoint) {}

  std::string name() const override { return "reference"; }

  void begin(const Trace& trace, const EffectiveConfig& config, const RunOptions& options) override {
    require_fault_in(options.fault, name());
    if (options.region_memory != handoff::MemoryPlace::host)
      throw UnsupportedError("the reference keeps regions of a handoff in host memory, not where a transport between devices moves them");
    if (config.exit().mode == ExitMode::trace) {
      for (std::size_t i = 0; i < trace.requests.size(); ++i) {
        if (trace.requests[i].exit_depths.size() < static_cast<std::size_t>(trace.requests[i].max_new_tokens)) {
          throw ConfigError("exit mode trace needs exit_depths for every new token; trace " + trace.name + " has none for request " +
                            std::to_string(i));
        }
      }
    }
    if (options.decisions != nullptr) check_decisions(*options.decisions, trace, config, checkpoint_.config);
    declared_.reset();
    reordered_.reset();
    double_.reset();
    switch (options.profile) {
      case Profile::declared:
        declared_.emplace(checkpoint_.config, checkpoint_.sha256, single_weights(), trace, config, options);
        break;
      case Profile::reordered:
        reordered_.emplace(checkpoint_.config, checkpoint_.sha256, single_weights(), trace, config, options);
        break;
      case Profile::double_precision:
        double_.emplace(checkpoint_.config, checkpoint_.sha256, double_weights(), trace, config, options);
        break;
    }
  }

  void submit(const Submission& submission) override {
    if (declared_)
      declared_->submit(submission);
    else if (reordered_)
      reordered_->submit(submission);
    else if (double_)
      double_->submit(submission);
    else
      throw InternalError("submit() before begin()");
  }

  handoff::Source* handoff_source() override {
    return declared_ ? declared_->handoff_source() : reordered_ ? reordered_->handoff_source() : double_ ? double_->handoff_source() : nullptr;
  }
  handoff::Target* handoff_target() override {
    return declared_ ? declared_->handoff_target() : reordered_ ? reordered_->handoff_target() : double_ ? double_->handoff_target() : nullptr;
  }

  RunRecord finish() override {
    if (!declared_ && !reordered_ && !double_) throw InternalError("finish() before begin()");
    RunRecord record = declared_ ? declared_->finish() : reordered_ ? reordered_->finish() : double_->finish();
    declared_.reset();
    reordered_.reset();
    double_.reset();
    return record;
  }

 private:
  const Weights<float>& single_weights() {
    if (!single_) single_.emplace(checkpoint_);
    return *single_;
  }
  const Weights<double>& double_weights() {
    if (!double_weights_) double_weights_.emplace(checkpoint_);
    return *double_weights_;
  }

  const Checkpoint& checkpoint_;
  std::optional<Weights<float>> single_;
  std::optional<Weights<double>> double_weights_;
  std::optional<Run<Declared>> declared_;
  std::optional<Run<Reordered>> reordered_;
  std::optional<Run<DoublePrecision>> double_;
};

}  // namespace

std::unique_ptr<Executor> make_reference_executor(const Checkpoint& checkpoint) { return std::make_unique<ReferenceExecutor>(checkpoint); }

}  // namespace loopgauge::reference
