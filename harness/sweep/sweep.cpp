// SPDX-License-Identifier: Apache-2.0
#include "harness/sweep/sweep.hpp"

#include <omp.h>

#include <algorithm>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <thread>
#include <utility>

#include "harness/identity_hash.hpp"
#include "harness/interrupt.hpp"
#include "harness/sweep/checks.hpp"
#include "harness/sweep/conformance_baseline.hpp"
#include "harness/sweep/dense_baselines.hpp"
#include "harness/sweep/mode_checks.hpp"
#include "models/error.hpp"

namespace loopgauge::harness {

namespace {

constexpr std::string_view kReference = "reference";
constexpr std::string_view kOptimized = "optimized";

const Trace& find_trace(const std::vector<Trace>& traces, const std::string& name) {
  for (const Trace& trace : traces) {
    if (trace.name == name) return trace;
  }
  throw InternalError("a case refers to the trace '" + name + "' which the sweep does not hold");
}

const FaultInfo& fault_info(Fault fault) {
  for (const FaultInfo& info : planted_faults()) {
    if (info.fault == fault) return info;
  }
  throw InternalError("a planted fault has no description");
}

CaseResult planned_row(const SweepCase& entry, std::string executor, const ModelConfig& model) {
  const AlgorithmConfig& config = entry.value.config;
  CaseResult row;
  row.ordinal = entry.ordinal;
  row.id = case_id(entry.value);
  row.mode = mode_text(entry.value.mode);
  row.switches = switches_text(config);
  if (config.kv_residual_quantization.enabled) {
    row.policy = to_string(config.kv_residual_quantization.policy);
    row.timing = to_string(config.kv_residual_quantization.timing);
  }
  row.trace = entry.value.trace;
  row.profile = executor == kOptimized ? "" : to_string(Profile::declared);
  row.executor = std::move(executor);
  row.configuration = EffectiveConfig::resolve(config, model).canonical_json();
  row.status = CaseStatus::not_run;
  row.reason = kNotReached;
  return row;
}

bool pending(const CaseResult& row) { return row.status == CaseStatus::not_run && row.reason == kNotReached; }

// Rows that one lane works through in order: they share runs. With a mutant: the clean row and the mutant's, alternating.
struct Unit {
  bool optimized = false;
  const Trace* trace = nullptr;
  std::string settings;
  std::vector<std::size_t> rows;  // indices into Report::cases
  std::vector<Case> baselines;    // reference only: what candidates of this trace and setting are compared with, made after the rows
};

class SweepLoop {
 public:
  SweepLoop(const SweepRequest& request, const SweepExecutors& executors, const Checkpoint& checkpoint, Report& report,
            const BeforeCase& before, const AfterCase& after)
      : request_(request), executors_(executors), checkpoint_(checkpoint), report_(report), before_(before), after_(after) {
    for (const SweepCase& entry : request.cases) cases_[entry.ordinal] = &entry.value;
    for (std::size_t i = 0; i < report.cases.size(); ++i) {
      if (!pending(report.cases[i])) ++done_;
    }
    make_units();
  }

  void run() {
    std::vector<std::thread> threads;
    if (executors_.reference.size() + executors_.optimized.size() == 1) {
      const bool optimized = executors_.reference.empty();
      work(*(optimized ? executors_.optimized : executors_.reference).front(), optimized);
    } else {
      // Lanes without a unit need no threads: a few large cases get them all.
      const auto lanes = std::min(std::ssize(executors_.reference),
                                  std::count_if(units_.begin(), units_.end(), [](const Unit& unit) { return !unit.optimized; }));
      const int lane_threads = std::max(1, omp_get_max_threads() / std::max(1, static_cast<int>(lanes)));
      const auto start = [&](Executor& executor, bool optimized) {
        threads.emplace_back([this, &executor, optimized, lane_threads] {
          omp_set_num_threads(lane_threads);  // of this thread's parallel regions
          work(executor, optimized);
        });
      };
      for (Executor* executor : executors_.reference) start(*executor, false);
      for (Executor* executor : executors_.optimized) start(*executor, true);
      for (std::thread& thread : threads) thread.join();
    }
    if (failure_) std::rethrow_exception(failure_);
    if (request_.runner.time_runs > 0 && !executors_.optimized.empty()) measure_times();
  }

