// SPDX-License-Identifier: Apache-2.0
// The sweep: which rows a request has, and the loop that fills them. No files and no terminal here, so that it runs under test.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "harness/case.hpp"
#include "harness/report/report.hpp"
#include "harness/sweep/case_runner.hpp"
#include "models/checkpoint.hpp"
#include "models/executor.hpp"
#include "models/fault.hpp"
#include "models/trace.hpp"

namespace loopgauge::harness {

enum class ExecutorChoice { reference, optimized, both };
std::string_view to_string(ExecutorChoice choice);
ExecutorChoice parse_executor_choice(std::string_view text);  // throws ConfigError

struct SweepCase {
  std::int64_t ordinal = 0;  // index in the unsharded request
  Case value;
};

struct SweepRequest {
  std::string set;  // name of the set, or "traces"
  std::vector<Trace> traces;
  std::vector<SweepCase> cases;  // the whole request, in the order of enumerate_cases
  ExecutorChoice executors = ExecutorChoice::both;
  Fault mutant = Fault::none;
  CaseRunnerOptions runner;
};

// `cases` with their ordinals. Throws, before anything runs: TraceError for a trace that does not fit the model, ConfigError for a
// configuration that the model cannot have or an illegal case, UnsupportedError for a mode without a planner.
std::vector<SweepCase> numbered_cases(const std::vector<Case>& cases, const std::vector<Trace>& traces, const ModelConfig& model);
// Those of `request` that are in `shard`, with the ordinals of the request.
std::vector<SweepCase> shard_cases(const std::vector<SweepCase>& request, const std::vector<Case>& shard);

// Identity of the whole request: what runs, on what tokens.
std::string request_sha256(const SweepRequest& request, const ModelConfig& model);

// Which executors can run. Every executor is a lane: it works on one case at a time, all lanes at once. Lanes of the reference share out
// the processor's threads, lanes of the optimized runtime the device; without an optimized one `device` says why. An optimized column needs
// the reference even where no reference column is requested: it is compared with it.
struct SweepExecutors {
  std::vector<Executor*> reference;
  std::vector<Executor*> optimized;
  std::string device;
};

// One row per case and column, none of them reached yet; the optimized column without a device is final: not_run with the reason.
// With a mutant the columns are one executor, the optimized one if it is all that is requested and else the reference, clean and with the
// fault, and cases with the switches and the mode that the fault needs are the only ones.
std::vector<CaseResult> planned_rows(const SweepRequest& request, const std::vector<SweepCase>& cases, const SweepExecutors& executors,
                                     const ModelConfig& model);

// Called before and after every case, from one thread at a time; `done` and `total` count rows. Between the two calls of one case there may
// be calls for others. Returning false from AfterCase ends the sweep early.
using BeforeCase = std::function<void(const CaseResult& row, std::int64_t done, std::int64_t total)>;
using AfterCase = std::function<bool(const Report& report, std::int64_t done, std::int64_t total)>;

// Runs every row of `report` that was not reached yet. Rows and their content do not depend on the number of lanes, times aside. Throws
// Interrupted and what the callbacks throw; the report then holds what was finished.
void run_sweep(const SweepRequest& request, const SweepExecutors& executors, const Checkpoint& checkpoint, Report& report,
               const BeforeCase& before, const AfterCase& after);

}  // namespace loopgauge::harness
