// SPDX-License-Identifier: Apache-2.0
// The verbs sweep and report as a shell sees them: exit codes, streams, resume, shards, foreign readers.
#include <gtest/gtest.h>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "harness/io/trace_file.hpp"
#include "harness/report/report_file.hpp"
#include "harness/report_lock.hpp"
#include "tests/harness_cli/process.hpp"
#include "tests/report/sweep_command_fixture.hpp"

namespace loopgauge::harness {
namespace {

using test::ProcessResult;

bool has_line(const std::string& text, const std::string& line) { return ("\n" + text).find("\n" + line + "\n") != std::string::npos; }

std::string last_line(const std::string& text) {
  const std::string body = text.substr(0, text.find_last_not_of('\n') + 1);
  return body.substr(body.rfind('\n') + 1);
}

TEST_F(SweepCommand, ReferenceAloneExitsWithZeroAndCounts) {
  const ProcessResult result = sweep({"--executor", "reference", "--filter", "*/t?s0q0/*"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(last_line(result.out), "8 passed, 0 failed, 0 skipped");
  EXPECT_EQ(result.err, "") << "progress belongs to terminals only";
  EXPECT_NE(result.out.find("seed "), std::string::npos);
  EXPECT_TRUE(is_complete(read_report(path("report.h5"))));
}

TEST_F(SweepCommand, WithoutDeviceTheOptimizedColumnIsNotRun) {
  const ProcessResult result = sweep({"--filter", "serial/t0s0q0/single"});
  const Report report = read_report(path("report.h5"));
  if (report.meta.device_available) GTEST_SKIP() << "this machine has a device: " << report.meta.device;
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(last_line(result.out), "1 passed, 0 failed, 1 skipped");
  EXPECT_NE(result.out.find("not run: " + report.meta.device), std::string::npos) << result.out;
  ASSERT_EQ(report.cases.size(), 2u);
  EXPECT_EQ(report.cases[1].status, CaseStatus::not_run);

  const ProcessResult alone = sweep({"--executor", "optimized", "--filter", "serial/t0s0q0/single"}, "optimized.h5");
  EXPECT_EQ(alone.exit_code, 4) << alone.err;
  EXPECT_FALSE(std::filesystem::exists(path("optimized.h5")));
}

TEST_F(SweepCommand, BadRequestsHaveTheirExitCodesAndLeaveNoReport) {
  EXPECT_EQ(sweep({"--filter", "nothing"}).exit_code, 2);
  EXPECT_EQ(sweep({"--executor", "gpu"}).exit_code, 2);
  EXPECT_EQ(sweep({"--output", "xml"}).exit_code, 2);
  EXPECT_EQ(sweep({"--mutant", "unheard_of"}).exit_code, 2);
  EXPECT_EQ(sweep({"--unknown-flag"}).exit_code, 2);
  EXPECT_EQ(sweep({"--handoff-transport", "pigeon"}).exit_code, 2);
  const ProcessResult transport = sweep({"--executor", "reference", "--handoff-transport", "device"});
  EXPECT_EQ(transport.exit_code, 2) << transport.out;
  EXPECT_NE(transport.err.find("which the reference executor has none of"), std::string::npos) << transport.err;
  const ProcessResult without_handoffs = sweep({"--executor", "reference", "--handoff-transport", "host"});
  EXPECT_EQ(without_handoffs.exit_code, 2) << without_handoffs.out;
  EXPECT_NE(without_handoffs.err.find("no selected case has pd in its mode"), std::string::npos) << without_handoffs.err;
  for (const char* executor : {"reference", "both"}) {
    const ProcessResult result = sweep({"--mutant", "stale_reference_slot", "--executor", executor});
    EXPECT_EQ(result.exit_code, 4) << result.out << result.err;
    EXPECT_NE(result.err.find("use --executor optimized"), std::string::npos) << result.err;
  }
  EXPECT_EQ(sweep({"--mutant", "early_flush", "--filter", "*t0s0q0*"}).exit_code, 2) << "the fault cannot act";
  EXPECT_EQ(
      test::run_program({"sweep", "--checkpoint", path("absent"), "--report", path("report.h5"), "--traces", path("single.h5")}).exit_code,
      3);
  EXPECT_EQ(
      test::run_program({"sweep", "--checkpoint", path("model"), "--report", path("report.h5"), "--traces", path("absent.h5")}).exit_code,
      3);
  EXPECT_EQ(sweep({"--filter", "serial/t0s0q0/single"}, "no/such/folder.h5").exit_code, 3);
  EXPECT_FALSE(std::filesystem::exists(path("report.h5")));
}

// A path that was mistyped costs nothing: no command replaces a file of another kind.
TEST_F(SweepCommand, NothingButAReportIsReplacedByAReport) {
  const std::string trace = test::read_file(path("single.h5"));
  test::write_file(folder_ / "notes.txt", "mine\n");
  for (const auto& [name, sentence] : {std::pair{"single.h5", "single.h5: exists and is no loopgauge-report but a loopgauge-trace"},
                                       std::pair{"notes.txt", "notes.txt: exists and is no loopgauge-report, so it is not replaced"}}) {
    const ProcessResult result = sweep({"--executor", "reference", "--filter", "serial/t0s0q0/single"}, name);
    EXPECT_EQ(result.exit_code, 3) << result.out;
    EXPECT_NE(result.err.find(sentence), std::string::npos) << result.err;
    EXPECT_EQ(test::run_program({"run", "--trace", path("several.h5"), "--dump", path(name)}).exit_code, 3) << name;
  }
  EXPECT_EQ(test::run_program({"explain", "serial/t0s0q0/seven", "--mutant", "swapped_norms", "--minimize", path("notes.txt")}).exit_code, 3);
  EXPECT_EQ(test::read_file(path("single.h5")), trace);
  EXPECT_EQ(test::read_file(path("notes.txt")), "mine\n");

  test::write_file(folder_ / "fresh.h5", "");  // what mktemp leaves
  for (int time = 0; time < 2; ++time) EXPECT_EQ(sweep({"--executor", "reference", "--filter", "serial/t0s0q0/single"}, "fresh.h5").exit_code, 0);
  EXPECT_EQ(test::run_program({"report", "merge", path("fresh.h5"), path("fresh.h5"), "-o", path("notes.txt")}).exit_code, 3);
}

TEST_F(SweepCommand, AReportThatAnotherProcessIsWritingIsLeftToIt) {
  const std::vector<std::string> flags{"--executor", "reference", "--filter", "serial/t0s0q0/single"};
  {
    const ReportLock other(path("report.h5"));
    const test::ProcessResult result = sweep(flags);
    EXPECT_EQ(result.exit_code, 3) << result.err;
    EXPECT_EQ(result.out, "");
    EXPECT_NE(result.err.find("another process is writing it: wait for its end or choose another --report (process " + std::to_string(::getpid()) + " on "),
              std::string::npos)
        << result.err;
    EXPECT_FALSE(std::filesystem::exists(path("report.h5")));
    std::filesystem::create_symlink("report.h5", path("link.h5"));
    EXPECT_EQ(sweep(flags, "link.h5").exit_code, 3);
  }
  EXPECT_EQ(sweep(flags).exit_code, 0);
  EXPECT_FALSE(std::filesystem::exists(path("report.h5.lock")));
}

TEST_F(SweepCommand, AModeThatTheTraceLeavesNothingToDoIsIncompleteCoverage) {
  const ProcessResult result = sweep({"--executor", "reference", "--mode", "serial", "prefix", "--filter", "*/t0s0q0/single"});
  EXPECT_EQ(result.exit_code, 5) << result.out << result.err;
  EXPECT_EQ(last_line(result.out), "1 passed, 0 failed, 1 skipped");
  const Report report = read_report(path("report.h5"));
  EXPECT_EQ(report.cases.at(1).status, CaseStatus::not_run);
  EXPECT_NE(report.cases.at(1).reason.find("prefix has nothing to do"), std::string::npos) << report.cases.at(1).reason;
}

TEST_F(SweepCommand, ATraceWithEventsIsFollowed) {
  Trace trace = small_traces()[0];
  trace.name = "events";
  trace.events = {{1, TraceEventKind::preempt, 0}, {2, TraceEventKind::resume, 0}, {3, TraceEventKind::cancel, 0}};
  write_trace(folder_ / "events.h5", trace);
  const ProcessResult result = sweep({path("events.h5"), "--executor", "reference", "--filter", "*/t0s0q0/events"});
  EXPECT_EQ(result.exit_code, 5) << result.out << result.err;  // no request completes, so nothing shows that its work is done once
  const Report report = read_report(path("report.h5"));
  for (const CaseResult& row : report.cases) {
    EXPECT_EQ(row.status, CaseStatus::not_run) << row.id;
    EXPECT_NE(row.reason.find("no request completed"), std::string::npos) << row.id << ": " << row.reason;
    // Serial has committed the prompt when the request is cancelled, split has not.
    const std::string status = row.mode == "serial" ? "passed" : "not_run";
    EXPECT_TRUE(std::any_of(row.checks.begin(), row.checks.end(), [&](const CheckRow& check) {
      return check.name == "equals_undisturbed" && check.status == status;
    })) << row.id;
  }
}

TEST_F(SweepCommand, MutantFailsWithExitCodeOneAndSaysWhatNoticed) {
  const ProcessResult result = sweep({"--mutant", "swapped_norms", "--filter", "serial/t0s0q0/single"});
  EXPECT_EQ(result.exit_code, 1) << result.err;
  EXPECT_NE(result.out.find("(mutant:swapped_norms) failed"), std::string::npos) << result.out;
  EXPECT_NE(result.out.find("first divergence: "), std::string::npos) << result.out;
  const ProcessResult list = test::run_program({"sweep", "--list-mutants"});
  EXPECT_EQ(list.exit_code, 0);
  for (const FaultInfo& info : planted_faults()) EXPECT_NE(list.out.find(std::string(info.name) + "\t"), std::string::npos) << info.name;
}

// One encoded block has no parameters that a second one could be read with: the fault changes nothing.
TEST_F(SweepCommand, MutantThatChangesNothingIsNotPassed) {
  const ProcessResult result = test::run_program({"sweep", "--set", "pd", "--executor", "reference", "--mutant", "handoff_stale_parameters", "--filter",
                                                  "wcpb+pd/t1s1q1:rolling:serial_aligned:w64/boundary-short", "--report", path("report.h5")});
  EXPECT_EQ(result.exit_code, 5) << result.out << result.err;
  EXPECT_NE(result.out.find("FAULT NOT FOUND: mutant handoff_stale_parameters"), std::string::npos) << result.out;
  EXPECT_NE(result.out.find("it changed nothing in 1 row"), std::string::npos) << result.out;
  EXPECT_EQ(result.out.find("PASSED"), std::string::npos) << result.out;
}

TEST_F(SweepCommand, ConfigurationFileFillsInWhatFlagsLeaveOut) {
  test::write_file(folder_ / "sweep.toml",
                   "executor = \"reference\"\nseed = 11\nfilter = \"serial/t0s0q0/single\"  # one case\nrepeat = true\n");
  const ProcessResult result = sweep({"--config", path("sweep.toml"), "--seed", "12"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  const Report report = read_report(path("report.h5"));
  EXPECT_EQ(report.meta.executors, "reference");
  EXPECT_EQ(report.meta.seed, "12") << "flags win";
  ASSERT_EQ(report.cases.size(), 1u);
  EXPECT_NE(row_text(report.cases[0]).find("repeat_with_taps|passed"), std::string::npos);

  test::write_file(folder_ / "unknown.toml", "seed = 1\nwindows = 64\n");
  const ProcessResult unknown = sweep({"--config", path("unknown.toml")});
  EXPECT_EQ(unknown.exit_code, 2);
  EXPECT_NE(unknown.err.find("unknown.toml:2: unknown key 'windows'"), std::string::npos) << unknown.err;
  test::write_file(folder_ / "bad.toml", "jobs = 0\n");
  const ProcessResult bad = sweep({"--config", path("bad.toml")});
  EXPECT_EQ(bad.exit_code, 2);
  EXPECT_NE(bad.err.find("bad.toml:1: "), std::string::npos) << bad.err;
  EXPECT_EQ(sweep({"--config", path("absent.toml")}).exit_code, 3);
}

TEST_F(SweepCommand, MachineOutputIsNothingButTheData) {
  const ProcessResult json = sweep({"--executor", "reference", "--filter", "serial/t1s0q0/single", "--output", "json"});
  EXPECT_EQ(json.exit_code, 0) << json.err;
  EXPECT_EQ(nlohmann::json::parse(json.out)["cases"][0]["status"], "passed");
  EXPECT_EQ(last_line(json.err), "1 passed, 0 failed, 0 skipped");
  const ProcessResult csv = test::run_program({"report", path("report.h5"), "--csv"});
  EXPECT_EQ(csv.exit_code, 0) << csv.err;
  EXPECT_TRUE(csv.out.starts_with("ordinal,id,")) << csv.out;
  EXPECT_EQ(test::run_program({"report", path("report.h5"), "--json"}).out, json.out);
  EXPECT_EQ(test::run_program({"report", path("report.h5"), "--json", "--csv"}).exit_code, 2);
  EXPECT_EQ(test::run_program({"report"}).exit_code, 2);
  EXPECT_EQ(test::run_program({"report", path("single.h5")}).exit_code, 3) << "a trace is no report";
}

TEST_F(SweepCommand, ResumeRefusesAnotherRequestAndNamesTheDifference) {
  ASSERT_EQ(sweep({"--executor", "reference", "--filter", "serial/t0s0q0/single"}).exit_code, 0);
  const auto refusal = [&](std::vector<std::string> flags) {
    flags.push_back("--resume");
    const ProcessResult result = sweep(flags);
    EXPECT_EQ(result.exit_code, 2) << result.err;
    return result.err;
  };
  EXPECT_NE(refusal({"--executor", "reference", "--filter", "serial/t0s0q0/several"}).find("in this sweep: other cases, settings, executors or traces"), std::string::npos);
  EXPECT_NE(refusal({"--executor", "reference", "--filter", "serial/t0s0q0/single", "--seed", "3"}).find("seed is "), std::string::npos);
  EXPECT_NE(refusal({"--executor", "reference", "--filter", "serial/t0s0q0/single", "--shard", "1/1"}).find("shard is "),
            std::string::npos);
  EXPECT_EQ(sweep({"--executor", "reference", "--filter", "serial/t0s0q0/single", "--resume"}).exit_code, 0)
      << "the same request is complete already";
  // The checkpoint's hash covers the weights alone.
  nlohmann::json config = nlohmann::json::parse(test::read_file(folder_.path() / "model" / "config.json"));
  config["rope_theta"] = 2 * config.at("rope_theta").get<double>();
  test::write_file(folder_.path() / "model" / "config.json", config.dump());
  EXPECT_NE(refusal({"--executor", "reference", "--filter", "serial/t0s0q0/single"}).find("model_config is "), std::string::npos);
}

TEST_F(SweepCommand, InterruptKeepsWhatWasFinished) {
  std::vector<std::string> words = arguments({"--executor", "reference"});
  test::ProcessOptions options;
  options.interrupt_after_ms = 400;
  const ProcessResult result = test::run_program(words, options);
  if (result.exit_code == 0) GTEST_SKIP() << "the sweep was over before the interrupt";
  EXPECT_EQ(result.exit_code, 130) << result.err;
  if (!std::filesystem::exists(path("report.h5"))) GTEST_SKIP() << "the interrupt came before the first write";
  const Report report = read_report(path("report.h5"));
  EXPECT_FALSE(is_complete(report));
  EXPECT_EQ(report.cases.size(), 64u);
}

TEST_F(SweepCommand, MergedShardsEqualTheWholeSweep) {
  const std::vector<std::string> flags{"--executor", "reference", "--filter", "*t?s0q?*/single"};
  ASSERT_EQ(sweep(flags, "whole.h5").exit_code, 0);
  std::vector<std::string> merge{"report", "merge"};
  for (const std::string shard : {"2/2", "1/2"}) {
    std::vector<std::string> part = flags;
    part.insert(part.end(), {"--shard", shard});
    const std::string name = "shard-" + shard.substr(0, 1) + ".h5";
    ASSERT_EQ(sweep(part, name).exit_code, 0);
    merge.push_back(path(name));
  }
  merge.insert(merge.end(), {"-o", path("merged.h5")});
  const ProcessResult result = test::run_program(merge);
  EXPECT_EQ(result.exit_code, 0) << result.err;
  const Report whole = read_report(path("whole.h5")), merged = read_report(path("merged.h5"));
  EXPECT_EQ(last_line(result.out), summary_line(count_statuses(whole)));
  ASSERT_EQ(merged.cases.size(), whole.cases.size());
  for (std::size_t n = 0; n < whole.cases.size(); ++n) EXPECT_EQ(row_text(merged.cases[n]), row_text(whole.cases[n]));
  EXPECT_EQ(test::run_program({"report", "merge", path("shard-1.h5"), path("shard-1.h5"), "-o", path("twice.h5")}).exit_code, 2);
  EXPECT_FALSE(std::filesystem::exists(path("twice.h5")));
  EXPECT_EQ(
      test::run_program({"report", path("whole.h5"), "merge", path("shard-1.h5"), path("shard-2.h5"), "-o", path("twice.h5")}).exit_code,
      2);
}

TEST_F(SweepCommand, PythonReadsEveryTable) {
  const std::string python = LOOPGAUGE_PYTHON;
  if (python.empty()) GTEST_SKIP() << "configuration found no Python 3 interpreter with h5py and numpy";
  ASSERT_EQ(sweep({"--filter", "*/t1s1q1:*/several"}).exit_code, 0);
  const std::string check =
      python + " " LOOPGAUGE_SOURCE_DIR "/tests/report/read_report.py form " + path("report.h5") + " > " + path("python.txt") + " 2>&1";
  EXPECT_EQ(std::system(check.c_str()), 0) << test::read_file(path("python.txt"));
  EXPECT_TRUE(has_line(test::read_file(path("python.txt")), "12 rows")) << test::read_file(path("python.txt"));
}

TEST_F(SweepCommand, AGridOfSettingsBecomesAQualityReport) {
  const std::vector<std::string> grid{
      "--executor",      "reference", "--grid", "switches=t1s0q0 window=64,128 reserve=none,final_prompt_token",
      "switches=t0s1q0", "--measure", "quality"};
  const ProcessResult result = sweep(grid);
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(last_line(result.out), "12 passed, 0 failed, 0 skipped");
  const ProcessResult quality = test::run_program({"report", path("report.h5"), "--quality"});
  EXPECT_EQ(quality.exit_code, 0) << quality.err;
  for (const char* expected : {"t1s0q0:w64:reserve=final_prompt_token", "t0s1q0", "ln(PPL(Q)/PPL(base))", "same top p", "RMS delta p"})
    EXPECT_NE(quality.out.find(expected), std::string::npos) << expected;
  // The same request continues; another measure of the same cases is another request.
  std::vector<std::string> resumed = grid;
  resumed.push_back("--resume");
  EXPECT_EQ(sweep(resumed).exit_code, 0);
  resumed[6] = "everything";
  EXPECT_EQ(sweep(resumed).exit_code, 2);

  EXPECT_EQ(sweep({"--measure", "quantity"}).exit_code, 2);
  EXPECT_EQ(sweep({"--time-runs", "2"}).exit_code, 2) << "no spread";
  EXPECT_EQ(sweep({"--time-runs", "5", "--executor", "reference"}).exit_code, 2);
  EXPECT_EQ(sweep({"--time-runs", "5", "--measure", "quality"}).exit_code, 2);
  EXPECT_EQ(sweep({"--measure", "quality", "--repeat"}).exit_code, 2);
  EXPECT_EQ(sweep({"--grid", "window"}).exit_code, 2);
  EXPECT_EQ(sweep({"--grid", "switches=t1s0q0 window=65"}).exit_code, 2);
}

}  // namespace
}  // namespace loopgauge::harness