 private:
  // Of the optimized column, one row after the other: every lane is idle by now.
  void measure_times() {
    CaseRunner runner(*executors_.optimized.front(), checkpoint_, optimized_baselines_, request_.runner);
    for (CaseResult& row : report_.cases) {
      const auto runs = std::count_if(row.timings.begin(), row.timings.end(), [](const TimingRow& entry) { return entry.phase == kRunPhase; });
      const bool timed = runs >= request_.runner.time_runs;
      if (stop_ || row.executor != kOptimized || row.status != CaseStatus::passed || timed) continue;
      before_(row, done_, std::ssize(report_.cases));
      const Case& value = case_of(row);
      runner.measure_time(value, find_trace(request_.traces, value.trace), row);
      if (!after_(report_, done_, std::ssize(report_.cases))) stop_ = true;
    }
  }

  void make_units() {
    const std::size_t stride = request_.mutant == Fault::none ? 1 : 2;
    for (std::size_t i = 0; i < report_.cases.size(); i += stride) {
      const CaseResult& row = report_.cases[i];
      if (!pending(row)) continue;
      const Case& value = case_of(row);
      const bool optimized = row.executor == kOptimized;
      if ((optimized ? executors_.optimized : executors_.reference).empty()) {
        throw InternalError("the sweep has no executor for the column '" + row.executor + "'");
      }
      if (stride == 2 && (i + 1 == report_.cases.size() || report_.cases[i + 1].id != row.id)) {
        throw InternalError("row " + row.id + " has no clean partner");
      }
      const Trace& trace = find_trace(request_.traces, value.trace);
      const std::string settings = settings_text(value.config);
      const auto unit = std::find_if(units_.rbegin(), units_.rend(), [&](const Unit& other) { return other.optimized == optimized; });
      if (unit != units_.rend() && unit->trace == &trace && unit->settings == settings) {
        unit->rows.push_back(i);
      } else {
        units_.push_back({optimized, &trace, settings, {i}, {}});
        ++open_units_[{&trace, optimized}];
      }
      if (optimized && request_.runner.measure == Measure::everything) want_baseline(value, trace, settings);
    }
  }

  // A reference lane makes the baseline in the unit of the same trace and setting, or in one of its own where no reference row is pending.
  void want_baseline(const Case& value, const Trace& trace, const std::string& settings) {
    if (executors_.reference.empty()) throw InternalError("the sweep has no reference to compare the optimized column with");
    const Case base = baseline_of(value);
    ++baseline_uses_[case_id(base)];
    auto unit = std::find_if(units_.rbegin(), units_.rend(),
                             [&](const Unit& other) { return !other.optimized && other.trace == &trace && other.settings == settings; });
    if (unit == units_.rend()) {
      units_.push_back({false, &trace, settings, {}, {}});
      ++open_units_[{&trace, false}];
      unit = units_.rbegin();
    }
    const bool known =
        std::any_of(unit->baselines.begin(), unit->baselines.end(), [&](const Case& other) { return case_id(other) == case_id(base); });
    if (!known) unit->baselines.push_back(base);
  }

  Case baseline_of(const Case& value) const { return baseline_case(value, EffectiveConfig::resolve(value.config, checkpoint_.config)); }

  const Case& case_of(const CaseResult& row) const {
    const auto found = cases_.find(row.ordinal);
    if (found == cases_.end() || case_id(*found->second) != row.id) throw InternalError("row " + row.id + " is not a case of the request");
    return *found->second;
  }

  // One lane: takes units until none is left.
  void work(Executor& executor, bool optimized) {
    try {
      DenseBaselines& baselines = optimized ? optimized_baselines_ : reference_baselines_;
      CaseRunner runner(executor, checkpoint_, baselines, request_.runner);
      while (const Unit* unit = next_unit(optimized)) {
        // The run of one row is kept for the baseline.
        const bool keep = !unit->baselines.empty() && !disturbs(*unit->trace);
        runner.keep_run(keep ? case_id(unit->baselines.front()) : "");
        for (const std::size_t i : unit->rows) {
          if (!judge(runner, *unit, i)) return;
        }
        for (const Case& base : unit->baselines) make_baseline(executor, runner, base, *unit->trace);
        std::vector<std::string> used;  // as often as rows of the unit used it
        if (optimized && request_.runner.measure == Measure::everything) {
          for (const std::size_t i : unit->rows) used.push_back(case_id(baseline_of(case_of(report_.cases[i]))));
        }
        const std::lock_guard lock(mutex_);
        for (const std::string& id : used) {
          if (--baseline_uses_[id] == 0) conformance_.forget(id);
        }
        if (--open_units_[{unit->trace, optimized}] == 0) baselines.forget(unit->trace->name);
      }
    } catch (...) {
      const std::lock_guard lock(mutex_);
      if (!failure_) failure_ = std::current_exception();
      stop();
    }
  }

