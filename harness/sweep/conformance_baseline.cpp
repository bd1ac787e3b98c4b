// SPDX-License-Identifier: Apache-2.0
#include "harness/sweep/conformance_baseline.hpp"

#include <algorithm>
#include <span>
#include <utility>
#include <vector>

#include "harness/planner/planner.hpp"
#include "harness/replay.hpp"

namespace loopgauge::harness {

bool has_decisions(const EffectiveConfig& config) {
  const ExitMode exit = config.exit().mode;
  return config.selects_tokens() || config.s().enabled || exit == ExitMode::threshold || exit == ExitMode::delayed;
}

Case baseline_case(const Case& value, const EffectiveConfig& config) {
  Case base = value;
  if (!config.q().enabled || config.q().timing == EncodingTiming::serial_aligned) base.mode = ModeSpec{};
  return base;
}

namespace {

// Shows every row to several observers.
class SharedTap : public Tap {
 public:
  void add(Tap* tap) {
    if (tap != nullptr) taps_.push_back(tap);
  }
  Tap* get() { return taps_.empty() ? nullptr : taps_.size() == 1 ? taps_.front() : this; }
  void record(const TapPoint& point, std::span<const float> values) override {
    for (Tap* tap : taps_) tap->record(point, values);
  }

 private:
  std::vector<Tap*> taps_;
};

}  // namespace

ObservedRun run_observed(Executor& executor, const Case& value, const Trace& trace, const Checkpoint& checkpoint, Profile profile,
                         const RunRecord* decisions, Tap* tap) {
  const EffectiveConfig config = EffectiveConfig::resolve(value.config, checkpoint.config);
  ObservedRun result;
  SharedTap taps;
  if (config.s().enabled) result.keys = std::make_unique<KeyLogitTap>(trace);
  taps.add(result.keys.get());
  taps.add(tap);
  RunOptions options;
  options.profile = profile;
  options.record = RecordGroups::all();
  options.decisions = decisions;
  options.tap = taps.get();
  result.record = replay_watched(executor, make_plan(value.mode, trace, config), trace, config, options, nullptr);
  return result;
}

bool keeps_planes(const RunRecord& record) {
  return std::none_of(record.requests.begin(), record.requests.end(), [](const RequestRecord& request) { return request.kv.empty(); });
}

std::vector<PooledDistance> observed_distances(const ObservedRun& reference, const ObservedRun& run, const ModelConfig& model) {
  std::vector<PooledDistance> distances = pooled_distances(reference.record, run.record);
  if (reference.keys != nullptr && run.keys != nullptr && keeps_planes(run.record)) {
    PooledDistance keys = key_logit_distance(reference.record, run.record, model, {reference.keys.get(), run.keys.get()});
    if (!keys.ascending.empty() || keys.non_finite > 0) distances.push_back(std::move(keys));
  }
  return distances;
}

ConformanceBaseline make_conformance_baseline(Executor& reference, const Checkpoint& checkpoint, const Case& value, const Trace& trace,
                                              std::optional<ObservedRun> known) {
  const EffectiveConfig config = EffectiveConfig::resolve(value.config, checkpoint.config);
  ConformanceBaseline base;
  base.reference = known ? std::move(*known) : run_observed(reference, value, trace, checkpoint, Profile::declared, nullptr);
  const RunRecord& expected = base.reference.record;
  base.forced = forced_trace(trace, expected);

  const auto run = [&](Profile profile, const RunRecord* decisions) {
    return run_observed(reference, value, base.forced, checkpoint, profile, decisions);
  };
  const auto measure = [&](const ObservedRun& other) { return observed_distances(base.reference, other, checkpoint.config); };
  const auto own = [&](Profile profile, std::vector<PooledDistance>& distances, Decisions& flips) {
    const ObservedRun other = run(profile, nullptr);
    distances = measure(other);
    flips = find_flips(expected, other.record, config, checkpoint.config, {base.reference.keys.get(), other.keys.get()});
  };
  own(Profile::reordered, base.teacher_forced.reordered, base.reordered);
  own(Profile::double_precision, base.teacher_forced.exact, base.exact);
  if (has_decisions(config)) {
    base.decision_forced = {measure(run(Profile::reordered, &expected)), measure(run(Profile::double_precision, &expected))};
  } else {
    base.decision_forced = base.teacher_forced;
  }
  base.limits = flip_limits(base.decision_forced);
  return base;
}

void ConformanceBaselines::put(const std::string& id, Entry entry) {
  {
    const std::lock_guard lock(mutex_);
    entries_[id] = std::move(entry);
  }
  changed_.notify_all();
}

std::optional<ConformanceBaselines::Entry> ConformanceBaselines::wait(const std::string& id) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return cancelled_ || entries_.contains(id); });
  const auto found = entries_.find(id);
  return cancelled_ || found == entries_.end() ? std::nullopt : std::optional(found->second);
}

void ConformanceBaselines::forget(const std::string& id) {
  const std::lock_guard lock(mutex_);
  entries_.erase(id);
}

void ConformanceBaselines::cancel() {
  {
    const std::lock_guard lock(mutex_);
    cancelled_ = true;
  }
  changed_.notify_all();
}

}  // namespace loopgauge::harness
