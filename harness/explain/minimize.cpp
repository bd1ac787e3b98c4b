// SPDX-License-Identifier: Apache-2.0
#include "harness/explain/minimize.hpp"

#include <algorithm>
#include <chrono>
#include <functional>
#include <utility>

#include "models/error.hpp"

namespace loopgauge::harness {
namespace {

using Clock = std::chrono::steady_clock;

// One candidate of the search.
struct Attempt {
  Trace trace;
  AlgorithmConfig config;
  int layers, loops;
};

void set_new_tokens(TraceRequest& request, int count) {
  request.max_new_tokens = count;
  const auto size = static_cast<std::size_t>(count);
  if (request.teacher_forced()) request.forced.resize(size);
  if (!request.exit_depths.empty()) request.exit_depths.resize(size);
  if (!request.answer_mask.empty()) request.answer_mask.resize(size);
}

class Minimizer {
 public:
  Minimizer(const ExplainSubject& subject, std::string operation, const MinimizeLimits& limits)
      : subject_(subject),
        operation_(std::move(operation)),
        end_(Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(limits.seconds))),
        best_{subject.trace, subject.config.values(), subject.checkpoint.config.layers, subject.checkpoint.config.loops} {}

  MinimizedCase run(int request) {
    // Layers first: they make every later attempt cheaper.
    shrink("layers of the model", 1, best_.layers, [](Attempt& attempt, int value) { attempt.layers = value; });
    keep_request(request);
    for (int round = 0; round < 2; ++round) {
      // A shorter prompt may need fewer tokens after it and the other way round.
      for (std::size_t i = 0; i < best_.trace.requests.size(); ++i) shrink_request(i);
    }
    switch_off();
    if (!best_.config.token_sparse_prefill.enabled && !best_.config.sparse_decode_attention.enabled &&
        !best_.config.kv_residual_quantization.enabled && best_.config.exit.mode != ExitMode::trace) {
      shrink("loops of the model", 1, best_.loops, [](Attempt& attempt, int value) { attempt.loops = value; });
    }
    result_.trace = std::move(best_.trace);
    result_.trace.name += "-minimal";
    result_.trace.description = "smallest case of " + subject_.trace.name + " in which two runs part at " + operation_;
    result_.config = best_.config;
    result_.layers = best_.layers;
    result_.loops = best_.loops;
    return std::move(result_);
  }

 private:
  bool parts(const Attempt& attempt) {
    if (Clock::now() >= end_) {
      result_.out_of_time = true;
      return false;
    }
    ++result_.attempts;
    try {
      const Checkpoint checkpoint = cut_checkpoint(subject_.checkpoint, attempt.layers, attempt.loops);
      if (!trace_faults(attempt.trace).empty()) return false;
      const EffectiveConfig config = EffectiveConfig::resolve(attempt.config, checkpoint.config);
      const Explanation found = find_divergence({checkpoint, attempt.trace, config, subject_.expected, subject_.actual});
      const bool same = !found.identical() && found.operation.name == operation_;
      result_.successes += same;
      return same;
    } catch (const Error&) {
      return false;
    }
  }

  bool take(Attempt attempt, const std::string& step) {
    if (!parts(attempt)) return false;
    best_ = std::move(attempt);
    result_.steps.push_back(step);
    return true;
  }

  // The least value in [least, value] that parts, `value` being the current one: doubling from below, then bisection between the last value
  // that does not part and the first that does.
  void shrink(const std::string& what, int least, int value, const std::function<void(Attempt&, int)>& set) {
    const auto attempt = [&](int candidate) {
      Attempt changed = best_;
      set(changed, candidate);
      return changed;
    };
    int bad = least - 1, good = value;
    for (int candidate = least; candidate < good; candidate = std::max(candidate + 1, 2 * candidate)) {
      if (parts(attempt(candidate))) {
        good = candidate;
        break;
      }
      bad = candidate;
    }
    while (good < value && good - bad > 1) {
      const int middle = bad + (good - bad) / 2;
      (parts(attempt(middle)) ? good : bad) = middle;
    }
    if (good == value) return;
    best_ = attempt(good);
    result_.steps.push_back(what + ": " + std::to_string(value) + " -> " + std::to_string(good));
  }

  void keep_request(int request) {
    if (best_.trace.requests.size() < 2 || !best_.trace.events.empty()) return;
    Attempt alone = best_;
    alone.trace.requests = {best_.trace.requests.at(static_cast<std::size_t>(request))};
    alone.trace.requests.front().arrival = 0;
    const std::string only = "requests: " + std::to_string(best_.trace.requests.size()) + " -> 1";
    if (take(std::move(alone), only)) return;
    // Some fault of several requests: leave out one after the other.
    for (std::size_t i = best_.trace.requests.size(); i-- > 0 && best_.trace.requests.size() > 1;) {
      Attempt without = best_;
      without.trace.requests.erase(without.trace.requests.begin() + static_cast<std::ptrdiff_t>(i));
      take(std::move(without),
           "requests: " + std::to_string(best_.trace.requests.size()) + " -> " + std::to_string(best_.trace.requests.size() - 1));
    }
  }

  void shrink_request(std::size_t i) {
    const std::string of = " of request " + std::to_string(i);
    shrink("new tokens" + of, 0, best_.trace.requests[i].max_new_tokens,
           [i](Attempt& attempt, int value) { set_new_tokens(attempt.trace.requests[i], value); });
    shrink("prompt tokens" + of, 1, best_.trace.requests[i].prompt_length(),
           [i](Attempt& attempt, int value) { attempt.trace.requests[i].prompt.resize(static_cast<std::size_t>(value)); });
  }

  void switch_off() {
    const auto without = [&](bool enabled, const char* name, const std::function<void(AlgorithmConfig&)>& off) {
      if (!enabled) return;
      Attempt attempt = best_;
      off(attempt.config);
      take(std::move(attempt), std::string(name) + " off");
    };
    without(best_.config.kv_residual_quantization.enabled, "q1", [](AlgorithmConfig& c) { c.kv_residual_quantization = {}; });
    without(best_.config.sparse_decode_attention.enabled, "s1", [](AlgorithmConfig& c) { c.sparse_decode_attention = {}; });
    without(best_.config.token_sparse_prefill.enabled, "t1", [](AlgorithmConfig& c) { c.token_sparse_prefill = {}; });
    without(best_.config.exit.mode != ExitMode::full, "exit rule", [](AlgorithmConfig& c) { c.exit = {}; });
  }

  const ExplainSubject& subject_;
  std::string operation_;
  Clock::time_point end_;
  Attempt best_;
  MinimizedCase result_;
};

}  // namespace

Checkpoint cut_checkpoint(const Checkpoint& checkpoint, int layers, int loops) {
  const ModelConfig& model = checkpoint.config;
  if (layers < 0 || layers > model.layers) {
    throw ConfigError("--layers " + std::to_string(layers) + ": the model has " + std::to_string(model.layers) + " layers");
  }
  if (loops < 0 || loops > model.loops) {
    throw ConfigError("--loops " + std::to_string(loops) + ": the model has " + std::to_string(model.loops) + " loops");
  }
  Checkpoint cut = checkpoint;
  if (layers > 0) {
    cut.config.layers = layers;
    cut.layers.resize(static_cast<std::size_t>(layers));
  }
  if (loops > 0) cut.config.loops = loops;
  return cut;
}

MinimizedCase minimize(const ExplainSubject& subject, const std::string& operation, int request, const MinimizeLimits& limits) {
  return Minimizer(subject, operation, limits).run(request);
}

}  // namespace loopgauge::harness