  // Requires the lock.
  void stop() {
    stop_ = true;
    conformance_.cancel();
  }

  // Of the undisturbed trace: how far a cancelled request comes depends on the plan. What the reference throws is handed on: it becomes the
  // status of the candidate's row.
  void make_baseline(Executor& reference, CaseRunner& runner, const Case& base, const Trace& trace) {
    {
      const std::lock_guard lock(mutex_);
      if (stop_) return;
    }
    ConformanceBaselines::Entry entry;
    try {
      std::optional<ObservedRun> kept = runner.take_kept_run();
      entry.baseline = std::make_shared<const ConformanceBaseline>(
          make_conformance_baseline(reference, checkpoint_, base, undisturbed(trace), std::move(kept)));
    } catch (const Interrupted&) {
      throw;
    } catch (...) {
      entry.failure = std::current_exception();
    }
    conformance_.put(case_id(base), std::move(entry));
  }

  const Unit* next_unit(bool optimized) {
    const std::lock_guard lock(mutex_);
    std::size_t& next = next_[optimized ? 1 : 0];
    while (next < units_.size() && units_[next].optimized != optimized) ++next;
    return stop_ || next == units_.size() ? nullptr : &units_[next++];
  }

  // False when the sweep is to end.
  bool judge(CaseRunner& runner, const Unit& unit, std::size_t i) {
    CaseResult row, mutant;
    Companions companions;
    const bool with_mutant = request_.mutant != Fault::none;
    {
      const std::lock_guard lock(mutex_);
      if (stop_) return false;
      before_(report_.cases[i], done_, std::ssize(report_.cases));
      row = report_.cases[i];
      if (with_mutant) mutant = report_.cases[i + 1];
      companions.serial = finished_serial_row(row, i);
    }
    companions.tapped_later = i != unit.rows.back();
    const Case& value = case_of(row);
    std::optional<ConformanceBaselines::Entry> conformance;
    if (unit.optimized && request_.runner.measure == Measure::everything) {
      conformance = conformance_.wait(case_id(baseline_of(value)));
      if (!conformance) return false;
    }
    // Judged aside, so that an interrupted case stays unreached.
    const ConformanceBaselines::Entry* const against = conformance ? &*conformance : nullptr;
    if (with_mutant)
      runner.judge_mutant(value, *unit.trace, request_.mutant, row, mutant, against);
    else
      runner.judge(value, *unit.trace, companions, row, against);

    const std::lock_guard lock(mutex_);
    report_.cases[i] = std::move(row);
    ++done_;
    if (with_mutant) {
      report_.cases[i + 1] = std::move(mutant);
      ++done_;
    }
    if (!after_(report_, done_, std::ssize(report_.cases))) stop();
    return !stop_;
  }

  // The judged row of the serial plan of the same settings and column, if it stands shortly before `row`: rows of a setting are neighbours.
  // It is final, so it may be read without the lock.
  const CaseResult* finished_serial_row(const CaseResult& row, std::size_t i) const {
    Case serial = case_of(row);
    serial.mode = ModeSpec{};
    const std::string id = case_id(serial);
    for (std::size_t j = i; j-- > 0 && report_.cases[j].trace == row.trace;) {
      const CaseResult& other = report_.cases[j];
      const bool judged = other.status == CaseStatus::passed || other.status == CaseStatus::failed;
      if (other.id == id && other.executor == row.executor) return judged && !other.digests.empty() ? &other : nullptr;
    }
    return nullptr;
  }

  const SweepRequest& request_;
  const SweepExecutors& executors_;
  const Checkpoint& checkpoint_;
  Report& report_;
  const BeforeCase& before_;
  const AfterCase& after_;
  std::map<std::int64_t, const Case*> cases_;  // by ordinal
  std::vector<Unit> units_;                    // in the order of their first rows
  DenseBaselines reference_baselines_, optimized_baselines_;
  ConformanceBaselines conformance_;

