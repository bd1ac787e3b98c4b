// SPDX-License-Identifier: Apache-2.0
#include "harness/bench/end_to_end_bench.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>
#include <set>
#include <utility>

#include "harness/case.hpp"
#include "harness/compare/error_stats.hpp"
#include "harness/compare/memory_model.hpp"
#include "harness/handoff/local_transport.hpp"
#include "harness/planner/planner.hpp"
#include "models/error.hpp"
#include "models/memory_category.hpp"
#include "optimized/cuda_executor.hpp"
#include "optimized/device_copies.hpp"
#include "optimized/runtime/device_error.hpp"
#include "reference/reference_executor.hpp"

namespace loopgauge::harness {
namespace {

constexpr int kMostLive = 256;               // of the CUDA runtime's cache
constexpr HandoffLimits kHandoffLimits{.partition_bytes = std::size_t{8} << 20, .bytes_in_flight = std::size_t{64} << 20, .export_bytes = std::size_t{256} << 20};

// What a load is when nothing else is asked for. The reference is some thousand times slower.
LoadOptions load_options(const std::string& name, const EndToEndOptions& options, const ServingTarget& target) {
  const bool on_device = target.on_device;
  LoadOptions load;
  load.name = name;
  load.seed = options.seed;
  load.prompt_tokens = on_device ? std::vector<int>{1024, 2048, 4096} : std::vector<int>{32, 64, 128};
  load.new_tokens = on_device ? 32 : 4;
  const bool few = name == "low" || name == "failures";
  load.requests = on_device ? (few ? 8 : 24) : (few ? 3 : 6);
  load.requests_per_s = name == "low" ? 1.5 : name == "failures" ? 4 : 12;
  if (name == "fit") {
    load.prompt_tokens = {on_device ? 8192 : 128};
    load.new_tokens = on_device ? 17 : 4;
    load.requests_per_s = 0;
  }
  if (name == "pd") load.prompt_tokens = {on_device ? 2048 : 64};
  if (options.requests) load.requests = *options.requests;
  if (options.requests_per_s) load.requests_per_s = *options.requests_per_s;
  if (options.new_tokens) load.new_tokens = *options.new_tokens;
  if (!options.prompt_tokens.empty()) load.prompt_tokens = options.prompt_tokens;
  if (name == "failures") {
    load.cancelled = std::min(2, load.requests);
    load.patience_s = 0.5;
    load.oversized = 1;
    const int longest = *std::max_element(load.prompt_tokens.begin(), load.prompt_tokens.end());
    load.oversized_tokens = std::min(4 * longest, target.model.max_positions - load.new_tokens);
    if (load.oversized_tokens <= longest)
      throw ConfigError("load failures: beside prompts of " + std::to_string(longest) + " tokens and " + std::to_string(load.new_tokens) +
                        " new ones a longer one that is refused has no room in the model's " + std::to_string(target.model.max_positions) + " positions; --prompts takes shorter ones");
  }
  return load;
}

// Throws ConfigError for a load that the model cannot have.
ServingLoad load_for(const ModelConfig& model, const LoadOptions& options) {
  ServingLoad load = make_load(options, model.vocab);
  if (const std::vector<std::string> faults = trace_faults(load.trace, model); !faults.empty()) throw ConfigError("load " + options.name + ": " + faults.front());
  return load;
}

std::string load_text(const LoadOptions& load) {
  char text[64];
  std::snprintf(text, sizeof text, "%s, %.3g requests/s", load.name.c_str(), load.requests_per_s);
  return load.requests_per_s == 0 ? load.name + ", all at once" : text;
}

std::string counted(int count, const char* what) { return count == 0 ? "" : std::to_string(count) + " " + what; }

void join(std::string& text, const std::string& more) {
  if (more.empty()) return;
  text += (text.empty() ? "" : "; ") + more;
}

// K/V in whatever form, with what is needed to find it.
std::int64_t kv_bytes(const optimized::MemoryUsage& usage) {
  std::size_t sum = 0;
  for (const MemoryCategory category : {MemoryCategory::base_payload, MemoryCategory::residual_payload, MemoryCategory::parameters, MemoryCategory::activity_maps,
                                        MemoryCategory::bf16_tail, MemoryCategory::bf16_planes, MemoryCategory::inherited_references}) {
    sum += usage.in_use[static_cast<std::size_t>(category)];
  }
  return static_cast<std::int64_t>(sum);
}

// Tokens read while every finished request was past its prompt and none had ended, over that time; NaN where there was no such time.
double tokens_per_s_of_all(const ServingResult& result) {
  double begin = 0, end = kNever;
  for (const ServedRequest& request : result.requests) {
    if (request.outcome != ServedOutcome::finished) continue;
    begin = std::max(begin, request.token_s.front());
    end = std::min(end, request.end_s);
  }
  if (!(begin < end) || end == kNever) return kNotMeasured;
  std::int64_t tokens = 0;
  for (const ServedRequest& request : result.requests) {
    if (request.outcome != ServedOutcome::finished) continue;
    tokens += std::count_if(request.token_s.begin(), request.token_s.end(), [&](double at) { return at > begin && at <= end; });
  }
  return static_cast<double>(tokens) / (end - begin);
}

class EndToEndBench {
 public:
  EndToEndBench(const ServingTarget& target, const EndToEndOptions& options, BenchOutput& output) : target_(target), options_(options), output_(output) {}

