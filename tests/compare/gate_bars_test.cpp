// SPDX-License-Identifier: Apache-2.0
// What the gate is held to: no alarm over repetitions of unchanged code, and every small change reported.
#include <cstdlib>
#include <functional>
#include <iostream>
#include <sstream>
#include <utility>

#include "harness/gate/gate.hpp"
#include "tests/harness_cli/process.hpp"
#include "tests/report/sweep_fixture.hpp"

namespace loopgauge::harness {
namespace {

// The reference with a planted fault that no option of the sweep shows, or with its record altered.
class Changed : public Executor {
 public:
  Changed(Executor& inner, Fault fault, std::function<void(RunRecord&)> alter = {})
      : inner_(inner), fault_(fault), alter_(std::move(alter)) {}
  std::string name() const override { return inner_.name(); }
  void begin(const Trace& trace, const EffectiveConfig& config, const RunOptions& options) override {
    RunOptions own = options;
    own.fault = fault_;
    inner_.begin(trace, config, own);
  }
  void submit(const Submission& submission) override { inner_.submit(submission); }
  RunRecord finish() override {
    RunRecord record = inner_.finish();
    if (alter_) alter_(record);
    return record;
  }

 private:
  Executor& inner_;
  Fault fault_;
  std::function<void(RunRecord&)> alter_;
};

SmallSweep sweep_of(const std::vector<std::string>& globs) {
  SmallSweep sweep(small_traces(), globs);
  sweep.request.runner.drift.resamples = 50;
  return sweep;
}

Report named(Report report) {
  report.meta.model_sha256 = std::string(64, 'a');
  report.meta.model_config = R"({"rope_theta":10000.0})";
  report.meta.set = "small";
  return report;
}

TEST(GateBars, FiftyRepetitionsOfUnchangedCodeRaiseNoAlarm) {
  SmallSweep sweep = sweep_of({"*/single"});
  const Baseline baseline = parse_baseline(baseline_text(baseline_of(named(sweep.run()))), "memory");
  for (int repetition = 0; repetition < 50; ++repetition) {
    const GateResult result = judge_report(named(sweep.run()), baseline);
    EXPECT_EQ(result.exit_code, 0) << gate_text(result);
    EXPECT_EQ(result.passed, 32);
    for (const GateCase& judged : result.cases) EXPECT_EQ(judged.word, GateWord::unchanged) << judged.id;
  }
}

// The program on the shipped model against the committed baseline, whatever the number of threads and lanes.
void sweep_and_gate(int repetitions) {
  const test::TemporaryFolder folder;
  const std::string baseline = folder / "seven.txt", report = folder / "seven.h5";
  std::istringstream committed(test::read_file(std::string(LOOPGAUGE_SOURCE_DIR) + "/reports/baselines/smoke.txt"));
  std::string lines;
  int header = 5, cases = 0;
  for (std::string line; std::getline(committed, line);) {
    const bool of_trace = line.find("/seven reference ") != std::string::npos;
    cases += of_trace && line.find(" digest ") != std::string::npos;
    if (header-- > 0 || of_trace) lines += line + "\n";
  }
  ASSERT_GT(cases, 10);
  test::write_file(baseline, lines);
  int alarms = 0;
  for (int repetition = 0; repetition < repetitions; ++repetition) {
    ::setenv("OMP_NUM_THREADS", std::to_string(1 + repetition % 3).c_str(), 1);
    const test::ProcessResult sweep = test::run_program({"sweep", "--set", "smoke", "--filter", "*/seven", "--executor", "reference", "--jobs",
                                                         std::to_string(1 + repetition % 4), "--report", report});
    ASSERT_EQ(sweep.exit_code, 0) << sweep.err;
    const test::ProcessResult gate = test::run_program({"gate", report, "--baseline", baseline});
    EXPECT_NE(("\n" + gate.out).find("\n" + std::to_string(cases) + " unchanged, 0 new, 0 improved, 0 known, 0 missing, 0 regression\n"), std::string::npos) << gate.out;
    EXPECT_EQ(gate.exit_code, 0) << gate.err;
    alarms += gate.exit_code != 0;
  }
  ::setenv("OMP_NUM_THREADS", "1", 1);
  std::cout << repetitions << " sweeps of " << cases << " cases, " << alarms << " alarms\n";
}

TEST(GateBars, TheProgramRaisesNoAlarmOnUnchangedCode) { sweep_and_gate(2); }

TEST(LongGateBars, FiftySweepsOfUnchangedCodeRaiseNoAlarm) { sweep_and_gate(50); }

TEST(GateBars, OneUlpInOneOperationIsReported) {
  SmallSweep sweep = sweep_of({"serial/t0s0q0/*", "serial/t1s1q1:rolling:*/several"});
  const Baseline baseline = baseline_of(named(sweep.run()));
  Changed changed(*sweep.reference, Fault::one_ulp_in_residual_add);
  sweep.executors.reference = {&changed};
  const GateResult result = judge_report(named(sweep.run()), baseline);
  EXPECT_EQ(result.exit_code, 1);
  for (const GateCase& judged : result.cases) EXPECT_EQ(judged.word, GateWord::regression) << judged.id;
}

TEST(GateBars, OneFlippedSelectionIsReported) {
  SmallSweep sweep = sweep_of({"serial/t0s1q0/several", "serial/t1s0q0/several"});
  const Baseline baseline = baseline_of(named(sweep.run()));
  const auto judge = [&](const std::string& id, const std::function<void(RunRecord&)>& alter) {
    Changed changed(*sweep.reference, Fault::none, alter);
    sweep.executors.reference = {&changed};
    const Report report = named(sweep.run());
    sweep.executors.reference = {sweep.reference.get()};
    const GateResult result = judge_report(report, baseline);
    for (const GateCase& judged : result.cases) {
      if (judged.id != id) continue;
      EXPECT_EQ(judged.word, GateWord::regression) << gate_text(result);
    }
    EXPECT_EQ(result.exit_code, 1);
    // Were the case to pass its own checks, the digest of decisions would tell.
    for (const CaseResult& row : report.cases) {
      if (row.id != id) continue;
      EXPECT_NE(metrics_of(row).at("digest.decisions"), baseline.values.at({id, "reference", "digest.decisions"}));
    }
  };
  judge("serial/t0s1q0/several", [](RunRecord& record) {
    if (record.requests[0].keys.empty() || record.requests[0].keys[9].layers.empty()) return;
    const auto keys = record.requests[0].keys[9].layers[1].row(0);
    std::int32_t free = 0;
    while (std::binary_search(keys.begin(), keys.end(), free)) ++free;
    keys[0] = free;
    std::sort(keys.begin(), keys.end());
  });
  judge("serial/t1s0q0/several", [](RunRecord& record) {
    auto& active = record.requests[0].active[1];
    if (active.empty()) return;
    std::int32_t free = 0;
    while (std::binary_search(active.begin(), active.end(), free)) ++free;
    active[0] = free;
    std::sort(active.begin(), active.end());
  });
}

TEST(GateBars, FivePercentMoreKlAndOneByteAPositionAreReported) {
  SmallSweep sweep = sweep_of({"serial/t1s0q0/several", "serial/t0s1q1:*/several"});
  const Report report = named(sweep.run());
  const Baseline baseline = baseline_of(report);
  for (std::size_t i = 0; i < report.cases.size(); ++i) {
    Report drifted = report;
    for (DriftSummaryRow& row : drifted.cases[i].drift_summary) {
      if (row.metric == "kl_mean" && row.scope == "continuation") row.value *= 1.05, row.low *= 1.05, row.high *= 1.05;
    }
    const GateResult worse = judge_report(drifted, baseline);
    EXPECT_EQ(worse.failed, 1) << gate_text(worse);
    EXPECT_NE(gate_text(worse).find(" kl_mean: "), std::string::npos) << gate_text(worse);

    Report larger = report;
    larger.cases[i].memory.front().physical_bytes += 205;  // positions of the trace
    const GateResult more = judge_report(larger, baseline);
    EXPECT_EQ(more.failed, 1) << gate_text(more);
    EXPECT_NE(gate_text(more).find(" memory."), std::string::npos) << gate_text(more);
  }
}

}  // namespace
}  // namespace loopgauge::harness