  std::mutex mutex_;                          // guards what follows, the report and the callbacks
  std::map<std::string, int> baseline_uses_;  // pending rows of the optimized column, by baseline
  std::size_t next_[2] = {0, 0};              // reference, optimized
  std::map<std::pair<const Trace*, bool>, int> open_units_;
  std::int64_t done_ = 0;
  bool stop_ = false;
  std::exception_ptr failure_;
};

}  // namespace

std::string_view to_string(ExecutorChoice choice) {
  switch (choice) {
    case ExecutorChoice::reference:
      return "reference";
    case ExecutorChoice::optimized:
      return "optimized";
    case ExecutorChoice::both:
      return "both";
  }
  throw InternalError("an executor choice has no word");
}

ExecutorChoice parse_executor_choice(std::string_view text) {
  for (const ExecutorChoice choice : {ExecutorChoice::reference, ExecutorChoice::optimized, ExecutorChoice::both}) {
    if (to_string(choice) == text) return choice;
  }
  throw ConfigError("executor '" + std::string(text) + "' is not one of: reference, optimized, both");
}

std::vector<SweepCase> numbered_cases(const std::vector<Case>& cases, const std::vector<Trace>& traces, const ModelConfig& model) {
  for (const Trace& trace : traces) {
    const std::vector<std::string> faults = trace_faults(trace, model);
    if (!faults.empty()) throw TraceError("trace '" + trace.name + "' does not fit the model: " + faults.front());
  }
  std::vector<SweepCase> numbered;
  for (const Case& value : cases) {
    find_trace(traces, value.trace);
    require_runnable(value);
    if (model.loops != kLoops && (value.config.token_sparse_prefill.enabled || value.config.sparse_decode_attention.enabled ||
                                  value.config.kv_residual_quantization.enabled)) {
      throw ConfigError("case " + case_id(value) + ": T, S and Q need a model of four loops, this one has " + std::to_string(model.loops) +
                        "; --filter '*/t0s0q0/*' leaves the cases that it can run");
    }
    EffectiveConfig::resolve(value.config, model);
    numbered.push_back({std::ssize(numbered), value});
  }
  return numbered;
}

std::vector<SweepCase> shard_cases(const std::vector<SweepCase>& request, const std::vector<Case>& shard) {
  std::set<std::string> wanted;
  for (const Case& value : shard) wanted.insert(case_id(value));
  std::vector<SweepCase> cases;
  for (const SweepCase& entry : request) {
    if (wanted.contains(case_id(entry.value))) cases.push_back(entry);
  }
  return cases;
}

std::string request_sha256(const SweepRequest& request, const ModelConfig& model) {
  IdentityHash hash;
  hash.text("loopgauge-sweep-1");
  hash.text(to_string(request.executors));
  hash.text(to_string(request.mutant));
  hash.number(request.runner.repeat_with_taps);
  if (request.runner.measure != Measure::everything) hash.text(to_string(request.runner.measure));
  if (request.runner.time_runs > 0) {
    hash.text("time_runs");
    hash.number(request.runner.time_runs);
  }
  hash.number(static_cast<std::int64_t>(request.cases.size()));
  for (const SweepCase& entry : request.cases) {
    hash.text(case_id(entry.value));
    hash.text(EffectiveConfig::resolve(entry.value.config, model).canonical_json());
  }
  hash.number(static_cast<std::int64_t>(request.traces.size()));
  for (const Trace& trace : request.traces) hash.trace(trace);
  return hash.hex();
}

std::vector<CaseResult> planned_rows(const SweepRequest& request, const std::vector<SweepCase>& cases, const SweepExecutors& executors,
                                     const ModelConfig& model) {
  std::vector<CaseResult> rows;
  if (request.mutant != Fault::none) {
    const FaultInfo& info = fault_info(request.mutant);
    const std::string_view column = request.executors == ExecutorChoice::optimized ? kOptimized : kReference;
    for (const SweepCase& entry : cases) {
      if (!inert_fault_reason(request.mutant, entry.value).empty()) continue;
      rows.push_back(planned_row(entry, std::string(column), model));
      rows.push_back(planned_row(entry, "mutant:" + std::string(info.name), model));
    }
    return rows;
  }
  for (const SweepCase& entry : cases) {
    if (request.executors != ExecutorChoice::optimized) rows.push_back(planned_row(entry, std::string(kReference), model));
    if (request.executors == ExecutorChoice::reference) continue;
    rows.push_back(planned_row(entry, std::string(kOptimized), model));
    if (executors.optimized.empty()) rows.back().reason = executors.device;
  }
  return rows;
}

void run_sweep(const SweepRequest& request, const SweepExecutors& executors, const Checkpoint& checkpoint, Report& report,
               const BeforeCase& before, const AfterCase& after) {
  SweepLoop(request, executors, checkpoint, report, before, after).run();
}

}  // namespace loopgauge::harness
