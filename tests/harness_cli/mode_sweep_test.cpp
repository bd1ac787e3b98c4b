// SPDX-License-Identifier: Apache-2.0
// Execution modes from case id to verdict: every mode under every setting passes on the reference, and an executor that does not do what
// the mode says, loses work, holds something or returns other bits does not.
#include <functional>

#include "harness/executor_by_name.hpp"
#include "harness/io/digest.hpp"
#include "harness/planner/planner.hpp"
#include "harness/sweep/mode_checks.hpp"
#include "models/error.hpp"
#include "tests/report/sweep_fixture.hpp"

namespace loopgauge::harness {
namespace {

// Another executor whose records may be changed.
class Liar : public Executor {
 public:
  explicit Liar(Executor& inner) : inner_(inner) {}
  std::string name() const override { return inner_.name(); }
  void begin(const Trace& trace, const EffectiveConfig& config, const RunOptions& options) override {
    inner_.begin(trace, config, options);
    overlapped_ = options.submissions_in_flight > 1;
  }
  void submit(const Submission& submission) override { inner_.submit(submission); }
  RunRecord finish() override {
    RunRecord record = inner_.finish();
    if (lie) lie(record, overlapped_);
    return record;
  }

  std::function<void(RunRecord&, bool overlapped)> lie;

