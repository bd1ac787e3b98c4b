// SPDX-License-Identifier: Apache-2.0
// What a row becomes when a run breaks off, and that the run that taps are compared with has none.
#include <functional>
#include <stdexcept>
#include <string>

#include "models/error.hpp"
#include "tests/compare/stand_in.hpp"
#include "tests/report/sweep_fixture.hpp"

namespace loopgauge::harness {
namespace {

// Another executor whose runs may be changed or broken off.
class Intruder : public Executor {
 public:
  explicit Intruder(Executor& inner) : inner_(inner) {}
  std::string name() const override { return inner_.name(); }
  void begin(const Trace& trace, const EffectiveConfig& config, const RunOptions& options) override {
    tapped_ = options.tap != nullptr;
    ++runs;
    if (on_begin) on_begin();
    inner_.begin(trace, config, options);
  }
  void submit(const Submission& submission) override { inner_.submit(submission); }
  RunRecord finish() override {
    RunRecord record = inner_.finish();
    if (on_record) on_record(record, tapped_);
    return record;
  }

  int runs = 0;
  std::function<void()> on_begin;
  std::function<void(RunRecord&, bool tapped)> on_record;

 private:
  Executor& inner_;
  bool tapped_ = false;
};

TEST(CaseRunner, AFailedCheckStaysFailedWhenTheRunBreaksOffLater) {
  struct Exit {
    std::function<void()> raise;
    const char* text;
  };
  const Exit exits[] = {{[] { throw UnsupportedError("no such kernel"); }, "no such kernel"},
                        {[] { throw std::runtime_error("the device is gone"); }, "the device is gone"},
                        {[] { throw std::bad_alloc(); }, "out of memory"}};
  for (const Exit& exit : exits) {
    // The second run of the row is that of its dense baseline, after the audit of the first.
    SmallSweep sweep(small_traces(), {"serial/t0s1q0/single"});
    Intruder intruder(*sweep.reference);
    intruder.on_record = [&](RunRecord& record, bool) { record.requests[0].logits.row(1)[3] += 1.0f; };
    intruder.on_begin = [&] {
      if (intruder.runs == 2) exit.raise();
    };
    sweep.executors.reference = {&intruder};
    const CaseResult row = sweep.run().cases.front();
    EXPECT_EQ(intruder.runs, 2);
    EXPECT_EQ(row.status, CaseStatus::failed) << row.reason;
    EXPECT_NE(row.reason.find("audit: "), std::string::npos) << row.reason;
    EXPECT_NE(row.reason.find(exit.text), std::string::npos) << row.reason;
  }
}

TEST(CaseRunner, TapsAreComparedWithARunWithoutTapsInBothColumns) {
  for (const std::vector<std::string>& globs :
       {std::vector<std::string>{"serial/t0s1q0/single"}, std::vector<std::string>{"*/t0s1q0/single"}}) {
    SmallSweep sweep(small_traces(), globs);
    sweep.request.executors = ExecutorChoice::both;
    sweep.request.runner.repeat_with_taps = true;
    sweep.request.runner.drift.resamples = 10;
    Intruder intruder(*sweep.reference);
    // A legitimate record, but another one under observation.
    intruder.on_record = [](RunRecord& record, bool tapped) {
      if (tapped) record.requests[0].keys[0].mass.data[0] *= 0.999f;
    };
    test::StandIn candidate(sweep.checkpoint);
    sweep.executors.reference = {&intruder};
    sweep.executors.optimized = {&candidate};
    bool found = false;
    for (const CaseResult& row : sweep.run().cases) {
      if (row.executor != "reference") continue;
      for (const CheckRow& check : row.checks) found = found || (check.name == kRepeatWithTapsCheck && check.status == "failed");
    }
    EXPECT_TRUE(found) << globs.front();
  }
}

TEST(CaseRunner, ReplayFromAGraphIsShownByARunThatNothingObserves) {
  SmallSweep sweep;
  sweep.request.executors = ExecutorChoice::both;
  sweep.request.runner.repeat_with_taps = true;
  sweep.request.runner.drift.resamples = 10;
  Case value;
  value.mode = parse_mode("graph");
  value.trace = "single";
  sweep.request.cases = numbered_cases({value}, sweep.request.traces, sweep.checkpoint.config);
  test::StandIn inner(sweep.checkpoint);
  Intruder candidate(inner);
  // As the device does it: what is observed runs eagerly.
  candidate.on_record = [](RunRecord& record, bool tapped) {
    record.executor = "optimized";
    record.counters.graph_replays = tapped ? 0 : 3;
  };
  sweep.executors.optimized = {&candidate};
  const Report report = sweep.run();
  for (const CaseResult& row : report.cases) {
    EXPECT_EQ(row.status, CaseStatus::passed) << row.executor << ": " << row.reason;
    EXPECT_EQ(status_of(row, kRepeatWithTapsCheck), "passed") << row.executor;
  }
}

TEST(SweepCases, AModelOfTwoLoopsIsToldWhichCasesItHas) {
  ModelConfig model = test::tiny_checkpoint().config;
  model.loops = 2;
  const SmallSweep sweep(small_traces(), {"serial/t0s?q0/single"});
  std::vector<Case> cases;
  for (const SweepCase& entry : sweep.request.cases) cases.push_back(entry.value);
  try {
    numbered_cases(cases, sweep.request.traces, model);
    ADD_FAILURE() << "accepted";
  } catch (const ConfigError& error) {
    EXPECT_NE(std::string(error.what()).find("--filter '*/t0s0q0/*'"), std::string::npos) << error.what();
  }
  std::erase_if(cases, [](const Case& value) { return !glob_match("*/t0s0q0/*", case_id(value)); });
  EXPECT_EQ(numbered_cases(cases, sweep.request.traces, model).size(), 1u);
}

}  // namespace
}  // namespace loopgauge::harness
