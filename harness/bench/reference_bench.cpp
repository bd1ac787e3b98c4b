// SPDX-License-Identifier: Apache-2.0
#include "harness/bench/reference_bench.hpp"

#include <algorithm>
#include <chrono>
#include <random>

#include "harness/compare/error_stats.hpp"
#include "harness/interrupt.hpp"
#include "harness/planner/planner.hpp"
#include "models/error.hpp"

namespace loopgauge::harness {
namespace {

Trace bench_trace(const ModelConfig& model, const ReferenceBenchOptions& options) {
  Trace trace;
  trace.name = "bench";
  trace.source = "loopgauge bench";
  trace.vocab_size = model.vocab;
  TraceRequest request;
  request.max_new_tokens = options.new_tokens + 1;  // the last emitted token is not forwarded
  request.seed = options.seed;
  std::mt19937_64 generator(options.seed);
  for (int i = 0; i < options.context; ++i) {
    request.prompt.push_back(static_cast<std::int32_t>(generator() % static_cast<std::uint64_t>(model.vocab)));
  }
  trace.requests.push_back(std::move(request));
  return trace;
}

struct RunSeconds {
  double prefill = 0;
  double decode = 0;
};

RunSeconds timed_run(Executor& executor, const Plan& plan, const Trace& trace, const EffectiveConfig& config,
                     const RunOptions& run_options) {
  using Clock = std::chrono::steady_clock;
  RunSeconds seconds;
  executor.begin(trace, config, run_options);
  for (const Submission& submission : plan.submissions) {
    throw_if_interrupted();
    const auto start = Clock::now();
    executor.submit(submission);
    const double elapsed = std::chrono::duration<double>(Clock::now() - start).count();
    (submission.items[0].kind == RowKind::prefill ? seconds.prefill : seconds.decode) += elapsed;
  }
  executor.finish();
  return seconds;
}

void require(bool holds, const std::string& message) {
  if (!holds) throw ConfigError(message);
}

}  // namespace

Spread spread(std::vector<double> values) {
  require(!values.empty(), "a spread needs at least one value");
  std::sort(values.begin(), values.end());
  return {median_of_sorted(values), values.front(), values.back()};
}

ReferenceBenchRow measure_reference(Executor& executor, const AlgorithmConfig& config, const ModelConfig& model, Profile profile,
                                    const ReferenceBenchOptions& options) {
  require(options.context >= 1 && options.new_tokens >= 1 && options.repeat >= 1, "context, new tokens and repeat must be at least 1");
  const std::int64_t positions = std::int64_t{options.context} + options.new_tokens;
  require(positions <= model.max_positions, "context and new tokens together are " + std::to_string(positions) +
                                                " positions; the model has " + std::to_string(model.max_positions));
  const EffectiveConfig effective = EffectiveConfig::resolve(config, model);
  const Trace trace = bench_trace(model, options);
  const Plan plan = make_plan(ModeSpec{}, trace, effective);
  RunOptions run_options;
  run_options.profile = profile;
  run_options.record = {.logits = false};

  timed_run(executor, plan, trace, effective, run_options);
  std::vector<double> prefill, decode;
  for (int i = 0; i < options.repeat; ++i) {
    const RunSeconds seconds = timed_run(executor, plan, trace, effective, run_options);
    prefill.push_back(options.context / seconds.prefill);
    decode.push_back(options.new_tokens / seconds.decode);
  }
  return {settings_text(config), spread(std::move(prefill)), spread(std::move(decode))};
}

}  // namespace loopgauge::harness