 private:
  Executor& inner_;
  bool overlapped_ = false;
};

TraceRequest arriving(TraceRequest request, int arrival) {
  request.arrival = arrival;
  return request;
}

// Two windows of 64 and more in common, arriving while the first is read or decoded.
Trace shared() {
  Trace trace = test::trace_of({test::request(0, 140, 6), arriving(test::request(1, 150, 4), 6), arriving(test::request(2, 90, 3), 8)});
  std::copy_n(trace.requests[0].prompt.begin(), 135, trace.requests[1].prompt.begin());
  std::copy_n(trace.requests[0].prompt.begin(), 70, trace.requests[2].prompt.begin());
  trace.name = "shared";
  return trace;
}

// Rounds that cross the end of a block, most drafts of a random model being wrong.
Trace speculating() {
  Trace trace = test::trace_of({test::request(0, 60, 12), test::request(1, 126, 7)});
  trace.name = "speculating";
  return trace;
}

// Cancelled in the prompt and in decode, an id taken over, one request undisturbed, one preempted.
Trace disturbed() {
  Trace trace = test::trace_of(
      {test::request(0, 150, 3), test::request(1, 20, 9), test::request(2, 70, 24), test::request(1, 30, 3, 77), test::request(4, 66, 4)});
  trace.events = {{2, TraceEventKind::cancel, 0},  {7, TraceEventKind::cancel, 1},  {7, TraceEventKind::reuse_id, 3},
                  {9, TraceEventKind::preempt, 4}, {12, TraceEventKind::resume, 4}, {20, TraceEventKind::cancel, 2}};
  trace.name = "disturbed";
  return trace;
}

// Free running with an end of sequence that the model emits by itself, found out by running it.
Trace ending(SmallSweep& sweep) {
  Trace trace = test::trace_of({test::request(0, 40, 0), test::request(1, 70, 0)});
  trace.name = "ending";
  for (TraceRequest& request : trace.requests) request.max_new_tokens = 9;
  ModelConfig model = sweep.checkpoint.config;
  const EffectiveConfig config = EffectiveConfig::resolve(test::switches("t0s0q0"), model);
  const RunRecord record = replay(*sweep.reference, make_plan({}, trace, config), trace, config, RunOptions{});
  for (std::size_t i = 0; i < trace.requests.size(); ++i) trace.requests[i].eos_token_id = record.requests[i].tokens[3];
  return trace;
}

// Enough to reach every kind of state; the set `modes` has all eight settings under the three policies.
const std::vector<std::string> kSettings{"*/t0s0q0:*", "*/t1s1q0:*", "*/t1s1q1:fixed_prompt:*", "*/t1s1q1:rolling:*",
                                         "*/t1s1q1:streaming:*"};

struct ModeSweep : SmallSweep {
  explicit ModeSweep(std::vector<Trace> traces, const std::vector<std::string>& modes, const std::vector<std::string>& globs = {"*"})
      : SmallSweep(std::vector<Trace>{}) {
    set(std::move(traces), modes, globs);
  }
  void set(std::vector<Trace> traces, const std::vector<std::string>& modes, const std::vector<std::string>& globs = {"*"}) {
    request.traces = std::move(traces);
    request.runner.drift.resamples = 10;
    std::vector<CaseTrace> named;
    for (const Trace& trace : request.traces) named.push_back({trace.name, false, {}, 64});
    std::vector<ModeSpec> specs;
    for (const std::string& mode : modes) specs.push_back(parse_mode(mode));
    std::vector<Case> cases;
    for (const Case& value : enumerate_cases(named, specs)) {
      if (std::any_of(globs.begin(), globs.end(), [&](const std::string& glob) { return glob_match(glob, case_id(value)); }))
        cases.push_back(value);
    }
    request.cases = numbered_cases(cases, request.traces, checkpoint.config);
  }
};

std::int64_t counter(const CaseResult& row, std::string_view name) {
  for (const CounterRow& entry : row.counters) {
    if (entry.name == name) return entry.value;
  }
  ADD_FAILURE() << "no counter " << name;
  return -1;
}

void expect_all_passed(const Report& report) {
  for (const CaseResult& row : report.cases) {
    EXPECT_EQ(row.status, CaseStatus::passed) << row.id << ": " << row.reason;
    for (const std::string_view name : {kModeCheck, kExecutionsCheck, kDrainCheck})
      EXPECT_EQ(status_of(row, name), "passed") << row.id << " " << name;
  }
}

TEST(ModeSweep, EveryModeEqualsSerial) {
  ModeSweep sweep({shared()},
                  {"serial",
                   "split",
                   "split.p23",
                   "wcpb",
                   "wcpb.c2",
                   "mixed",
                   "mixed.b30",
                   "async",
                   "graph",
                   "async+graph",
                   "preempt",
                   "wcpb+preempt",
                   "mixed+preempt.p1+async",
                   "prefix",
                   "prefix.encoded",
                   "prefix.k1",
                   "prefix.encoded.k1",
                   "wcpb+prefix+async",
                   "wcpb+prefix.encoded+async",
                   "mixed+prefix+preempt",
                   "mixed+prefix.encoded+preempt"},
                  kSettings);
  const Report report = sweep.run();
  EXPECT_EQ(report.cases.size(), (13 + 4) * kSettings.size());
  expect_all_passed(report);
  for (const CaseResult& row : report.cases) {
    if (row.mode != "serial") {
      EXPECT_EQ(status_of(row, kEqualsSerialCheck), "passed") << row.id;
    }
    if (row.mode.find("prefix") != std::string::npos) {
      EXPECT_GT(counter(row, "reused_windows"), 0) << row.id;
    }
    if (row.mode.find(".k1") != std::string::npos) {
      EXPECT_GT(counter(row, "evicted_windows"), 0) << row.id;
    }
    if (row.mode.find("preempt") != std::string::npos) {
      EXPECT_GT(counter(row, "preemptions"), 0) << row.id;
    }
    if (row.mode.find("async") != std::string::npos) {
      EXPECT_EQ(counter(row, "most_in_flight"), 2) << row.id;
    }
  }
}

TEST(ModeSweep, CancelledRequestsArePrefixesOfUndisturbedOnes) {
  ModeSweep sweep({disturbed()},
                  {"serial", "split", "wcpb", "mixed", "async", "mixed+async", "preempt", "split+preempt+async", "block_spec.d2.k2",
                   "block_spec.d1.k3+async", "pipeline_spec.d1+preempt"},
                  kSettings);
  const Report report = sweep.run();
  EXPECT_EQ(report.cases.size(), 11 * kSettings.size());
  expect_all_passed(report);
  for (const CaseResult& row : report.cases) {
    EXPECT_EQ(status_of(row, kEqualsUndisturbedCheck), "passed") << row.id;
    EXPECT_EQ(status_of(row, kEqualsSerialCheck), "absent") << row.id;
  }
}

TEST(ModeSweep, SpeculationEqualsSerialWithEveryModifier) {
  const std::vector<std::string> modes{
      "block_spec.d1.k2",        "block_spec.d2.k4+async",         "block_spec.d2.k2+preempt", "block_spec.d1.k8+prefix.encoded",
      "block_spec.d2.k3+prefix", "pipeline_spec.d1+preempt+async", "pipeline_spec.d2+graph",   "pipeline_spec.d3"};
  ModeSweep sweep({shared()}, modes, kSettings);
  const Report report = sweep.run();
  expect_all_passed(report);
  std::set<std::string> seen;
  for (const CaseResult& row : report.cases) {
    seen.insert(row.mode);
    EXPECT_EQ(status_of(row, kEqualsSerialCheck), "passed") << row.id;
    EXPECT_GT(counter(row, "speculation_rounds"), 0) << row.id;
    EXPECT_GT(counter(row, "rejected_rows"), 0) << row.id;
    ASSERT_FALSE(row.acceptance.empty()) << row.id;
    EXPECT_GT(row.acceptance[0].drafted, 0) << row.id;
  }
  EXPECT_EQ(seen.size(), modes.size());
}

TEST(ModeSweep, RowsPastTheEndAreDiscarded) {
  ModeSweep sweep({}, {});
  sweep.set({ending(sweep)}, {"serial", "async", "mixed+async", "split+async", "async+graph"}, {"*/t0s0q0:*", "*/t0s1q1:rolling:*"});
  const Report report = sweep.run();
  EXPECT_EQ(report.cases.size(), 10u);
  expect_all_passed(report);
  std::int64_t discarded = 0;
  for (const CaseResult& row : report.cases) discarded += row.mode == "serial" ? 0 : counter(row, "discarded_rows");
  EXPECT_GT(discarded, 0);
}

TEST(ModeSweep, ExecutionDependentTimingIsMeasuredAndNotJudged) {
  ModeSweep sweep({shared()}, {"serial"});
  sweep.request.cases = numbered_cases({parse_case_id("wcpb/t1s0q1:streaming:execution_dependent:w64/shared"),
                                        parse_case_id("async/t0s0q1:rolling:execution_dependent:w64:tail0/shared")},
                                       sweep.request.traces, sweep.checkpoint.config);
  const Report report = sweep.run();
  for (const CaseResult& row : report.cases) {
    EXPECT_EQ(row.status, CaseStatus::passed) << row.id << ": " << row.reason;
    EXPECT_EQ(status_of(row, kEqualsSerialCheck), "skipped") << row.id;
    EXPECT_NE(find_check(row, kEqualsSerialCheck)->detail.find("of 16 logits rows"), std::string::npos)
        << find_check(row, kEqualsSerialCheck)->detail;
    ASSERT_EQ(row.divergence.size(), 16u) << row.id;  // three rows after the prompts, 13 after tokens
    EXPECT_EQ(row.divergence[1].position, 140);
  }
}

TEST(ModeSweep, ADifferenceUnderExecutionDependentTimingIsReportedWhereItIs) {
  ModeSweep sweep({shared()}, {"serial"});
  sweep.request.cases =
      numbered_cases({parse_case_id("async/t0s0q1:rolling:execution_dependent:w64/shared")}, sweep.request.traces, sweep.checkpoint.config);
  Liar liar(*sweep.reference);
  liar.lie = [](RunRecord& record, bool overlapped) {
    if (overlapped) record.requests[1].logits.row(2)[3] += 0.5f;
  };
  sweep.executors.reference = {&liar};
  const Report report = sweep.run();
  const CaseResult& row = report.cases.front();
  EXPECT_EQ(status_of(row, kEqualsSerialCheck), "skipped");
  const std::string& detail = find_check(row, kEqualsSerialCheck)->detail;
  EXPECT_NE(detail.find("1 of 16 logits rows differ from the serial plan's, first request 1 position 151"), std::string::npos) << detail;
  for (const DivergenceRow& entry : row.divergence) {
    const bool altered = entry.request == 1 && entry.row == 2;
    EXPECT_EQ(entry.max_logit_difference > 0, altered) << entry.request << " " << entry.row;
    EXPECT_EQ(entry.kl > 0, altered) << entry.request << " " << entry.row;
  }
  EXPECT_EQ(status_of(row, "audit"), "failed");  // such logits are not those of the hidden row
}

TEST(ModeSweep, AModeWithNothingToDoDoesNotPass) {
  Trace lone = test::trace_of({test::request(0, 9, 0)});
  lone.name = "lone";
  ModeSweep sweep({lone}, {"prefix", "wcpb", "mixed", "graph", "wcpb+prefix+async"}, {"*/t0s0q0:*"});
  const Report report = sweep.run();
  ASSERT_EQ(report.cases.size(), 5u);
  for (const CaseResult& row : report.cases) {
    EXPECT_EQ(row.status, CaseStatus::not_run) << row.id << ": " << row.reason;
    EXPECT_NE(row.reason.find("has nothing to do"), std::string::npos) << row.id << ": " << row.reason;
  }
}

// As `run --fail` does it, at every submission that runs something, by turns for want of storage and in the middle of the work.
TEST(ModeSweep, AFailureAtAnySubmissionCostsWorkAndNothingElse) {
  SmallSweep sweep;
  Trace trace = test::trace_of({test::request(0, 130, 2), arriving(test::request(1, 70, 2), 4)});
  std::copy_n(trace.requests[0].prompt.begin(), 64, trace.requests[1].prompt.begin());
  const EffectiveConfig config = EffectiveConfig::resolve(test::switches("t1s1q1"), sweep.checkpoint.config);
  RunOptions options;
  options.record = RecordGroups::all();
  const auto run = [&](const Plan& plan) { return replay(*sweep.reference, plan, trace, config, options); };
  const auto expected = digests(run(make_plan({}, trace, config)));
  for (const char* mode : {"wcpb+prefix+async", "mixed.b80+preempt"}) {
    const std::size_t submissions = make_plan(parse_mode(mode), trace, config).submissions.size();
    for (std::size_t i = 0; i < submissions; ++i) {
      if (make_plan(parse_mode(mode), trace, config).submissions[i].items.empty()) continue;
      PlanOptions failing;
      failing.failure = PlanFailure{static_cast<int>(i), i % 2 == 0 ? PlannedFailure::allocation : PlannedFailure::launch};
      const RunRecord record = run(make_plan(parse_mode(mode), trace, config, failing));
      EXPECT_EQ(digests(record), expected) << mode << ", submission " << i;
      EXPECT_EQ(record.counters.failures, 1) << mode << ", submission " << i;
      EXPECT_EQ(describe(record.held_at_drain), "") << mode << ", submission " << i;
    }
  }
}

// One case, one lie, one check that must fail.
void expect_caught(const std::string& mode, const Trace& trace, std::string_view check, const std::string& what,
                   const std::function<void(RunRecord&)>& lie, const std::string& settings = "t1s1q1:rolling:*") {
  SCOPED_TRACE(mode + ", " + what);
  ModeSweep sweep({trace}, {mode}, {"*/" + settings});
  Liar liar(*sweep.reference);
  const bool overlapped_only = parse_mode(mode).async;
  liar.lie = [&](RunRecord& record, bool overlapped) {
    if (!overlapped_only || overlapped) lie(record);
  };
  sweep.executors.reference = {&liar};
  const Report report = sweep.run();
  ASSERT_EQ(report.cases.size(), 1u);
  const CaseResult& row = report.cases.front();
  EXPECT_EQ(row.status, CaseStatus::failed) << row.reason;
  ASSERT_NE(find_check(row, check), nullptr);
  EXPECT_EQ(find_check(row, check)->status, "failed") << find_check(row, check)->detail;
  EXPECT_NE(find_check(row, check)->detail.find(what), std::string::npos) << find_check(row, check)->detail;
}

TEST(ModeSweep, CountersThatContradictTheModeAreCaught) {
  const Trace trace = shared();
  expect_caught("async", trace, kModeCheck, "1 submission in flight", [](RunRecord& r) { r.counters.most_in_flight = 1; });
  expect_caught("wcpb+prefix+async", trace, kModeCheck, "3 values read back", [](RunRecord& r) { r.counters.host_reads = 3; });
  expect_caught("split", trace, kModeCheck, "2 submissions in flight", [](RunRecord& r) { r.counters.most_in_flight = 2; });
  expect_caught("prefix", trace, kModeCheck, "windows reused", [](RunRecord& r) { --r.counters.reused_windows; });
  expect_caught("prefix.k1", trace, kModeCheck, "evicted", [](RunRecord& r) { r.counters.evicted_windows = 0; });
  expect_caught("mixed+prefix+preempt", trace, kModeCheck, "0 of", [](RunRecord& r) { r.counters.preemptions = 0; });
  expect_caught("graph", trace, kModeCheck, "0 steps replayed", [](RunRecord& r) { r.executor = "optimized"; });
  expect_caught("serial", trace, kModeCheck, "submissions", [](RunRecord& r) { --r.counters.submissions; });
}

TEST(ModeSweep, RoundsThatContradictThePlanAreCaught) {
  const Trace trace = speculating();
  const auto expect_round = [&](const std::string& mode, const std::string& what, const std::function<void(RunRecord&)>& lie) {
    expect_caught(mode, trace, kModeCheck, what, [&lie](RunRecord& record) {
      if (!record.requests[0].rounds.empty()) lie(record);  // not of the serial run beside it
    });
  };
  expect_round("block_spec.d2.k4", "proposed 9 candidates of at most 4", [](RunRecord& r) { r.requests[0].rounds[0].proposed = 9; });
  expect_round("block_spec.d2.k4", "accepted 5 of 4 candidates", [](RunRecord& r) { r.requests[0].rounds[0].accepted = 5; });
  expect_round("block_spec.d2.k4", "begins at position 61, expected 60", [](RunRecord& r) { ++r.requests[0].rounds[0].position; });
  expect_round("block_spec.d2.k4", "emitted 7 tokens", [](RunRecord& r) { r.requests[0].rounds[0].emitted = 7; });
  expect_round("block_spec.d2.k4", "its rounds emitted", [](RunRecord& r) { r.requests[1].rounds.pop_back(); });
  expect_round("pipeline_spec.d1", "rounds counted", [](RunRecord& r) { ++r.counters.speculation_rounds; });
  expect_round("pipeline_spec.d1", "not 4 loops of", [](RunRecord& r) { ++r.counters.draft_rows; });
  expect_caught("pipeline_spec.d1", trace, kExecutionsCheck, "the counters say", [](RunRecord& r) {
    if (!r.requests[0].rounds.empty()) ++r.counters.rejected_rows;
  });
}

TEST(ModeSweep, LostRepeatedAndLeakedWorkIsCaught) {
  const Trace trace = shared();
  expect_caught("wcpb", trace, kExecutionsCheck, "executed 2 times", [](RunRecord& r) { ++r.requests[0].executions[4]; });
  expect_caught("wcpb", trace, kExecutionsCheck, "executed 0 times", [](RunRecord& r) { r.requests[2].executions.back() = 0; });
  expect_caught("prefix", trace, kExecutionsCheck, "executed 1 times", [](RunRecord& r) { r.requests[1].executions[0] = 1; });
  expect_caught("async", trace, kExecutionsCheck, "the counters say", [](RunRecord& r) { ++r.counters.executed_rows; });
  expect_caught("serial", trace, kExecutionsCheck, "counts of executions", [](RunRecord& r) { r.requests[0].executions.clear(); });
  expect_caught("mixed", trace, kDrainCheck, "2 pages", [](RunRecord& r) { r.held_at_drain.pages = 2; });
  expect_caught("preempt", trace, kDrainCheck, "1 snapshot", [](RunRecord& r) { r.held_at_drain.snapshots = 1; });
  expect_caught("async", trace, kDrainCheck, "1 unread submission", [](RunRecord& r) { r.held_at_drain.tickets = 1; });
}

TEST(ModeSweep, CancelledRequestsThatKeepTooMuchTooLittleOrOtherBitsAreCaught) {
  const Trace trace = disturbed();
  expect_caught("async", trace, kEqualsUndisturbedCheck, "requests/2/logits", [](RunRecord& r) { r.requests[2].logits.data[5] += 1.0f; });
  expect_caught("async", trace, kEqualsUndisturbedCheck, "request 2: it kept 0 logits rows", [](RunRecord& r) {
    r.requests[2].encoded_frontier.clear();
    r.requests[2].fed = 0;
  });
  expect_caught("async", trace, kEqualsUndisturbedCheck, "request 2: it is not cancelled",
                [](RunRecord& r) { r.requests[2].outcome = RequestOutcome::completed; });
  expect_caught("async", trace, kEqualsUndisturbedCheck, "request 3: it is cancelled, which the plan does not ask for",
                [](RunRecord& r) { r.requests[3].outcome = RequestOutcome::cancelled; });
  expect_caught("async", trace, kEqualsUndisturbedCheck, "requests/4/hidden",
                [](RunRecord& r) { r.requests[4].hidden[2].data[0] += 1.0f; });
}

// ---- mutants ----------------------------------------------------------------------------------------------------------------

std::vector<FaultInfo> faults_of_modes() {
  std::vector<FaultInfo> faults;
  for (const FaultInfo& info : planted_faults()) {
    if (info.in_reference && !info.mode.empty()) faults.push_back(info);
  }
  return faults;
}

class ModeMutant : public ::testing::TestWithParam<FaultInfo> {};

TEST_P(ModeMutant, IsFoundInItsModeAndPlannedInNoOther) {
  const bool speculation = GetParam().mode == "speculation" || GetParam().mode == "block_spec";
  ModeSweep sweep(
      {speculation ? speculating() : shared()},
      {"serial", "prefix", "prefix.encoded", "mixed.b80+prefix+preempt", "mixed", "split+preempt", "wcpb+pd", "block_spec.d2.k4",
       "pipeline_spec.d1"},
      {"*/t1s1q0:*", "*/t1s1q1:streaming:*"});
  sweep.request.mutant = GetParam().fault;
  const Report report = sweep.run();
  ASSERT_FALSE(report.cases.empty());
  int detected = 0;
  for (std::size_t i = 0; i < report.cases.size(); i += 2) {
    const CaseResult &clean = report.cases[i], &mutant = report.cases[i + 1];
    EXPECT_TRUE(has_part(parse_mode(clean.mode), GetParam().mode)) << clean.id;
    EXPECT_EQ(clean.status, CaseStatus::passed) << clean.id << ": " << clean.reason;
    detected += mutant.status == CaseStatus::failed ? 1 : 0;
  }
  EXPECT_GT(detected, 0);
}

// A candidate whose bits are not promised, as the CUDA runtime: the comparison with the reference has to find what happened in a handoff, in every
// setting in which it can. A second reference stands for it.
class HandoffMutant : public ::testing::TestWithParam<FaultInfo> {};

TEST_P(HandoffMutant, OfACandidateIsFoundByTheComparisonWithTheReference) {
  Trace trace = test::trace_of({test::request(0, 210, 4), test::request(1, 90, 3)});  // two encoded blocks and a tail under `rolling`
  trace.name = "handed";
  ModeSweep sweep({trace}, {"pd"}, {"*/t0s0q0:*", "*/t1s0q0:*", "*/t1s1q0:*", "*/t0s1q1:fixed_prompt:*", "*/t1s1q1:rolling:*", "*/t1s0q1:streaming:*"});
  const std::unique_ptr<Executor> candidate = make_executor("reference", sweep.checkpoint);
  sweep.executors.optimized = {candidate.get()};
  sweep.request.executors = ExecutorChoice::optimized;
  sweep.request.mutant = GetParam().fault;
  const Report report = sweep.run();
  ASSERT_GE(report.cases.size(), 6u);
  EXPECT_EQ(exit_code_of(verdict(report)), 1);
  for (std::size_t i = 0; i < report.cases.size(); i += 2) {
    const CaseResult &clean = report.cases[i], &mutant = report.cases[i + 1];
    EXPECT_EQ(clean.executor, "optimized");
    EXPECT_EQ(clean.status, CaseStatus::passed) << clean.id << ": " << clean.reason;
    // `fixed_prompt` encodes all of the prompt: there are no other rows to be forgotten.
    const bool acts = GetParam().fault != Fault::handoff_without_rows || clean.policy != "fixed_prompt";
    EXPECT_EQ(status_of(mutant, kEqualsCleanCheck), acts ? "skipped" : "not_run") << mutant.id << ": the fault acts, and that is no verdict";
    EXPECT_EQ(mutant.status, acts ? CaseStatus::failed : CaseStatus::not_run) << mutant.id << ": " << mutant.reason;
  }
}

std::vector<FaultInfo> faults_of_handoffs() {
  std::vector<FaultInfo> faults;
  for (const FaultInfo& info : planted_faults()) {
    if (info.mode == "pd" && info.in_optimized) faults.push_back(info);
  }
  return faults;
}

INSTANTIATE_TEST_SUITE_P(All, HandoffMutant, ::testing::ValuesIn(faults_of_handoffs()), [](const auto& fault) { return std::string(fault.param.name); });

INSTANTIATE_TEST_SUITE_P(All, ModeMutant, ::testing::ValuesIn(faults_of_modes()),
                         [](const auto& fault) { return std::string(fault.param.name); });

}  // namespace
}  // namespace loopgauge::harness
