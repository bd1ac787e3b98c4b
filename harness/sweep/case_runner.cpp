// SPDX-License-Identifier: Apache-2.0
#include "harness/sweep/case_runner.hpp"

#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <new>
#include <optional>
#include <span>
#include <utility>

#include "harness/compare/error_stats.hpp"
#include "harness/interrupt.hpp"
#include "harness/io/digest.hpp"
#include "harness/planner/planner.hpp"
#include "harness/replay.hpp"
#include "harness/sweep/acceptance.hpp"
#include "harness/sweep/conformance_checks.hpp"
#include "harness/sweep/mode_checks.hpp"
#include "harness/sweep/plan_divergence.hpp"
#include "models/error.hpp"

namespace loopgauge::harness {

// Counts what it is shown: proof that taps were attached and called.
class CaseRunner::CountingTap : public Tap {
 public:
  void record(const TapPoint&, std::span<const float> values) override {
    ++rows_;
    values_ += static_cast<std::int64_t>(values.size());
  }
  std::int64_t rows() const { return rows_; }
  std::int64_t values() const { return values_; }

 private:
  std::int64_t rows_ = 0;
  std::int64_t values_ = 0;
};

namespace {

bool is_dense(const AlgorithmConfig& config) { return settings_text(config) == settings_text(AlgorithmConfig{}); }

Case with_mode(const Case& value, std::string_view mode) {
  Case result = value;
  result.mode = parse_mode(mode);
  return result;
}

// Every legal plan gives the same bits with Q off or serial_aligned (SPEC.md, "Execution modes").
bool plans_agree(const EffectiveConfig& config) { return !config.q().enabled || config.q().timing == EncodingTiming::serial_aligned; }

bool samples(const Trace& trace) {
  return std::any_of(trace.requests.begin(), trace.requests.end(),
                     [](const TraceRequest& request) { return request.temperature != 0.0f && !request.teacher_forced(); });
}

// What is kept of a dense run: enough for drift.
RunRecord logits_only(const RunRecord& record) {
  RunRecord kept;
  kept.mode = record.mode;
  kept.executor = record.executor;
  kept.profile = record.profile;
  kept.model_sha256 = record.model_sha256;
  kept.trace = record.trace;
  kept.config_json = record.config_json;
  for (const RequestRecord& request : record.requests) {
    RequestRecord logits;
    logits.prompt_length = request.prompt_length;
    logits.outcome = request.outcome;
    logits.fed = request.fed;
    logits.tokens = request.tokens;
    logits.logits = request.logits;
    logits.exit_depths = request.exit_depths;
    logits.encoded_frontier = request.encoded_frontier;
    kept.requests.push_back(std::move(logits));
  }
  return kept;
}

// Runs `work`; what it throws becomes the row's status. A check that failed before stays the verdict, and the exception is added to it.
void guarded(CaseResult& row, const std::function<void()>& work) {
  const auto settle = [&](CaseStatus status, const std::string& reason) {
    const bool failed = std::any_of(row.checks.begin(), row.checks.end(), [](const CheckRow& check) { return check.status == "failed"; });
    if (failed) {
      decide(row);
      row.reason += "; then the run ended: " + reason;
    } else {
      row.status = status;
      row.reason = reason;
    }
  };
  try {
    work();
  } catch (const Interrupted&) {
    throw;
  } catch (const NumericError& error) {
    settle(CaseStatus::failed, error.what());
  } catch (const UnsupportedError& error) {
    settle(CaseStatus::not_run, error.what());
  } catch (const std::bad_alloc&) {
    settle(CaseStatus::error, "out of memory");
  } catch (const std::exception& error) {
    settle(CaseStatus::error, error.what());
  }
}

// The executor with a fault in every run.
class PlantedFault : public Executor {
 public:
  PlantedFault(Executor& executor, Fault fault) : executor_(executor), fault_(fault) {}
  std::string name() const override { return executor_.name(); }
  void begin(const Trace& trace, const EffectiveConfig& config, const RunOptions& options) override {
    RunOptions planted = options;
    planted.fault = fault_;
    executor_.begin(trace, config, planted);
  }
  void submit(const Submission& submission) override { executor_.submit(submission); }
  RunRecord finish() override { return executor_.finish(); }