  EndToEndVerdict run() {
    // A load that the model cannot have is refused before anything is measured or a report replaced.
    for (const std::string& load : options_.loads) static_cast<void>(load_for(target_.model, load_options(load, options_, target_)));
    for (const std::string& load : options_.loads) {
      for (const std::string& switches : options_.switches) {
        AlgorithmConfig config;
        apply_switches(config, switches);
        config.kv_residual_quantization.policy = options_.policy;
        config = normalized(config);
        setting_ = settings_text(config);
        const EffectiveConfig effective = EffectiveConfig::resolve(config, target_.model);
        output_.announce(load + ", " + setting_);
        try {
          measure(load, effective);
        } catch (const optimized::DeviceMemoryError& error) {
          output_.left_out(load + ", " + setting_, error.what());
        }
      }
    }
    return {tokens_agree_, !options_.check || compared_ > 0};
  }

 private:
  void measure(const std::string& load, const EffectiveConfig& config) {
    if (load == "fit") return measure_fit(config);
    if (load == "pd") return measure_pd(config);
    const LoadOptions asked = load_options(load, options_, target_);
    ServingLoad requests = load_for(target_.model, asked);
    Executor& executor = warm(0, config);
    ServingOptions serving = serving_options(config, requests);
    if (load == "failures") {
      // The memory of a smaller device, in which the oversized request has no room.
      std::int64_t largest = 0, oversized = 0;
      for (std::size_t i = 0; i < requests.trace.requests.size(); ++i) {
        const std::int64_t bytes = std::max(serving.bytes[i].until_prompt_complete, serving.bytes[i].afterwards);
        std::int64_t& most = requests.oversized[i] ? oversized : largest;
        most = std::max(most, bytes);
      }
      serving.budget = std::min(serving.budget, (largest + oversized) / 2);
      serving.failures = {{10, PlannedFailure::launch}, {30, PlannedFailure::allocation}};
    }
    WallClock clock;
    const ServingResult result = serve(executor, requests, config, serving, clock);
    EndToEndRow row = summarize(result, requests);
    row.mode = mode_text(serving);
    row.load = load_text(asked);
    row.peak_bytes = peak_bytes(executor);
    check(executor, requests, config, result, row);
    add(std::move(row));
  }

