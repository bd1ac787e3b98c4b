// SPDX-License-Identifier: Apache-2.0
// The sweep engine on a small model: what it checks, what it shares between cases, and what it makes of executors that misbehave.
#include <algorithm>
#include <functional>
#include <set>

#include "harness/gate/baseline.hpp"
#include "harness/planner/planner.hpp"
#include "harness/report/report_merge.hpp"
#include "models/error.hpp"
#include "harness/sweep/mode_checks.hpp"
#include "tests/report/sweep_fixture.hpp"

namespace loopgauge::harness {
namespace {

// Stands before another executor, counts its runs and, when told to, misbehaves.
class Meddler : public Executor {
 public:
  explicit Meddler(Executor& inner) : inner_(inner) {}
  std::string name() const override { return inner_.name(); }
  void begin(const Trace& trace, const EffectiveConfig& config, const RunOptions& options) override {
    tapped_ = options.tap != nullptr;
    ++runs;
    if (on_begin) on_begin();
    inner_.begin(trace, config, options);
    submissions_ = 0;
  }
  void submit(const Submission& submission) override {
    ++submissions_;
    inner_.submit(submission);
  }
  RunRecord finish() override {
    RunRecord record = inner_.finish();
    if (on_record) on_record(record, submissions_, tapped_);
    return record;
  }

  int runs = 0;
  std::function<void()> on_begin;
  std::function<void(RunRecord&, int submissions, bool tapped)> on_record;