 private:
  Executor& executor_;
  Fault fault_;
};

void set_time(CaseResult& row, double seconds) {
  row.seconds = seconds;
  row.timings = {{std::string(kRunPhase), 0, seconds}};
}

}  // namespace

std::string_view to_string(Measure measure) {
  switch (measure) {
    case Measure::everything: return "everything";
    case Measure::quality: return "quality";
    case Measure::modes: return "modes";
  }
  throw InternalError("unknown measure");
}

Measure parse_measure(std::string_view text) {
  for (const Measure measure : {Measure::everything, Measure::quality, Measure::modes}) {
    if (text == to_string(measure)) return measure;
  }
  throw ConfigError("--measure '" + std::string(text) + "' is not one of: everything, quality, modes");
}

CaseRunner::CaseRunner(Executor& executor, const Checkpoint& checkpoint, DenseBaselines& baselines, CaseRunnerOptions options)
    : executor_(executor), checkpoint_(checkpoint), baselines_(baselines), options_(std::move(options)) {}

EffectiveConfig CaseRunner::resolve(const Case& value) const { return EffectiveConfig::resolve(value.config, checkpoint_.config); }

void CaseRunner::enter_trace(const Trace& trace) {
  if (trace_ == &trace) return;
  trace_ = &trace;
  serial_rows_.clear();
  whole_id_.clear();
  whole_.reset();
}

CaseRunner::Run CaseRunner::run(Executor& executor, const Case& value, const Trace& trace, const RunOptions& options) {
  const EffectiveConfig config = resolve(value);
  Run result;
  result.plan = make_plan(value.mode, trace, config);
  const auto start = std::chrono::steady_clock::now();
  result.record = replay_watched(executor, result.plan, trace, config, options, nullptr);
  result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return result;
}

CaseRunner::Run CaseRunner::run_all_groups(const Case& value, const Trace& trace, Tap* tap) {
  RunOptions options;
  options.record = RecordGroups::all();
  options.tap = tap;
  std::unique_ptr<KeyLogitTap> keys;
  if (tap == nullptr && keeps(value) && value.config.sparse_decode_attention.enabled) {
    keys = std::make_unique<KeyLogitTap>(trace);
    options.tap = keys.get();
  }
  Run result = run(executor_, value, trace, options);
  result.keys = std::move(keys);
  result.digests = digests(result.record);
  return result;
}

void CaseRunner::judge_record(const Case& value, const Trace& trace, const RunRecord& record, CaseResult& row) {
  const EffectiveConfig config = resolve(value);
  if (options_.measure == Measure::everything) row.checks.push_back(audit_check(audit(record, trace, config, checkpoint_, options_.audit)));
  const std::shared_ptr<const RunRecord> dense = baselines_.get(trace.name, [&] {
    if (is_dense(value.config)) return logits_only(record);
    Case baseline;
    baseline.trace = trace.name;
    return run(executor_, baseline, trace, RunOptions{}).record;
  });
  set_drift(row, measure_drift(*dense, record, trace, options_.drift), trace);
  set_memory(row, predict_memory(checkpoint_.config, config, memory_input(record)));
  judge_against_reference(executor_, value, trace, record, row);
}

void CaseRunner::judge_against_reference(Executor& candidate, const Case& value, const Trace& trace, const RunRecord& record,
                                         CaseResult& row) {
  if (conformance_ == nullptr) return;
  if (conformance_->failure) std::rethrow_exception(conformance_->failure);
  if (!operations_) operations_ = std::make_unique<OperationReference>(checkpoint_);
  const auto judge = [&](const Trace& whole, const RunRecord& own) {
    judge_conformance(candidate, checkpoint_, *operations_, value, whole, own, *conformance_->baseline, row);
  };
  if (!disturbs(trace)) {
    judge(trace, record);
    return;
  }
  RunOptions options;
  options.record = RecordGroups::all();
  const Trace whole = undisturbed(trace);
  judge(whole, run(candidate, value, whole, options).record);
}

const CaseResult& CaseRunner::serial_row(const Case& value, const Trace& trace) {
  const Case serial = with_mode(value, "serial");
  const std::string id = case_id(serial);
  auto found = serial_rows_.find(id);
  if (found == serial_rows_.end()) {
    CaseResult row;
    const Run serial_run = run_all_groups(serial, trace);
    row.digests = digest_rows(serial_run.digests);
    judge_record(serial, trace, serial_run.record, row);
    found = serial_rows_.emplace(id, std::move(row)).first;
  }
  return found->second;
}

const CaseRunner::Run& CaseRunner::whole_run(const Case& value, const Trace& trace) {
  const Case serial = with_mode(value, "serial");
  if (const std::string id = case_id(serial); whole_id_ != id) {
    whole_.reset();
    whole_ = run_all_groups(serial, undisturbed(trace));
    whole_id_ = id;
  }
  return *whole_;
}

bool CaseRunner::cancellations_agree(const Case& value, const Trace& trace, const Run& actual, CaseResult& row) {
  const EffectiveConfig config = resolve(value);
  const Run& whole = whole_run(value, trace);
  for (std::size_t i = 0; i < std::min(whole.record.requests.size(), actual.record.requests.size()); ++i) {
    const std::string fault = cancellation_fault(actual.plan, config, trace.requests[i], static_cast<int>(i), whole.record.requests[i],
                                                 actual.record.requests[i]);
    if (fault.empty()) continue;
    row.checks.push_back(failed_check(kEqualsUndisturbedCheck, "request " + std::to_string(i) + ": " + fault));
    return false;
  }
  return true;
}

void CaseRunner::compare_with_whole(const Case& value, const Trace& trace, const Run& actual, CaseResult& row) {
  const EffectiveConfig config = resolve(value);
  const Run& whole = whole_run(value, trace);
  RunRecord expected = whole.record;
  std::string extents;  // of the cancelled requests
  for (std::size_t i = 0; i < std::min(expected.requests.size(), actual.record.requests.size()); ++i) {
    const RequestRecord& kept = actual.record.requests[i];
    if (kept.outcome != RequestOutcome::cancelled) continue;
    expected.requests[i] = cut_to(whole.record.requests[i], kept, config.window());
    extents += ", request " + std::to_string(i) + " cancelled after " + std::to_string(kept.encoded_frontier.size()) + " logits rows";
  }
  const RecordComparison comparison = compare_records(expected, actual.record, config.window());
  const bool nothing_kept = std::all_of(comparison.groups.begin(), comparison.groups.end(), [](const GroupComparison& group) {
    const bool agrees = group.status == GroupStatus::equal || group.status == GroupStatus::absent;
    return agrees && group.compared == 0;
  });
  if (nothing_kept) {
    row.checks.push_back(not_run_check(kEqualsUndisturbedCheck, "every request is cancelled before it kept anything"));
    return;
  }
  row.checks.push_back(comparison.identical() ? passed_check(kEqualsUndisturbedCheck, "same bits as the undisturbed serial run" + extents)
                                              : failed_check(kEqualsUndisturbedCheck, "bits differ from the undisturbed serial run: " +
                                                                                          divergence_text(comparison)));
}

void CaseRunner::compare_with_serial(const Case& value, const Trace& trace, const Run& actual, const CountingTap* tap,
                                     const CaseResult& serial, CaseResult& row) {
  const std::string expected = digest_of(serial, "all");
  if (actual.digests.at("all") == expected) {
    row.checks.push_back(passed_check(kEqualsSerialCheck, "digest " + expected));
    if (tap != nullptr) row.checks.push_back(tap_check(*tap));
    return;
  }
  if (tap != nullptr) {
    const Run untapped = run_all_groups(value, trace);
    if (untapped.digests != actual.digests) {
      const std::string difference = divergence_text(compare_records(untapped.record, actual.record, resolve(value).window()));
      row.checks.push_back(failed_check(kRepeatWithTapsCheck, "attaching taps changes the result, or two runs differ: " + difference));
      row.checks.push_back(untapped.digests.at("all") == expected
                               ? passed_check(kEqualsSerialCheck, "without taps: digest " + expected)
                               : failed_check(kEqualsSerialCheck, "bits differ from the serial plan with and without taps"));
      return;
    }
    row.checks.push_back(tap_check(*tap));
  }
  const Run again = run_all_groups(with_mode(value, "serial"), trace);
  row.checks.push_back(failed_check(
      kEqualsSerialCheck,
      again.digests.at("all") != expected
          ? "bits differ from the serial plan, and two serial runs differ from each other"
          : "bits differ from the serial plan: " + divergence_text(compare_records(again.record, actual.record, resolve(value).window()))));
}

CheckRow CaseRunner::tap_check(const CountingTap& tap) {
  if (tap.rows() == 0) return not_run_check(kRepeatWithTapsCheck, "the executor reported nothing to the tap");
  return passed_check(kRepeatWithTapsCheck,
                      "same bits with " + std::to_string(tap.rows()) + " rows (" + std::to_string(tap.values()) + " values) tapped");
}

CheckRow CaseRunner::repeat_with_taps(const Case& value, const Trace& trace, const Run& first) {
  CountingTap tap;
  const Run tapped = run_all_groups(value, trace, &tap);
  if (tapped.digests == first.digests) return tap_check(tap);
  const Run untapped = run_all_groups(value, trace);
  const bool repeatable = untapped.digests == first.digests;
  const RunRecord& other = repeatable ? tapped.record : untapped.record;
  return failed_check(kRepeatWithTapsCheck, (repeatable ? "attaching taps changes the result: " : "two runs of the case differ: ") +
                                                divergence_text(compare_records(first.record, other, resolve(value).window())));
}

void CaseRunner::judge(const Case& value, const Trace& trace, const Companions& companions, CaseResult& row,
                       const ConformanceBaselines::Entry* conformance) {
  enter_trace(trace);
  conformance_ = conformance;
  guarded(row, [&] { judge_or_throw(value, trace, companions, row); });
}

void CaseRunner::measure_time(const Case& value, const Trace& trace, CaseResult& row) {
  RunOptions options;
  options.record = {.logits = false};
  std::vector<double> seconds;
  std::vector<TimingRow> timings;
  for (int repetition = -1; repetition < options_.time_runs; ++repetition) {
    const Run timed = run(executor_, value, trace, options);
    if (repetition < 0) continue;
    timings.push_back({std::string(kRunPhase), repetition, timed.seconds});
    add_speculation_times(timings, timed.record, repetition);
    seconds.push_back(timed.seconds);
  }
  row.timings = std::move(timings);
  std::sort(seconds.begin(), seconds.end());
  row.seconds = median_of_sorted(seconds);
}

void CaseRunner::measure_quality(const Case& value, const Trace& trace, CaseResult& row) {
  const Run actual = run(executor_, value, trace, RunOptions{});
  row.seconds = actual.seconds;
  const std::shared_ptr<const RunRecord> dense = baselines_.get(trace.name, [&] {
    if (is_dense(value.config)) return logits_only(actual.record);
    return run(executor_, Case{.mode = value.mode, .config = {}, .trace = trace.name}, trace, RunOptions{}).record;
  });
  const Drift drift = measure_drift(*dense, actual.record, trace, options_.drift);
  set_drift(row, drift, trace);
  keep_quality_rows(row);
  row.memory_ratio = predict_memory(checkpoint_.config, resolve(value), memory_input(actual.record)).kv_ratio_physical();
  row.checks.push_back(quality_check(drift));
  decide(row);
}

void CaseRunner::judge_or_throw(const Case& value, const Trace& trace, const Companions& companions, CaseResult& row) {
  if (options_.measure == Measure::quality) return measure_quality(value, trace, row);
  DenseBaselines::Claim claim;
  if (value.mode == ModeSpec{} && is_dense(value.config)) claim = baselines_.claim(trace.name);
  const EffectiveConfig config = resolve(value);
  const bool disturbed = disturbs(trace);
  // Seeded speculation equals serial sampling in distribution, not token by token (S-SAMP-5).
  const bool sampled = value.mode.speculates() && samples(trace);
  const bool must_equal_serial = value.mode != ModeSpec{} && plans_agree(config) && !disturbed && !sampled;
  CountingTap tap;
  // Steps that are observed are not replayed from a graph, and replay is what this row is to show.
  const bool tapped = options_.repeat_with_taps && must_equal_serial && !value.mode.graph;
  Run actual = run_all_groups(value, trace, tapped ? &tap : nullptr);
  row.digests = digest_rows(actual.digests);
  set_time(row, actual.seconds);
  add_speculation_times(row.timings, actual.record, 0);
  set_counters(row, actual.record.counters);
  set_handoffs(row, actual.record.handoffs);
  if (claim) claim.fulfil(logits_only(actual.record));

  bool judged = false;
  // Where something else was cancelled there is nothing to compare the rest with.
  const bool comparable = !disturbed || cancellations_agree(value, trace, actual, row);
  if (value.mode.speculates()) {
    const bool other_timing = !plans_agree(config) && !disturbed && !sampled;
    row.acceptance = acceptance_rows(actual.record, other_timing ? &whole_run(value, trace).record : nullptr);
  }
  if (sampled) {
    row.checks.push_back(skipped_check(kEqualsSerialCheck, "seeded speculation equals serial sampling in distribution, not token by token"));
  } else if (comparable && disturbed && plans_agree(config)) {
    compare_with_whole(value, trace, actual, row);
  } else if (comparable && (value.mode != ModeSpec{} || disturbed)) {
    if (!must_equal_serial) {
      row.divergence = plan_divergence(whole_run(value, trace).record, actual.record);
      row.checks.push_back(skipped_check(
          kEqualsSerialCheck, "execution_dependent timing promises no equality between plans: " + divergence_summary(row.divergence)));
    } else {
      const CaseResult& serial = companions.serial != nullptr ? *companions.serial : serial_row(value, trace);
      compare_with_serial(value, trace, actual, tapped ? &tap : nullptr, serial, row);
      if (actual.digests.at("all") == digest_of(serial, "all")) {
        // The same bits have the same audit, conformance, drift and memory.
        for (const CheckRow& check : serial.checks) {
          const bool conformance = std::find(kConformanceChecks.begin(), kConformanceChecks.end(), check.name) != kConformanceChecks.end();
          if (check.name == kAuditCheck || conformance) row.checks.push_back(check);
        }
        row.tolerance = serial.tolerance;
        row.decisions = serial.decisions;
        row.drift = serial.drift;
        row.drift_summary = serial.drift_summary;
        row.memory = serial.memory;
        row.same_top1 = serial.same_top1;
        row.kl_mean = serial.kl_mean;
        row.kl_max = serial.kl_max;
        row.first_token_kl = serial.first_token_kl;
        row.bits_per_byte = serial.bits_per_byte;
        row.task_accuracy = serial.task_accuracy;
        row.memory_ratio = serial.memory_ratio;
        judged = true;
      }
    }
  }
  if (!judged) judge_record(value, trace, actual.record, row);
  for (CheckRow& check : mode_checks(value.mode, actual.plan, trace, config, actual.record)) row.checks.push_back(std::move(check));
  if (options_.repeat_with_taps && !tapped) {
    row.checks.push_back(
        companions.tapped_later && plans_agree(config) && !disturbed
            ? skipped_check(kRepeatWithTapsCheck, "another plan of the same settings runs with taps and must give these bits")
            : repeat_with_taps(value, trace, actual));
  }
  decide(row);
  if (keeps(value)) kept_ = ObservedRun{std::move(actual.record), std::move(actual.keys)};
}

void CaseRunner::judge_mutant(const Case& value, const Trace& trace, Fault fault, CaseResult& clean_row, CaseResult& mutant_row,
                              const ConformanceBaselines::Entry* conformance) {
  enter_trace(trace);
  conformance_ = conformance;
  std::optional<Run> clean;
  guarded(clean_row, [&] {
    clean = run_all_groups(value, trace);
    clean_row.digests = digest_rows(clean->digests);
    set_time(clean_row, clean->seconds);
    clean_row.checks.push_back(audit_check(audit(clean->record, trace, resolve(value), checkpoint_, options_.audit)));
    for (CheckRow& check : mode_checks(value.mode, clean->plan, trace, resolve(value), clean->record))
      clean_row.checks.push_back(std::move(check));
    judge_against_reference(executor_, value, trace, clean->record, clean_row);
    decide(clean_row);
  });
  if (!clean) {
    mutant_row.status = CaseStatus::not_run;
    mutant_row.reason = "the clean run did not finish: " + clean_row.reason;
    return;
  }
  if (clean_row.status == CaseStatus::failed) {
    mutant_row.status = CaseStatus::error;
    mutant_row.reason = "a check fails without the planted fault too, so a failure would say nothing about it: " + clean_row.reason;
    return;
  }
  guarded(mutant_row, [&] { judge_mutant_or_throw(value, trace, fault, clean->record, mutant_row); });
}

void CaseRunner::judge_mutant_or_throw(const Case& value, const Trace& trace, Fault fault, const RunRecord& clean, CaseResult& row) {
  RunOptions options;
  options.record = RecordGroups::all();
  PlantedFault faulty(executor_, fault);
  const Run mutant = run(faulty, value, trace, options);
  row.digests = digest_rows(digests(mutant.record));
  set_time(row, mutant.seconds);
  const EffectiveConfig config = resolve(value);
  row.checks.push_back(audit_check(audit(mutant.record, trace, config, checkpoint_, options_.audit)));
  for (CheckRow& check : mode_checks(value.mode, mutant.plan, trace, config, mutant.record)) row.checks.push_back(std::move(check));
  const RecordComparison comparison = compare_records(clean, mutant.record, config.window());
  if (comparison.identical()) {
    row.checks.push_back(not_run_check(kEqualsCleanCheck, "the fault changes nothing in this case"));
  } else if (conformance_ == nullptr) {
    row.checks.push_back(failed_check(kEqualsCleanCheck, divergence_text(comparison)));
  } else {
    row.checks.push_back(skipped_check(kEqualsCleanCheck, "not judged: the fault acts, " + divergence_text(comparison)));
    judge_against_reference(faulty, value, trace, mutant.record, row);
  }
  decide(row);
}

}  // namespace loopgauge::harness
