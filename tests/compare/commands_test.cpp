// SPDX-License-Identifier: Apache-2.0
// explain and gate as a shell runs them.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <sstream>

#include "harness/io/trace_file.hpp"
#include "harness/report_lock.hpp"
#include "harness/sweep/mode_checks.hpp"
#include "tests/harness_cli/process.hpp"

namespace loopgauge::test {
namespace {

using nlohmann::json;

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

TEST(ExplainCommand, PlansOfOneCaseAreIdentical) {
  const ProcessResult result = run_program({"explain", "split/t1s1q1:rolling:serial_aligned/seven"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_TRUE(contains(result.out, "serial plan\nactual    reference executor, declared profile, split plan")) << result.out;
  EXPECT_TRUE(contains(result.out, "; 0 of ")) << result.out;
  EXPECT_TRUE(result.out.ends_with("identical\n")) << result.out;
}

TEST(ExplainCommand, NamesTheOperationThatAPlantedFaultChanges) {
  const ProcessResult result = run_program({"explain", "serial/t0s0q0/seven", "--mutant", "swapped_norms", "--output", "json"});
  EXPECT_EQ(result.exit_code, 1) << result.err;
  const json found = json::parse(result.out);
  EXPECT_FALSE(found["identical"]);
  EXPECT_FALSE(found["result_is_first"]);
  EXPECT_EQ(found["first_row"]["operation"], "rms_norm.input_layernorm_2");
  EXPECT_EQ(found["first_row"]["loop"], 1);
  EXPECT_EQ(found["first_row"]["layer"], 0);
  EXPECT_EQ(found["first_row"]["position"], 0);
  EXPECT_TRUE(contains(found["first_row"]["clauses"], "S-RMS-1"));
  EXPECT_EQ(found["first_row"]["expected_row"].size(), 384u);
  EXPECT_EQ(found["first_row"]["expected_row"][found["first_row"]["element"].get<std::size_t>()], found["first_row"]["expected"]);
}

TEST(ExplainCommand, AFaultThatNoOperationRowShowsFirstIsNamedByItsResult) {
  const ProcessResult result = run_program({"explain", "serial/t1s0q0/seven", "--mutant", "double_final_norm", "--output", "json"});
  EXPECT_EQ(result.exit_code, 1) << result.err;
  const json found = json::parse(result.out);
  EXPECT_TRUE(found["result_is_first"]);
  EXPECT_EQ(found["first_result"]["group"], "hidden");
  EXPECT_EQ(found["first_result"]["loop"], 3);
  EXPECT_TRUE(contains(found["first_result"]["clauses"], "S-TSEL-7"));
}

TEST(ExplainCommand, AnotherProfileDiffersByRounding) {
  const ProcessResult result = run_program({"explain", "serial/t0s0q0/seven", "--against-profile", "reordered"});
  EXPECT_EQ(result.exit_code, 1) << result.err;
  EXPECT_TRUE(contains(result.out, "reordered profile")) << result.out;
  EXPECT_TRUE(contains(result.out, "difference")) << result.out;
}

TEST(ExplainCommand, TwoDumps) {
  const TemporaryFolder folder;
  const std::string a = folder / "a.h5", b = folder / "b.h5", c = folder / "c.h5";
  ASSERT_EQ(run_program({"run", "serial/t1s0q0/seven", "--dump", a}).exit_code, 0);
  ASSERT_EQ(run_program({"run", "split/t1s0q0/seven", "--dump", b}).exit_code, 0);
  ASSERT_EQ(run_program({"run", "serial/t1s0q0/seven", "--dump", c, "--mutant", "aliased_hidden_rows"}).exit_code, 0);
  const ProcessResult same = run_program({"explain", a, b});
  EXPECT_EQ(same.exit_code, 0) << same.err << same.out;
  const ProcessResult different = run_program({"explain", a, c});
  EXPECT_EQ(different.exit_code, 1) << different.err;
  EXPECT_TRUE(contains(different.out, "scores/loop4: request 0 loop 4 position 1")) << different.out;
  EXPECT_TRUE(contains(different.out, "S-TSEL-3")) << different.out;
}

// A request that one run cancelled is compared as far as it came: what it lacks is no arithmetic.
TEST(ExplainCommand, TwoDumpsOfWhichOneWasCancelled) {
  const TemporaryFolder folder;
  Trace whole = harness::read_trace(std::string(LOOPGAUGE_SOURCE_DIR) + "/data/traces/cancelled.h5");
  whole = harness::undisturbed(whole);
  harness::write_trace(folder / "whole.h5", whole);
  const std::string undisturbed = folder / "a.h5", cancelled = folder / "b.h5", other_plan = folder / "c.h5", faulty = folder / "d.h5";
  ASSERT_EQ(run_program({"run", "--trace", folder / "whole.h5", "--switches", "t1s0q0", "--dump", undisturbed}).exit_code, 0);
  const auto run_cancelled = [&](const std::string& id, const std::string& dump, std::vector<std::string> more = {}) {
    std::vector<std::string> words{"run", id, "--dump", dump};
    words.insert(words.end(), more.begin(), more.end());
    const ProcessResult result = run_program(words);
    EXPECT_EQ(result.exit_code, 0) << result.err;
  };
  run_cancelled("serial/t1s0q0/cancelled", cancelled);
  run_cancelled("wcpb+async/t1s0q0/cancelled", other_plan);
  run_cancelled("serial/t1s0q0/cancelled", faulty, {"--mutant", "aliased_hidden_rows"});

  const ProcessResult outcome = run_program({"explain", undisturbed, cancelled, "--output", "json"});
  EXPECT_EQ(outcome.exit_code, 1) << outcome.err;
  const json found = json::parse(outcome.out);
  EXPECT_TRUE(found["outcomes_differ"]);
  EXPECT_TRUE(contains(found["outcomes"][0], "cancelled with ")) << found["outcomes"];
  EXPECT_TRUE(contains(found["outcomes"][0], ", expected completed with ")) << found["outcomes"];
  EXPECT_EQ(found["operation"], "");
  EXPECT_FALSE(found.contains("first_result")) << found["first_result"];

  const ProcessResult plans = run_program({"explain", cancelled, other_plan});
  EXPECT_EQ(plans.exit_code, 0) << plans.out;
  EXPECT_TRUE(contains(plans.out, "outcome   request ")) << plans.out;
  EXPECT_TRUE(plans.out.ends_with("\nidentical as far as both runs came\n")) << plans.out;
  EXPECT_TRUE(run_program({"explain", cancelled, cancelled}).out.ends_with("\nidentical\n"));

  // What differs before the cancellation is found all the same.
  const ProcessResult both = run_program({"explain", undisturbed, faulty});
  EXPECT_EQ(both.exit_code, 1);
  EXPECT_TRUE(contains(both.out, "outcome   request ")) << both.out;
  EXPECT_TRUE(contains(both.out, "\noperation update_score ")) << both.out;
}

TEST(ExplainCommand, BadRequestsHaveTheirExitCodes) {
  EXPECT_EQ(run_program({"explain"}).exit_code, 2);
  EXPECT_EQ(run_program({"explain", "no-such-case"}).exit_code, 2);
  EXPECT_EQ(run_program({"explain", "serial/t0s0q0/no-such-trace"}).exit_code, 3);
  EXPECT_EQ(run_program({"explain", "serial/t0s0q0/seven", "--mutant", "no_such_fault"}).exit_code, 2);
  const ProcessResult two = run_program({"explain", "serial/t0s0q0/seven", "--mutant", "swapped_norms", "--against-profile", "reordered"});
  EXPECT_EQ(two.exit_code, 2);
  EXPECT_TRUE(contains(two.err, "give one of")) << two.err;
  const ProcessResult same = run_program({"explain", "serial/t0s0q0/seven", "--against-mode", "serial"});
  EXPECT_EQ(same.exit_code, 2);
  EXPECT_TRUE(contains(same.err, "both runs would be the same")) << same.err;
  EXPECT_EQ(run_program({"explain", "a.h5", "b.h5"}).exit_code, 3);
  const ProcessResult useless = run_program({"explain", "a.h5", "b.h5", "--mutant", "swapped_norms"});
  EXPECT_EQ(useless.exit_code, 2);
  EXPECT_TRUE(contains(useless.err, "no effect on two dump files")) << useless.err;
}

TEST(GateCommand, SweepUpdateGateAndARegression) {
  const TemporaryFolder folder;
  const std::string report = folder / "r.h5", baseline = folder / "b.txt";
  ASSERT_EQ(
      run_program({"sweep", "--set", "smoke", "--filter", "serial/t?s0q0/seven", "--executor", "reference", "--report", report}).exit_code,
      0);

  const ProcessResult absent = run_program({"gate", report, "--baseline", baseline});
  EXPECT_EQ(absent.exit_code, 3);
  EXPECT_TRUE(contains(absent.err, "no such baseline")) << absent.err;

  const ProcessResult update = run_program({"gate", report, "--baseline", baseline, "--update"});
  ASSERT_EQ(update.exit_code, 0) << update.err;
  const std::string text = read_file(baseline);
  EXPECT_TRUE(text.starts_with("loopgauge-baseline 3\nmodel ")) << text;

  const ProcessResult same = run_program({"gate", report, "--baseline", baseline});
  EXPECT_EQ(same.exit_code, 0) << same.out;
  EXPECT_TRUE(same.out.ends_with("2 passed, 0 failed, 0 skipped\n")) << same.out;

  // One digit of one digest.
  std::string other = text;
  const std::size_t at = other.find(" reference digest ") + 18;
  other[at] = other[at] == '0' ? '1' : '0';
  write_file(baseline, other);
  const ProcessResult regression = run_program({"gate", report, "--baseline", baseline});
  EXPECT_EQ(regression.exit_code, 1);
  EXPECT_TRUE(regression.out.starts_with("regression  serial/t0s0q0/seven reference digest: ")) << regression.out;
  EXPECT_TRUE(regression.out.ends_with("1 passed, 1 failed, 0 skipped\n")) << regression.out;

  // A case that the report lacks.
  write_file(baseline, text + "split/t0s0q0/seven reference kl_mean 0\n");
  const ProcessResult missing = run_program({"gate", report, "--baseline", baseline});
  EXPECT_EQ(missing.exit_code, 5);
  EXPECT_TRUE(contains(missing.out, "missing  split/t0s0q0/seven reference: the report lacks this case")) << missing.out;

  const std::string issues = folder / "known.txt";
  write_file(issues, "loopgauge-known-issues 1\n2030-01-01 split/* reference case the plan is being rewritten\n");
  const ProcessResult known =
      run_program({"gate", report, "--baseline", baseline, "--known-issues", issues, "--today", "2030-01-01", "--annotations", "github"});
  EXPECT_EQ(known.exit_code, 0) << known.out << known.err;
  EXPECT_TRUE(contains(known.out, "::warning title=loopgauge known::split/t0s0q0/seven reference: ")) << known.out;
  EXPECT_EQ(run_program({"gate", report, "--baseline", baseline, "--known-issues", issues, "--today", "2030-01-02"}).exit_code, 5);
  EXPECT_EQ(run_program({"gate", report, "--baseline", baseline, "--today", "someday"}).exit_code, 2);
  EXPECT_EQ(run_program({"gate", report, "--baseline", baseline, "--annotations", "other"}).exit_code, 2);
  EXPECT_EQ(run_program({"gate", report, "--baseline", baseline, "--known-issues", folder / "none.txt"}).exit_code, 3);
  EXPECT_EQ(run_program({"gate", report, "--baseline", baseline, "--prune"}).exit_code, 2);

  // An update keeps the case that this report lacks, unless told otherwise.
  const ProcessResult kept = run_program({"gate", report, "--baseline", baseline, "--update"});
  EXPECT_TRUE(contains(kept.out, "0 cases updated, 0 new, 1 kept that the report lacks")) << kept.out << kept.err;
  EXPECT_TRUE(contains(read_file(baseline), "split/t0s0q0/seven")) << read_file(baseline);
  EXPECT_EQ(run_program({"gate", report, "--baseline", baseline, "--update", "--prune"}).exit_code, 0);
  EXPECT_EQ(read_file(baseline), text);

  {
    const harness::ReportLock first(baseline);
    const ProcessResult second = run_program({"gate", report, "--baseline", baseline, "--update"});
    EXPECT_EQ(second.exit_code, 3) << second.out;
    EXPECT_TRUE(contains(second.err, "another process is writing it: wait for its end or choose another --baseline (process ")) << second.err;
    EXPECT_EQ(run_program({"gate", report, "--baseline", baseline}).exit_code, 0) << "judging only reads";
  }

  // What is no baseline is never replaced by one.
  write_file(baseline, "not a baseline\n");
  EXPECT_EQ(run_program({"gate", report, "--baseline", baseline}).exit_code, 3);
  EXPECT_EQ(run_program({"gate", report, "--baseline", baseline, "--update", "--prune"}).exit_code, 3);
  EXPECT_EQ(read_file(baseline), "not a baseline\n");
  EXPECT_EQ(run_program({"gate", report, "--baseline", report, "--update", "--prune"}).exit_code, 2);
  write_file(baseline, "");
  EXPECT_EQ(run_program({"gate", report, "--baseline", baseline, "--update"}).exit_code, 0);
  EXPECT_EQ(read_file(baseline), text);
  EXPECT_EQ(run_program({"gate", folder / "none.h5", "--baseline", baseline}).exit_code, 3);
  EXPECT_EQ(run_program({"gate", report}).exit_code, 2);
}

// The example workflows give only flags that there are.
TEST(GateCommand, WorkflowsUseWhatExists) {
  int commands = 0;
  for (const char* name : {"gate-cpu.yml", "gate-gpu.yml"}) {
    std::istringstream lines(read_file(std::string(LOOPGAUGE_SOURCE_DIR) + "/reports/ci/" + name));
    for (std::string line; std::getline(lines, line);) {
      const std::size_t at = line.find("harness/loopgauge ");
      if (at == std::string::npos) continue;
      ++commands;
      std::istringstream words(line.substr(at));
      std::string program, verb;
      words >> program >> verb;
      const ProcessResult help = run_program({verb, "--help"});
      EXPECT_EQ(help.exit_code, 0) << line;
      for (std::string word; words >> word;) {
        if (!word.starts_with("--")) continue;
        EXPECT_TRUE(contains(help.out, word)) << name << ": " << line;
      }
    }
  }
  EXPECT_EQ(commands, 5);
}

TEST(GateCommand, AMutantsReportIsNeverABaseline) {
  const TemporaryFolder folder;
  const std::string report = folder / "m.h5", baseline = folder / "b.txt";
  EXPECT_EQ(run_program({"sweep", "--set", "smoke", "--filter", "serial/t0s0q0/seven", "--mutant", "swapped_norms", "--report", report})
                .exit_code,
            1);
  const ProcessResult update = run_program({"gate", report, "--baseline", baseline, "--update"});
  EXPECT_EQ(update.exit_code, 2) << update.out << update.err;
  EXPECT_FALSE(std::filesystem::exists(baseline));
}

}  // namespace
}  // namespace loopgauge::test