 private:
  Executor& inner_;
  int submissions_ = 0;
  bool tapped_ = false;
};

const CaseResult& row_of(const Report& report, const std::string& id, const std::string& executor = "reference") {
  for (const CaseResult& row : report.cases) {
    if (row.id == id && row.executor == executor) return row;
  }
  throw std::runtime_error("no row " + id);
}

const CheckRow& check_of(const CaseResult& row, std::string_view name) {
  for (const CheckRow& check : row.checks) {
    if (check.name == name) return check;
  }
  throw std::runtime_error("no check " + std::string(name));
}

TEST(Sweep, AllSettingsOfTheReferencePassEveryCheck) {
  SmallSweep sweep;
  sweep.request.runner.repeat_with_taps = true;
  const Report report = sweep.run();
  ASSERT_EQ(report.cases.size(), 64u) << "16 settings, 2 modes, 2 traces";
  for (const CaseResult& row : report.cases) {
    EXPECT_EQ(row.status, CaseStatus::passed) << row.id << ": " << row.reason;
    EXPECT_EQ(check_of(row, kAuditCheck).status, "passed") << row.id;
    EXPECT_EQ(check_of(row, kRepeatWithTapsCheck).status, row.mode == "split" ? "passed" : "skipped") << row.id;
    if (row.mode == "split") {
      EXPECT_EQ(check_of(row, kEqualsSerialCheck).status, "passed") << row.id;
    }
    EXPECT_FALSE(row.drift.empty()) << row.id;
    EXPECT_FALSE(row.memory.empty()) << row.id;
    EXPECT_EQ(digest_of(row, "all").size(), 64u) << row.id;
  }
  EXPECT_EQ(verdict(report), CaseStatus::passed);
}

TEST(Sweep, DenseHasNoDriftAndOtherSettingsHave) {
  SmallSweep sweep(small_traces(), {"serial/t0s0q0/several", "serial/t1s1q0/several"});
  const Report report = sweep.run();
  const CaseResult& dense = row_of(report, "serial/t0s0q0/several");
  EXPECT_EQ(dense.kl_max, 0.0);
  EXPECT_EQ(dense.same_top1, 1.0);
  EXPECT_EQ(dense.memory_ratio, 1.0);
  const CaseResult& sparse = row_of(report, "serial/t1s1q0/several");
  EXPECT_GT(sparse.kl_mean, 0.0);
  EXPECT_GT(sparse.first_token_kl, 0.0);
  // Row 0 is the first generated token of each request: read from the last prompt position.
  ASSERT_FALSE(sparse.drift.empty());
  EXPECT_EQ(sparse.drift.front().row, 0);
  EXPECT_EQ(sparse.drift.front().position, 129);
  EXPECT_EQ(std::count_if(sparse.drift.begin(), sparse.drift.end(), [](const DriftRow& row) { return row.row == 0; }), 2);
  for (const DriftSummaryRow& row : sparse.drift_summary) {
    if (row.metric == "kl_mean" && row.scope == "continuation") {
      EXPECT_EQ(row.samples, 75);
    }
  }
}

TEST(Sweep, RunsNothingTwice) {
  SmallSweep sweep(small_traces(), {"*/single"});
  Meddler counter(*sweep.reference);
  sweep.executors.reference = {&counter};
  Report report = sweep.run();
  EXPECT_EQ(counter.runs, static_cast<int>(report.cases.size()));
  counter.runs = 0;
  sweep.request.runner.repeat_with_taps = true;
  report = sweep.run();
  EXPECT_EQ(counter.runs, static_cast<int>(report.cases.size())) << "plans that must agree are repetitions of each other";
}

TEST(Sweep, SeveralLanesGiveTheSameRowsAndRunNothingTwice) {
  SmallSweep sweep;
  Report report = sweep.run();
  const std::vector<CaseResult> expected = report.cases;
  std::vector<std::unique_ptr<Executor>> executors;
  std::vector<std::unique_ptr<Meddler>> lanes;
  sweep.executors.reference.clear();
  for (int i = 0; i < 4; ++i) {
    executors.push_back(reference::make_reference_executor(sweep.checkpoint));
    lanes.push_back(std::make_unique<Meddler>(*executors.back()));
    sweep.executors.reference.push_back(lanes.back().get());
  }
  report = sweep.run();
  ASSERT_EQ(report.cases.size(), expected.size());
  for (std::size_t n = 0; n < expected.size(); ++n) EXPECT_EQ(row_text(report.cases[n]), row_text(expected[n]));
  int runs = 0;
  for (const auto& lane : lanes) runs += lane->runs;
  EXPECT_EQ(runs, static_cast<int>(expected.size()));
}

TEST(Sweep, SeveralLanesOfTheOptimizedColumnGiveTheSameRows) {
  SmallSweep sweep(small_traces(), {"*/t1s0q0/*", "*/t0s0q0/*", "*/t0s1q0/*"});
  sweep.request.executors = ExecutorChoice::both;
  std::vector<std::unique_ptr<Executor>> candidates;
  std::vector<std::string> rows;
  for (int lanes : {1, 3}) {
    while (std::ssize(candidates) < lanes) candidates.push_back(reference::make_reference_executor(sweep.checkpoint));
    sweep.executors.optimized.clear();
    for (const auto& candidate : candidates) sweep.executors.optimized.push_back(candidate.get());
    const Report report = sweep.run();
    ASSERT_EQ(report.cases.size(), 24u) << "3 settings, 2 modes, 2 traces, 2 columns";
    std::vector<std::string> texts;
    for (const CaseResult& row : report.cases) {
      EXPECT_EQ(row.status, CaseStatus::passed) << row.id << " " << row.executor << ": " << row.reason;
      texts.push_back(row_text(row));
    }
    if (lanes == 1) rows = texts;
    EXPECT_EQ(texts, rows);
  }
}

TEST(Sweep, LaneThatThrowsEndsTheSweepWithItsException) {
  SmallSweep sweep(small_traces(), {"*/single"});
  Report report;
  report.cases = planned_rows(sweep.request, sweep.request.cases, sweep.executors, sweep.checkpoint.config);
  const std::unique_ptr<Executor> second = reference::make_reference_executor(sweep.checkpoint);
  sweep.executors.reference.push_back(second.get());
  const auto before = [](const CaseResult&, std::int64_t, std::int64_t) {};
  const auto after = [](const Report&, std::int64_t, std::int64_t) -> bool { throw FileError("disk full"); };
  EXPECT_THROW(run_sweep(sweep.request, sweep.executors, sweep.checkpoint, report, before, after), FileError);
  EXPECT_LE(count_statuses(report).passed, 2);
}

TEST(Sweep, SplitAloneRunsSerialAndDenseOnce) {
  SmallSweep sweep(small_traces(), {"split/t1s0q0/single"});
  Meddler counter(*sweep.reference);
  sweep.executors.reference = {&counter};
  EXPECT_EQ(sweep.run().cases.at(0).status, CaseStatus::passed);
  EXPECT_EQ(counter.runs, 3);
}

TEST(Sweep, ShardsMergeIntoTheWhole) {
  SmallSweep sweep(small_traces(), {"*t?s0q0/*", "*streaming*"});
  const Report whole = sweep.run();
  std::vector<NamedReport> shards;
  for (int i = 1; i <= 3; ++i) {
    std::vector<SweepCase> mine;
    for (const SweepCase& entry : sweep.request.cases) {
      if (in_shard(settings_text(entry.value.config) + "/" + entry.value.trace, {i, 3})) mine.push_back(entry);
    }
    Report report = sweep.run(mine);
    report.meta.shard = std::to_string(i) + "/3";
    shards.push_back({report.meta.shard, std::move(report)});
  }
  std::swap(shards[0], shards[2]);
  const Report merged = merge_reports(shards);
  ASSERT_EQ(merged.cases.size(), whole.cases.size());
  for (std::size_t n = 0; n < whole.cases.size(); ++n) EXPECT_EQ(row_text(merged.cases[n]), row_text(whole.cases[n]));
  EXPECT_EQ(verdict(merged), CaseStatus::passed);
}

TEST(Sweep, ContinuesWithUnreachedRowsOnly) {
  SmallSweep sweep(small_traces(), {"*/t1s0q0/*", "*/t0s0q0/*"});
  const Report whole = sweep.run();
  ASSERT_EQ(verdict(whole), CaseStatus::passed);
  for (std::size_t kept = 0; kept <= whole.cases.size(); ++kept) {
    Report report = whole;
    const std::vector<CaseResult> planned = planned_rows(sweep.request, sweep.request.cases, sweep.executors, sweep.checkpoint.config);
    std::copy(planned.begin() + static_cast<std::ptrdiff_t>(kept), planned.end(), report.cases.begin() + static_cast<std::ptrdiff_t>(kept));
    sweep.resume(report);
    for (std::size_t n = 0; n < whole.cases.size(); ++n) EXPECT_EQ(row_text(report.cases[n]), row_text(whole.cases[n])) << "kept " << kept;
  }
}

TEST(Sweep, OptimizedColumnWithoutDeviceIsNotRunAndNeverPassed) {
  SmallSweep sweep(small_traces(), {"serial/t0s0q0/single"});
  sweep.request.executors = ExecutorChoice::both;
  const Report report = sweep.run();
  ASSERT_EQ(report.cases.size(), 2u);
  EXPECT_EQ(report.cases[1].executor, "optimized");
  EXPECT_EQ(report.cases[1].status, CaseStatus::not_run);
  EXPECT_EQ(report.cases[1].reason, "no CUDA device");
  EXPECT_EQ(verdict(report), CaseStatus::passed);
}

TEST(Sweep, PlanThatChangesBitsFailsWithTheFirstDivergence) {
  SmallSweep sweep(small_traces(), {"*/t1s0q0/single"});
  Meddler meddler(*sweep.reference);
  const int serial_submissions = 5;  // one window and four decode tokens; more of them: split
  meddler.on_record = [&](RunRecord& record, int submissions, bool) {
    if (submissions > serial_submissions) record.requests[0].hidden[2].data[48 * 4 + 7] += 1.0f;
  };
  sweep.executors.reference = {&meddler};
  const Report report = sweep.run();
  EXPECT_EQ(row_of(report, "serial/t1s0q0/single").status, CaseStatus::passed);
  const CaseResult& split = row_of(report, "split/t1s0q0/single");
  EXPECT_EQ(split.status, CaseStatus::failed);
  const std::string detail = check_of(split, kEqualsSerialCheck).detail;
  EXPECT_NE(detail.find("loop 3 position 4 element 7"), std::string::npos) << detail;
  EXPECT_EQ(exit_code_of(verdict(report)), 1);
}

TEST(Sweep, TapThatChangesTheResultIsNamed) {
  SmallSweep sweep(small_traces(), {"serial/t0s0q0/single"});
  sweep.request.runner.repeat_with_taps = true;
  Meddler meddler(*sweep.reference);
  meddler.on_record = [](RunRecord& record, int, bool tapped) {
    if (tapped) record.requests[0].logits.data[3] += 1.0f;
  };
  sweep.executors.reference = {&meddler};
  const CaseResult row = sweep.run().cases.at(0);
  EXPECT_EQ(row.status, CaseStatus::failed);
  EXPECT_NE(row.reason.find("attaching taps changes the result: first divergence"), std::string::npos) << row.reason;
}

TEST(Sweep, TapThatChangesAnotherPlansResultIsToldFromThePlan) {
  SmallSweep sweep(small_traces(), {"*/t0s0q0/single"});
  sweep.request.runner.repeat_with_taps = true;
  Meddler meddler(*sweep.reference);
  meddler.on_record = [](RunRecord& record, int, bool tapped) {
    if (tapped) record.requests[0].logits.data[3] += 1.0f;
  };
  sweep.executors.reference = {&meddler};
  const Report report = sweep.run();
  EXPECT_EQ(row_of(report, "serial/t0s0q0/single").status, CaseStatus::passed);
  const CaseResult& split = row_of(report, "split/t0s0q0/single");
  EXPECT_EQ(check_of(split, kRepeatWithTapsCheck).status, "failed");
  EXPECT_EQ(check_of(split, kEqualsSerialCheck).status, "passed");

  // The other way round: the plan changes bits, taps do not.
  meddler.on_record = [](RunRecord& record, int submissions, bool) {
    if (submissions > 5) record.requests[0].logits.data[3] += 1.0f;
  };
  const Report other = sweep.run();
  const CaseResult& changed = row_of(other, "split/t0s0q0/single");
  EXPECT_EQ(check_of(changed, kRepeatWithTapsCheck).status, "passed");
  EXPECT_EQ(check_of(changed, kEqualsSerialCheck).status, "failed");
}

TEST(Sweep, RunThatDoesNotRepeatIsNamed) {
  SmallSweep sweep(small_traces(), {"serial/t0s0q0/single"});
  sweep.request.runner.repeat_with_taps = true;
  Meddler meddler(*sweep.reference);
  meddler.on_record = [&](RunRecord& record, int, bool) { record.requests[0].logits.data[3] += static_cast<float>(meddler.runs); };
  sweep.executors.reference = {&meddler};
  const CaseResult row = sweep.run().cases.at(0);
  EXPECT_EQ(row.status, CaseStatus::failed);
  EXPECT_NE(row.reason.find("two runs of the case differ"), std::string::npos) << row.reason;
}

TEST(Sweep, RecordThatBreaksTheSpecificationFailsTheAudit) {
  SmallSweep sweep(small_traces(), {"serial/t1s0q0/several"});
  Meddler meddler(*sweep.reference);
  meddler.on_record = [](RunRecord& record, int, bool) { record.requests[0].active[1].pop_back(); };
  sweep.executors.reference = {&meddler};
  const CaseResult row = sweep.run().cases.at(0);
  EXPECT_EQ(row.status, CaseStatus::failed);
  EXPECT_EQ(check_of(row, kAuditCheck).status, "failed");
}

TEST(Sweep, ExceptionsBecomeTheStatusOfTheirRowAndTheSweepGoesOn) {
  const auto status_of = [](const std::function<void()>& thrower, std::string* reason) {
    SmallSweep sweep(small_traces(), {"serial/t0s0q0/*"});
    Meddler meddler(*sweep.reference);
    meddler.on_begin = [&] {
      if (meddler.runs == 1) thrower();
    };
    sweep.executors.reference = {&meddler};
    const Report report = sweep.run();
    EXPECT_EQ(report.cases.at(1).status, CaseStatus::passed);
    *reason = report.cases.at(0).reason;
    return report.cases.at(0).status;
  };
  std::string reason;
  EXPECT_EQ(status_of([] { throw NumericError("score of request 0 is not finite"); }, &reason), CaseStatus::failed);
  EXPECT_EQ(reason, "score of request 0 is not finite");
  EXPECT_EQ(status_of([] { throw UnsupportedError("head_dim 32"); }, &reason), CaseStatus::not_run);
  EXPECT_EQ(status_of([] { throw InternalError("broken"); }, &reason), CaseStatus::error);
  EXPECT_EQ(status_of([] { throw std::bad_alloc(); }, &reason), CaseStatus::error);
  EXPECT_EQ(reason, "out of memory");
}

TEST(Sweep, TraceOutsideTheModelIsRefusedBeforeAnythingRuns) {
  std::vector<Trace> traces = small_traces();
  traces[0].requests[0].prompt[2] = 1000;
  EXPECT_THROW(SmallSweep(std::move(traces)), TraceError);
}

TEST(Sweep, IdentityOfARequestCoversCasesTracesAndOptions) {
  SmallSweep sweep;
  std::set<std::string> identities;
  const auto add = [&](const SweepRequest& request) { return identities.insert(request_sha256(request, sweep.checkpoint.config)).second; };
  EXPECT_TRUE(add(sweep.request));
  EXPECT_FALSE(add(sweep.request));
  SweepRequest other = sweep.request;
  other.traces[1].requests[0].forced[3] ^= 1;
  EXPECT_TRUE(add(other));
  other = sweep.request;
  other.cases.pop_back();
  EXPECT_TRUE(add(other));
  other = sweep.request;
  other.mutant = Fault::early_flush;
  EXPECT_TRUE(add(other));
  other = sweep.request;
  other.executors = ExecutorChoice::both;
  EXPECT_TRUE(add(other));
}

class Mutant : public ::testing::TestWithParam<FaultInfo> {};

TEST_P(Mutant, IsReportedFailedAndNamedWhileTheCleanRunPasses) {
  SmallSweep sweep(small_traces(), {"serial/t1s1q1*/several", "serial/t0s0q0/several"});
  sweep.request.mutant = GetParam().fault;
  const Report report = sweep.run();
  ASSERT_FALSE(report.cases.empty());
  int detected = 0;
  for (const CaseResult& row : report.cases) {
    if (row.executor == "reference") {
      EXPECT_EQ(row.status, CaseStatus::passed) << row.id << ": " << row.reason;
      continue;
    }
    EXPECT_EQ(row.executor, "mutant:" + std::string(GetParam().name));
    if (row.status != CaseStatus::failed) continue;
    ++detected;
    const bool named = row.reason.find("first divergence: ") != std::string::npos || row.reason.find("audit: ") != std::string::npos;
    EXPECT_TRUE(named) << row.reason;
  }
  EXPECT_GT(detected, 0);
  EXPECT_EQ(exit_code_of(verdict(report)), 1);
}

// Those that act in serial runs of the reference.
std::vector<FaultInfo> serial_faults_of_the_reference() {
  std::vector<FaultInfo> faults;
  for (const FaultInfo& info : planted_faults()) {
    if (info.in_reference && info.mode.empty()) faults.push_back(info);
  }
  return faults;
}

INSTANTIATE_TEST_SUITE_P(All, Mutant, ::testing::ValuesIn(serial_faults_of_the_reference()),
                         [](const auto& fault) { return std::string(fault.param.name); });

std::vector<FaultInfo> serial_faults_of_both() {
  std::vector<FaultInfo> faults = serial_faults_of_the_reference();
  std::erase_if(faults, [](const FaultInfo& info) { return !info.in_optimized; });
  return faults;
}

// A candidate whose bits are not promised: what finds the fault is the comparison with the reference, level by level. A second reference
// stands for the optimized runtime.
class MutantOfACandidate : public ::testing::TestWithParam<FaultInfo> {};

TEST_P(MutantOfACandidate, IsFoundByTheComparisonWithTheReference) {
  SmallSweep sweep(small_traces(), {"serial/t1s1q1:rolling*/several"});
  const std::unique_ptr<Executor> candidate = reference::make_reference_executor(sweep.checkpoint);
  sweep.executors.optimized = {candidate.get()};
  sweep.request.executors = ExecutorChoice::optimized;
  sweep.request.mutant = GetParam().fault;
  const Report report = sweep.run();
  ASSERT_EQ(report.cases.size(), 2u);
  EXPECT_EQ(report.cases[0].executor, "optimized");
  EXPECT_EQ(report.cases[0].status, CaseStatus::passed) << report.cases[0].reason;
  EXPECT_EQ(check_of(report.cases[0], "decision_forced").status, "passed");
  const CaseResult& mutant = report.cases[1];
  EXPECT_EQ(mutant.executor, "mutant:" + std::string(GetParam().name));
  EXPECT_EQ(check_of(mutant, kEqualsCleanCheck).status, "skipped") << "the fault acts, and that is no verdict";
  EXPECT_EQ(mutant.status, CaseStatus::failed) << mutant.reason;
  EXPECT_EQ(exit_code_of(verdict(report)), 1);
}

// An executor that has a fault of its own: what fails then says nothing about the planted one.
TEST(Sweep, MutantIsNotJudgedWhereTheCleanRunFails) {
  SmallSweep sweep(small_traces(), {"serial/t1s0q0/several"});
  Meddler meddler(*sweep.reference);
  meddler.on_record = [](RunRecord& record, int, bool) { record.requests[0].active[1].pop_back(); };
  sweep.executors.reference = {&meddler};
  sweep.request.mutant = Fault::swapped_norms;
  const Report report = sweep.run();
  ASSERT_EQ(report.cases.size(), 2u);
  EXPECT_EQ(report.cases[0].status, CaseStatus::failed) << report.cases[0].reason;
  EXPECT_EQ(report.cases[1].status, CaseStatus::error);
  EXPECT_NE(report.cases[1].reason.find("fails without the planted fault too"), std::string::npos) << report.cases[1].reason;
  EXPECT_EQ(exit_code_of(verdict(report)), 6);
}

INSTANTIATE_TEST_SUITE_P(All, MutantOfACandidate, ::testing::ValuesIn(serial_faults_of_both()),
                         [](const auto& fault) { return std::string(fault.param.name); });

// Times with a spread: repeated when nothing else runs, without recording, of the optimized column alone.
TEST(Sweep, TimesAreMeasuredByRepetitionAfterEverythingIsJudged) {
  class Counting : public Executor {
   public:
    Counting(Executor& inner, std::vector<std::string>& log, std::string word) : inner_(inner), log_(log), word_(std::move(word)) {}
    std::string name() const override { return inner_.name(); }
    void begin(const Trace& trace, const EffectiveConfig& config, const RunOptions& options) override {
      const bool bare = options.tap == nullptr && !options.record.logits && !options.record.hidden && !options.record.kv;
      log_.push_back(word_ + (bare ? " bare" : " recorded"));
      inner_.begin(trace, config, options);
    }
    void submit(const Submission& submission) override { inner_.submit(submission); }
    RunRecord finish() override { return inner_.finish(); }

   private:
    Executor& inner_;
    std::vector<std::string>& log_;
    std::string word_;
  };
  SmallSweep sweep(small_traces(), {"*/t0s0q0/single"});
  sweep.request.executors = ExecutorChoice::both;
  sweep.request.runner.time_runs = 3;
  const std::unique_ptr<Executor> candidate = reference::make_reference_executor(sweep.checkpoint);
  std::vector<std::string> reference_log, log;
  Counting reference(*sweep.reference, reference_log, "reference"), optimized(*candidate, log, "optimized");
  sweep.executors.reference = {&reference};
  sweep.executors.optimized = {&optimized};
  const Report report = sweep.run();
  ASSERT_EQ(report.cases.size(), 4u);
  for (const CaseResult& row : report.cases) {
    EXPECT_EQ(row.status, CaseStatus::passed) << row.reason;
    const bool repeated = row.executor == "optimized";
    ASSERT_EQ(row.timings.size(), repeated ? 3u : 1u) << row.id;
    std::vector<double> seconds;
    for (std::size_t i = 0; i < row.timings.size(); ++i) {
      EXPECT_EQ(row.timings[i].phase, "run");
      EXPECT_EQ(row.timings[i].repetition, static_cast<std::int64_t>(i));
      seconds.push_back(row.timings[i].seconds);
    }
    std::sort(seconds.begin(), seconds.end());
    EXPECT_EQ(row.seconds, seconds[seconds.size() / 2]);
    EXPECT_EQ(metrics_of(row).contains("time"), repeated);
  }
  // One that is not counted and three that are, for each of the two rows, after the last run that judges.
  const std::vector<std::string> tail(log.end() - 8, log.end());
  EXPECT_EQ(tail, std::vector<std::string>(8, "optimized bare"));
  EXPECT_EQ(std::count(log.begin(), log.end(), "optimized bare"), 8);
  EXPECT_EQ(std::count(reference_log.begin(), reference_log.end(), "reference bare"), 0);

  // A sweep that was killed before its times continues with the rows that lack them.
  Report resumed = report;
  resumed.cases[1].timings.resize(1);
  log.clear();
  sweep.resume(resumed);
  EXPECT_EQ(log, std::vector<std::string>(4, "optimized bare"));
  EXPECT_EQ(resumed.cases[1].timings.size(), 3u);
  EXPECT_NE(request_sha256(sweep.request, sweep.checkpoint.config), [&] {
    SweepRequest other = sweep.request;
    other.runner.time_runs = 4;
    return request_sha256(other, sweep.checkpoint.config);
  }());
}

// What an executor measures of drafts, verification and acceptance stands beside the time of the run, in every repetition.
TEST(Sweep, TimesOfASpeculatingRunAreKeptForEveryRepetition) {
  SmallSweep sweep(small_traces(), {"serial/t0s0q0/single"});
  sweep.request.executors = ExecutorChoice::optimized;
  sweep.request.runner.time_runs = 4;
  const std::unique_ptr<Executor> candidate = reference::make_reference_executor(sweep.checkpoint);
  Meddler measuring(*candidate);
  measuring.on_record = [](RunRecord& record, int, bool) { record.speculation_times = SpeculationTimes{0.5, 0.25, 0.125}; };
  sweep.executors.optimized = {&measuring};
  const Report report = sweep.run();
  ASSERT_EQ(report.cases.size(), 1u);
  const CaseResult& row = report.cases[0];
  EXPECT_EQ(row.status, CaseStatus::passed) << row.reason;
  ASSERT_EQ(row.timings.size(), 16u);
  for (std::int64_t repetition = 0; repetition < 4; ++repetition) {
    const TimingRow* rows = &row.timings[static_cast<std::size_t>(4 * repetition)];
    EXPECT_EQ(rows[0].phase, "run");
    EXPECT_EQ(rows[1].phase, "draft");
    EXPECT_EQ(rows[1].seconds, 0.5);
    EXPECT_EQ(rows[2].phase, "verify");
    EXPECT_EQ(rows[2].seconds, 0.25);
    EXPECT_EQ(rows[3].phase, "accept");
    EXPECT_EQ(rows[3].seconds, 0.125);
    for (int i = 0; i < 4; ++i) EXPECT_EQ(rows[i].repetition, repetition);
  }
}

// Drift alone: logits are recorded, no rule is applied, and the numbers are those of the full sweep.
TEST(Sweep, QualityMeasuresDriftAndNothingElse) {
  SmallSweep full(small_traces(), {"serial/t0s0q0/*", "serial/t1s1q0/*"}), quality(small_traces(), {"serial/t0s0q0/*", "serial/t1s1q0/*"});
  quality.request.runner.measure = Measure::quality;
  EXPECT_NE(request_sha256(full.request, full.checkpoint.config), request_sha256(quality.request, quality.checkpoint.config));
  const Report judged = full.run(), measured = quality.run();
  for (const char* id : {"serial/t0s0q0/several", "serial/t1s1q0/several"}) {
    const CaseResult &a = row_of(judged, id), &b = row_of(measured, id);
    EXPECT_EQ(b.status, CaseStatus::passed) << b.reason;
    ASSERT_EQ(b.checks.size(), 1u);
    EXPECT_EQ(b.checks[0].name, kQualityCheck);
    EXPECT_EQ(b.checks[0].detail, "75 scored tokens, 0 answers");
    EXPECT_TRUE(b.digests.empty());
    EXPECT_EQ(a.kl_mean, b.kl_mean);
    EXPECT_EQ(a.memory_ratio, b.memory_ratio);
    EXPECT_EQ(a.drift.size(), 77u);
    ASSERT_EQ(b.drift.size(), 75u) << "the row behind the last token of each request has no next token";
    EXPECT_EQ(b.drift[3].kl, static_cast<double>(static_cast<float>(a.drift[3].kl)));
    EXPECT_EQ(b.drift[3].nll, static_cast<double>(static_cast<float>(a.drift[3].nll)));
  }
  EXPECT_EQ(row_of(measured, "serial/t0s0q0/several").kl_max, 0.0);
  EXPECT_GT(row_of(measured, "serial/t1s1q0/several").kl_max, 0.0);
}

// Modes against the executor's own serial run: the checks of modes and their digests, and nothing that needs the specification or the reference.
TEST(Sweep, ModesAreComparedWithTheirOwnSerialRunAlone) {
  SmallSweep full(small_traces(), {"serial/t0s0q0/*", "split/t0s0q0/*"}), modes(small_traces(), {"serial/t0s0q0/*", "split/t0s0q0/*"});
  modes.request.runner.measure = Measure::modes;
  EXPECT_NE(request_sha256(full.request, full.checkpoint.config), request_sha256(modes.request, modes.checkpoint.config));
  const Report judged = full.run(), measured = modes.run();
  const CaseResult &a = row_of(judged, "split/t0s0q0/several"), &b = row_of(measured, "split/t0s0q0/several");
  EXPECT_EQ(b.status, CaseStatus::passed) << b.reason;
  EXPECT_EQ(check_of(a, kAuditCheck).status, "passed");
  EXPECT_TRUE(std::none_of(b.checks.begin(), b.checks.end(), [](const CheckRow& check) { return check.name == kAuditCheck; }));
  for (const std::string_view name : {kEqualsSerialCheck, kModeCheck, kExecutionsCheck, kDrainCheck})
    EXPECT_EQ(check_of(b, name).detail, check_of(a, name).detail) << name;
  EXPECT_EQ(b.digests.size(), a.digests.size());
}

TEST(Sweep, QualityFailsWhereRowsCannotBeCompared) {
  std::vector<Trace> traces = small_traces();
  traces[0].requests[0].forced.clear();  // free running: nothing is known to follow
  SmallSweep sweep(std::move(traces), {"serial/t0s0q0/*", "serial/t1s0q0/*"});
  sweep.request.runner.measure = Measure::quality;
  Meddler meddler(*sweep.reference);
  meddler.on_record = [](RunRecord& record, int, bool) {
    if (record.requests.size() == 2 && !record.config_json.empty() &&
        record.config_json.find("\"token_sparse_prefill\":{\"enabled\":true") != std::string::npos)
      record.requests[1].logits.row(2)[0] = std::numeric_limits<float>::quiet_NaN();
  };
  sweep.executors.reference = {&meddler};
  const Report report = sweep.run();
  EXPECT_EQ(row_of(report, "serial/t1s0q0/several").status, CaseStatus::failed);
  EXPECT_NE(row_of(report, "serial/t1s0q0/several").reason.find("1 logits rows hold a NaN"), std::string::npos);
  EXPECT_EQ(row_of(report, "serial/t0s0q0/several").status, CaseStatus::passed);
}

// S-TSEL-10 under the audit: it accepts the reserved position where the configuration says so, and only there.
TEST(Sweep, AReservedPositionPassesTheAudit) {
  Trace trace = test::trace_of({test::request(0, 150, 3)});
  trace.name = "prompt-150";
  SmallSweep sweep({trace});
  std::vector<Case> cases;
  for (const char* id : {"serial/t1s1q0:w64:reserve=final_prompt_token/prompt-150",
                         "split/t1s0q1:rolling:serial_aligned:w64:reserve=final_prompt_token/prompt-150"})
    cases.push_back(parse_case_id(id));
  sweep.request.cases = numbered_cases(cases, sweep.request.traces, sweep.checkpoint.config);
  for (const CaseResult& row : sweep.run().cases) EXPECT_EQ(row.status, CaseStatus::passed) << row.id << ": " << row.reason;

  const AlgorithmConfig reserved = cases[0].config;
  AlgorithmConfig plain = reserved;
  plain.token_sparse_prefill.reserve = SlotReservation::none;
  RunOptions options;
  options.record = RecordGroups::all();
  const EffectiveConfig effective = EffectiveConfig::resolve(reserved, sweep.checkpoint.config);
  const RunRecord record = replay(*sweep.reference, make_plan(ModeSpec{}, trace, effective), trace, effective, options);
  const auto finds = [&](const AlgorithmConfig& config) {
    return !audit(record, trace, EffectiveConfig::resolve(config, sweep.checkpoint.config), sweep.checkpoint, {}).clean();
  };
  EXPECT_FALSE(finds(reserved));
  EXPECT_TRUE(finds(plain));
}

}  // namespace
}  // namespace loopgauge::harness