  // Prompts of one length, all at once; nobody decodes before as many as fit are there.
  void measure_fit(const EffectiveConfig& config) {
    if (!target_.on_device) return output_.left_out("fit, " + setting_, "it fills a device's memory, and the executor has none");
    LoadOptions asked = load_options("fit", options_, target_);
    ServingOptions serving;
    asked.requests = 1;
    Executor& executor = warm(0, config);
    serving = serving_options(config, load_for(target_.model, asked));
    serving.submissions_in_flight = 1;
    // Prompts are a means here: in large batches, as long as there is room for several.
    serving.scheduler.prefill_tokens = 8192;
    serving.scheduler.prefill_requests = 4;
    const int predicted = std::min(most_that_fit(serving.bytes.front(), serving.budget), kMostLive);
    if (predicted < 1) return output_.left_out("fit, " + setting_, "not one request fits " + std::to_string(serving.budget) + " bytes");
    asked.requests = options_.requests.value_or(predicted);
    const ServingLoad load = load_for(target_.model, asked);
    serving.bytes.assign(load.trace.requests.size(), serving.bytes.front());
    serving.scheduler.most_live = kMostLive;
    serving.scheduler.hold_decode = true;
    std::int64_t kv_at_prompts_end = 0;
    serving.after_round = [&](const ServingScheduler& scheduler) {
      if (kv_at_prompts_end > 0 || scheduler.live() < std::min(asked.requests, predicted)) return;
      for (int i = 0; i < asked.requests; ++i) {
        if (scheduler.holds(i) && !scheduler.prompt_complete(i)) return;
      }
      kv_at_prompts_end = kv_bytes(target_.memory_usage(executor)) / scheduler.live();
    };
    WallClock clock;
    const ServingResult result = serve(executor, load, config, serving, clock);
    EndToEndRow row = summarize(result, load);
    row.mode = mode_text(serving);
    row.load = load_text(asked);
    row.peak_bytes = peak_bytes(executor);
    row.predicted_live = predicted;
    // Decoding was held back: times between tokens say nothing of a server.
    for (double* time : {&row.tpot_ms_p50, &row.tpot_ms_p90, &row.tpot_ms_p99, &row.token_gap_ms_p50, &row.token_gap_ms_p90, &row.token_gap_ms_p99}) *time = kNotMeasured;
    row.tokens_per_s_of_all = tokens_per_s_of_all(result);
    row.kv_bytes_of_a_prompt = kv_at_prompts_end;
    row.bf16_bytes_of_a_prompt = std::int64_t{4} * asked.prompt_tokens.front() * target_.model.layers * target_.model.projection_width() * 4;
    check(executor, load, config, result, row);
    add(std::move(row));
  }

  void measure_pd(const EffectiveConfig& config) {
    if (target_.on_device && target_.devices < 2) {
      return output_.left_out("pd, " + setting_, "it needs two devices, and there is one");
    }
    const LoadOptions asked = load_options("pd", options_, target_);
    const ServingLoad load = load_for(target_.model, asked);
    Executor& first = warm(0, config);
    Executor& second = warm(1, config);
    ServingOptions serving = serving_options(config, load);
    if (target_.on_device) serving.budget = std::min(serving.budget, budget(1));
    for (const bool handed_over : {false, true}) {
      output_.announce(std::string("pd, ") + setting_ + (handed_over ? ", handed over" : ", halves"));
      // A transport serves one run; the first handoff finds ways between devices that later ones have.
      if (handed_over) {
        const ServingLoad small = load_for(target_.model, warm_load());
        WallClock clock;
        serve_handed_over(first, second, target_.transport(), kHandoffLimits, small, config, serving_options(config, small), clock);
      }
      WallClock clock;
      const ServingResult result = handed_over
                                       ? serve_handed_over(first, second, target_.transport(), kHandoffLimits, load, config, serving, clock)
                                       : serve_halves(first, second, load, config, serving, clock);
      EndToEndRow row = summarize(result, load);
      row.mode = mode_text(serving) + (handed_over ? "+pd" : "");
      row.load = load_text(asked);
      row.device_count = 2;
      row.peak_bytes = peak_bytes(first) + peak_bytes(second);
      if (handed_over) {
        row.transfer_share = result.transfer_s / row.duration_s;
        join(row.note, std::to_string(result.transfer_bytes) + " bytes handed over");
      }
      check(first, load, config, result, row);
      add(std::move(row));
    }
  }

  LoadOptions warm_load() const {
    LoadOptions load;
    load.name = "warm-up";
    load.requests = 2;
    load.requests_per_s = 0;
    load.prompt_tokens = {target_.on_device ? 600 : 40};
    load.new_tokens = 3;
    return load;
  }

  // The executor of a device, made and having run the setting once, so that modules are loaded and algorithms chosen.
  Executor& warm(int device, const EffectiveConfig& config) {
    std::unique_ptr<Executor>& executor = executors_[device];
    if (!executor) executor = target_.make(device);
    if (warmed_[device].insert(config.canonical_json()).second) {
      const ServingLoad load = load_for(target_.model, warm_load());
      WallClock clock;
      serve(*executor, load, config, serving_options(config, load), clock);
    }
    return *executor;
  }

  ServingOptions serving_options(const EffectiveConfig& config, const ServingLoad& load) {
    ServingOptions serving;
    serving.scheduler = options_.scheduler;
    serving.submissions_in_flight = options_.submissions_in_flight;
    serving.graph_replay = options_.graph_replay;
    const int windows = std::max(1, options_.scheduler.prefill_tokens / config.window());
    serving.bytes = predicted_bytes(target_.model, config, load, windows);
    if (target_.on_device) serving.budget = budget(0);
    return serving;
  }

