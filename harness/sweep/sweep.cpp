// SPDX-License-Identifier: Apache-2.0
#include "harness/sweep/sweep.hpp"

#include <algorithm>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <utility>

#include "models/error.hpp"
#include "models/sha256.hpp"

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

// `needs` as in FaultInfo: "t1", "t1q1", "".
bool has_switches(const AlgorithmConfig& config, std::string_view needs) {
  const std::string switches = switches_text(config);
  for (std::size_t i = 0; i + 1 < needs.size(); i += 2) {
    if (switches.find(needs.substr(i, 2)) == std::string::npos) return false;
  }
  return true;
}

// Text and numbers of a hash input are length-prefixed, so that two different inputs never give the same bytes.
class IdentityHash {
 public:
  void text(std::string_view value) {
    number(static_cast<std::int64_t>(value.size()));
    hash_.update(value.data(), value.size());
  }
  void number(std::int64_t value) {
    unsigned char bytes[8];
    for (int i = 0; i < 8; ++i) bytes[i] = static_cast<unsigned char>(static_cast<std::uint64_t>(value) >> (8 * i));
    hash_.update(bytes, sizeof bytes);
  }
  template <class T>
  void list(const std::vector<T>& values) {
    number(static_cast<std::int64_t>(values.size()));
    for (const T value : values) number(value);
  }
  std::string hex() { return hash_.hex_digest(); }

 private:
  Sha256 hash_;
};

void add_trace(IdentityHash& hash, const Trace& trace) {
  hash.text(trace.name);
  hash.number(trace.vocab_size);
  hash.number(static_cast<std::int64_t>(trace.requests.size()));
  for (const TraceRequest& request : trace.requests) {
    hash.number(request.id);
    hash.number(request.arrival);
    hash.number(request.max_new_tokens);
    hash.number(request.eos_token_id);
    hash.number(static_cast<std::int64_t>(request.seed));
    hash.text(request.task);
    hash.list(request.prompt);
    hash.list(request.forced);
    hash.list(request.exit_depths);
    hash.list(request.answer_mask);
  }
  hash.number(static_cast<std::int64_t>(trace.events.size()));
  for (const TraceEvent& event : trace.events) {
    hash.number(event.submission);
    hash.number(static_cast<int>(event.kind));
    hash.number(event.request);
  }
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

}  // namespace

std::string_view to_string(ExecutorChoice choice) {
  switch (choice) {
    case ExecutorChoice::reference: return "reference";
    case ExecutorChoice::optimized: return "optimized";
    case ExecutorChoice::both: return "both";
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
  hash.number(static_cast<std::int64_t>(request.cases.size()));
  for (const SweepCase& entry : request.cases) {
    hash.text(case_id(entry.value));
    hash.text(EffectiveConfig::resolve(entry.value.config, model).canonical_json());
  }
  hash.number(static_cast<std::int64_t>(request.traces.size()));
  for (const Trace& trace : request.traces) add_trace(hash, trace);
  return hash.hex();
}

std::vector<CaseResult> planned_rows(const SweepRequest& request, const std::vector<SweepCase>& cases, const SweepExecutors& executors,
                                     const ModelConfig& model) {
  std::vector<CaseResult> rows;
  if (request.mutant != Fault::none) {
    const FaultInfo& info = fault_info(request.mutant);
    for (const SweepCase& entry : cases) {
      if (!has_switches(entry.value.config, info.needs)) continue;
      rows.push_back(planned_row(entry, std::string(kReference), model));
      rows.push_back(planned_row(entry, "mutant:" + std::string(info.name), model));
    }
    return rows;
  }
  for (const SweepCase& entry : cases) {
    if (request.executors != ExecutorChoice::optimized) rows.push_back(planned_row(entry, std::string(kReference), model));
    if (request.executors == ExecutorChoice::reference) continue;
    rows.push_back(planned_row(entry, std::string(kOptimized), model));
    if (executors.optimized == nullptr) rows.back().reason = executors.device;
  }
  return rows;
}

void run_sweep(const SweepRequest& request, const SweepExecutors& executors, const Checkpoint& checkpoint, Report& report,
               const BeforeCase& before, const AfterCase& after) {
  std::map<std::int64_t, const SweepCase*> by_ordinal;
  for (const SweepCase& entry : request.cases) by_ordinal[entry.ordinal] = &entry;

  std::map<std::string_view, std::unique_ptr<CaseRunner>> runners;
  const auto runner = [&](std::string_view column) -> CaseRunner& {
    std::unique_ptr<CaseRunner>& found = runners[column];
    if (!found) {
      Executor* executor = column == kOptimized ? executors.optimized : executors.reference;
      if (executor == nullptr) throw InternalError("the sweep has no executor for the column '" + std::string(column) + "'");
      found = std::make_unique<CaseRunner>(*executor, checkpoint, request.runner);
    }
    return *found;
  };

  const auto total = static_cast<std::int64_t>(report.cases.size());
  auto done = static_cast<std::int64_t>(std::count_if(report.cases.begin(), report.cases.end(), [](const CaseResult& row) { return !pending(row); }));
  for (std::size_t i = 0; i < report.cases.size(); ++i) {
    CaseResult& row = report.cases[i];
    if (!pending(row)) continue;
    const auto found = by_ordinal.find(row.ordinal);
    if (found == by_ordinal.end()) throw InternalError("row " + row.id + " is not a case of the request");
    const Case& value = found->second->value;
    const Trace& trace = find_trace(request.traces, value.trace);
    before(row, done, total);
    if (request.mutant == Fault::none) {
      // Judged aside: an interrupted case stays unreached.
      CaseResult result = row;
      runner(row.executor).judge(value, trace, report, result);
      row = std::move(result);
      ++done;
    } else {
      if (row.executor != kReference || i + 1 == report.cases.size()) throw InternalError("row " + row.id + " has no clean partner");
      CaseResult clean = row, mutant = report.cases[i + 1];
      runner(kReference).judge_mutant(value, trace, request.mutant, clean, mutant);
      row = std::move(clean);
      report.cases[i + 1] = std::move(mutant);
      done += 2;
    }
    if (!after(report, done, total)) return;
  }
}

}  // namespace loopgauge::harness