  // For requests, of what is free beside the weights.
  std::int64_t budget(int device) const { return std::max<std::int64_t>(target_.free_bytes(device) - options_.reserve_bytes, 0); }

  std::int64_t peak_bytes(const Executor& executor) const {
    return target_.on_device ? static_cast<std::int64_t>(target_.memory_usage(executor).total_peak) : 0;
  }

  static std::string mode_text(const ServingOptions& serving) {
    std::string mode = serving.scheduler.mixed ? "online mixed" : "online split";
    if (serving.submissions_in_flight > 1) mode += "+async";
    return mode + (serving.graph_replay ? "+graph" : "");
  }

  // Requests alone, in the serial schedule.
  void check(Executor& executor, const ServingLoad& load, const EffectiveConfig& config, const ServingResult& result, EndToEndRow& row) {
    if (!options_.check) return;
    int equal = 0, compared = 0;
    for (std::size_t i = 0; i < result.requests.size(); ++i) {
      if (result.requests[i].outcome != ServedOutcome::finished) continue;
      output_.announce(row.load + ", " + setting_ + ": request " + std::to_string(i) + " alone");
      Trace alone = load.trace;
      alone.requests = {load.trace.requests[i]};
      RunOptions run;
      run.record = {.logits = false};
      const RunRecord record = replay(executor, make_plan(ModeSpec{}, alone, config), alone, config, run);
      ++compared;
      equal += record.requests.front().tokens == result.requests[i].tokens;
    }
    tokens_agree_ &= equal == compared;
    compared_ += compared;
    join(row.note, std::to_string(equal) + " of " + std::to_string(compared) + " requests have the tokens that they have alone");
  }

  void add(EndToEndRow row) {
    row.setting = setting_;
    output_.end_to_end(std::move(row));
  }

  const ServingTarget& target_;
  const EndToEndOptions& options_;
  BenchOutput& output_;
  std::map<int, std::unique_ptr<Executor>> executors_;        // by device
  std::map<int, std::set<std::string>> warmed_;               // configurations
  std::string setting_;
  bool tokens_agree_ = true;
  int compared_ = 0;                                          // requests, with themselves alone
};

}  // namespace

ServingTarget random_model_on_devices(const ModelConfig& shape, std::uint32_t seed) {
  const optimized::DeviceStatus status = optimized::device_status();
  if (!status.available) throw UnsupportedError("requests cannot be served on a device: " + status.description);
  ServingTarget target;
  target.model = shape;
  target.on_device = true;
  target.devices = optimized::device_count();
  target.make = [shape, seed](int device) -> std::unique_ptr<Executor> { return optimized::make_random_cuda_executor(shape, seed, {.device = device}); };
  target.transport = make_peer_transport;
  target.free_bytes = [](int device) { return static_cast<std::int64_t>(optimized::device_memory(device).free); };
  target.memory_usage = [](const Executor& executor) { return dynamic_cast<const optimized::CudaExecutor&>(executor).memory_usage(); };
  return target;
}

ServingTarget checkpoint_target(const std::string& executor, const Checkpoint& checkpoint) {
  if (executor == "optimized") {
    ServingTarget target = random_model_on_devices(checkpoint.config, 0);
    target.make = [&checkpoint](int device) -> std::unique_ptr<Executor> { return optimized::make_cuda_executor(checkpoint, {.device = device}); };
    return target;
  }
  if (executor != "reference") throw ConfigError("executor '" + executor + "' is not one of: reference, optimized");
  ServingTarget target;
  target.model = checkpoint.config;
  target.devices = 2;
  target.make = [&checkpoint](int) -> std::unique_ptr<Executor> { return reference::make_reference_executor(checkpoint); };
  target.transport = make_host_transport;
  return target;
}

std::vector<RequestBytes> predicted_bytes(const ModelConfig& model, const EffectiveConfig& config, const ServingLoad& load, int windows_in_flight) {
  const std::int64_t shared = weight_bytes(model);
  std::map<int, RequestBytes> by_length;
  std::vector<RequestBytes> bytes;
  for (const TraceRequest& request : load.trace.requests) {
    const auto [entry, is_new] = by_length.try_emplace(request.prompt_length());
    if (is_new) {
      const int length = request.prompt_length(), end = length + fed_tokens(request);
      const auto total = [&](int committed) {
        MemoryInput input;
        RequestMemory& only = input.requests.emplace_back();
        only.prompt_length = length;
        only.committed = committed;
        only.capacity = end;
        input.windows_in_flight = windows_in_flight;
        return predict_memory(model, config, input);
      };
      const MemoryPrediction at_prompt = total(length);
      entry->second.until_prompt_complete = at_prompt.peak.physical_total() - shared;
      // A page opens before its tail is encoded: the most that any length up to the last holds.
      for (int committed = length; committed <= end; ++committed) {
        entry->second.afterwards = std::max(entry->second.afterwards, total(committed).steady.physical_total() - shared);
      }
    }
    bytes.push_back(entry->second);
  }
  return bytes;
}

int most_that_fit(const RequestBytes& bytes, std::int64_t budget) {
  const std::int64_t last = std::max(bytes.until_prompt_complete, bytes.afterwards);
  if (last > budget) return 0;
  return static_cast<int>(1 + (budget - last) / std::max<std::int64_t>(bytes.afterwards, 1));
}

EndToEndRow summarize(const ServingResult& result, const ServingLoad& load) {
  EndToEndRow row;
  std::map<ServedOutcome, int> counts;
  std::vector<double> first, per_token, latency, gaps;
  double begin = kNever, end = 0;
  std::int64_t tokens = 0;
  std::string reason;
  for (std::size_t i = 0; i < result.requests.size(); ++i) {
    const ServedRequest& request = result.requests[i];
    const TraceRequest& asked = load.trace.requests[i];
    row.prompt_tokens = i == 0 || row.prompt_tokens == asked.prompt_length() ? asked.prompt_length() : 0;
    row.new_tokens = i == 0 || row.new_tokens == asked.max_new_tokens ? asked.max_new_tokens : 0;
    ++counts[request.outcome];
    begin = std::min(begin, request.arrival_s);
    if (reason.empty() && !request.reason.empty()) reason = "request " + std::to_string(i) + ": " + request.reason;
    if (request.outcome != ServedOutcome::finished) continue;
    const std::vector<double>& at = request.token_s;
    if (at.empty()) throw InternalError("request " + std::to_string(i) + " finished without a token");
    end = std::max(end, request.end_s);
    tokens += static_cast<std::int64_t>(at.size());
    first.push_back((at.front() - request.arrival_s) * 1e3);
    latency.push_back((request.end_s - request.arrival_s) * 1e3);
    if (at.size() > 1) per_token.push_back((at.back() - at.front()) * 1e3 / static_cast<double>(at.size() - 1));
    for (std::size_t j = 1; j < at.size(); ++j) gaps.push_back((at[j] - at[j - 1]) * 1e3);
  }
  row.requests = static_cast<std::int64_t>(result.requests.size());
  row.finished = counts[ServedOutcome::finished];
  row.failed = row.requests - row.finished;
  row.cancelled = counts[ServedOutcome::cancelled];
  row.refused = counts[ServedOutcome::refused];
  row.failed_submissions = result.failed_submissions;
  row.most_live = result.most_live;
  const auto spread = [](std::vector<double> values, double& p50, double& p90, double& p99) {
    std::sort(values.begin(), values.end());
    p50 = percentile_of_sorted(values, 0.5);
    p90 = tail_percentile_of_sorted(values, 0.9);
    p99 = tail_percentile_of_sorted(values, 0.99);
  };
  spread(first, row.ttft_ms_p50, row.ttft_ms_p90, row.ttft_ms_p99);
  spread(per_token, row.tpot_ms_p50, row.tpot_ms_p90, row.tpot_ms_p99);
  spread(latency, row.latency_ms_p50, row.latency_ms_p90, row.latency_ms_p99);
  spread(gaps, row.token_gap_ms_p50, row.token_gap_ms_p90, row.token_gap_ms_p99);
  if (row.finished > 0) {
    row.duration_s = end - begin;
    row.output_tokens_per_s = static_cast<double>(tokens) / row.duration_s;
    row.requests_per_s = static_cast<double>(row.finished) / row.duration_s;
  }
  join(row.note, counted(counts[ServedOutcome::cancelled], "given up"));
  join(row.note, counted(counts[ServedOutcome::refused], "refused"));
  join(row.note, counted(counts[ServedOutcome::failed], "failed"));
  join(row.note, counted(result.failed_submissions, "submissions failed and ran again"));
  join(row.note, reason);
  return row;
}

EndToEndVerdict run_end_to_end_bench(const ServingTarget& target, const EndToEndOptions& options, BenchOutput& output) {
  return EndToEndBench(target, options, output).run();
}

}  // namespace loopgauge::harness
