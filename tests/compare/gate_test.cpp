// SPDX-License-Identifier: Apache-2.0
// The gate's words, limits and exit codes, and baselines as text.
#include "harness/gate/gate.hpp"

#include <gtest/gtest.h>

#include <functional>

#include "models/error.hpp"

namespace loopgauge::harness {
namespace {

const std::string kModel(64, 'a');
std::string digest(char c) { return std::string(64, c); }

CaseResult passing_case(const std::string& id, const std::string& executor = "reference") {
  CaseResult row;
  row.id = id;
  row.executor = executor;
  row.status = CaseStatus::passed;
  row.digests = {{"all", digest('1')}, {"logits", digest('2')}, {"kv", digest('3')}};
  const auto drift = [&](const char* metric, const char* scope, double value, double low, double high) {
    DriftSummaryRow summary;
    summary.metric = metric;
    summary.scope = scope;
    summary.value = value;
    summary.low = low;
    summary.high = high;
    row.drift_summary.push_back(summary);
  };
  drift("kl_mean", "continuation", 0.010, 0.008, 0.012);
  drift("kl_mean", "first_token", 0.3, kNotApplicable, kNotApplicable);
  drift("same_top1", "continuation", 0.95, 0.92, 0.97);
  row.memory = {{"base payload", "steady", "predicted", 90, 100},
                {"BF16 tail", "steady", "predicted", 40, 50},
                {"base payload", "peak", "predicted", 400, 500},
                {"base payload", "steady", "measured", 1, 1}};
  return row;
}

Report sample() {
  Report report;
  report.meta.model_sha256 = kModel;
  report.meta.set = "ci";
  report.meta.device = "no CUDA device";
  report.meta.executors = "both";
  report.cases = {passing_case("serial/t0s0q1:rolling:serial_aligned/seven"), passing_case("serial/t0s0q0/seven")};
  return report;
}

GateResult judge(const Report& report, const Report& before = sample()) { return judge_report(report, baseline_of(before)); }

TEST(Baseline, TextIsSortedAndReadsBack) {
  const Baseline baseline = baseline_of(sample());
  const std::string text = baseline_text(baseline);
  EXPECT_EQ(text.substr(0, text.find('\n')), "loopgauge-baseline 1");
  EXPECT_NE(text.find("\nserial/t0s0q0/seven reference kl_mean 0.01[0.008,0.012]\n"), std::string::npos) << text;
  EXPECT_NE(text.find("\nserial/t0s0q0/seven reference memory.steady 150\n"), std::string::npos) << text;
  EXPECT_NE(text.find("\nserial/t0s0q0/seven reference first_token_kl 0.3\n"), std::string::npos) << text;
  const Baseline back = parse_baseline(text, "memory");
  EXPECT_EQ(back.values, baseline.values);
  EXPECT_EQ(back.model_sha256, kModel);
  EXPECT_EQ(back.set, "ci");
  EXPECT_EQ(baseline_text(back), text);
}

TEST(Baseline, MalformedTextsAreRefusedWithTheLine) {
  const std::string good = baseline_text(baseline_of(sample()));
  const auto message = [&](const std::string& text) -> std::string {
    try {
      parse_baseline(text, "ci.txt");
    } catch (const FileError& error) {
      return error.what();
    }
    return "accepted";
  };
  EXPECT_EQ(message(good), "accepted");
  EXPECT_EQ(message("# remark\n\n" + good), "accepted");
  EXPECT_NE(message("").find("header is incomplete"), std::string::npos);
  EXPECT_NE(message("something else\n").find("ci.txt:1: not a baseline"), std::string::npos);
  EXPECT_NE(message("loopgauge-baseline 2\n").find("version 2"), std::string::npos);
  EXPECT_NE(message("loopgauge-baseline 1\nmodel xyz\n").find("ci.txt:2:"), std::string::npos);
  const std::string header = "loopgauge-baseline 1\nmodel " + kModel + "\nset ci\n";
  EXPECT_NE(message(header).find("holds no case"), std::string::npos);
  EXPECT_NE(message(header + "a reference kl_mean\n").find("ci.txt:4: expected '<case id>"), std::string::npos);
  EXPECT_NE(message(header + "a  reference kl_mean 1\n").find("ci.txt:4:"), std::string::npos);
  EXPECT_NE(message(header + "a reference speed 1\n").find("ci.txt:4: metric 'speed' is unknown"), std::string::npos);
  EXPECT_NE(message(header + "a reference kl_mean 1x\n").find("'1x' is not a number"), std::string::npos);
  EXPECT_NE(message(header + "a reference kl_mean 1[2,1]\n").find("not a number"), std::string::npos);
  EXPECT_NE(message(header + "a reference kl_mean nan\n").find("not a number"), std::string::npos);
  EXPECT_NE(message(header + "a reference digest abc\n").find("not the beginning of a SHA-256"), std::string::npos);
  EXPECT_NE(message(header + "a reference memory.steady -1\n").find("not a number of bytes"), std::string::npos);
  EXPECT_NE(message(header + "b reference kl_mean 1\na reference kl_mean 1\n").find("ci.txt:5: lines must be sorted"), std::string::npos);
  EXPECT_NE(message(header + "a reference kl_mean 1\na reference kl_mean 2\n").find("given before"), std::string::npos);
}

TEST(Baseline, AnUpdateKeepsTheCasesThatTheReportLacks) {
  Report full = sample();
  full.cases.push_back(passing_case("serial/t0s0q0/seven", "optimized"));
  const Baseline before = baseline_of(full);
  // A sweep of one old and one new case, without a device; the old one has a metric less and another digest.
  Report part = sample();
  part.cases = {passing_case("serial/t0s0q0/seven"), passing_case("serial/t0s0q0/other")};
  part.cases[0].digests = {{"all", digest('7')}};
  const BaselineUpdate update = update_baseline(before, baseline_of(part));
  EXPECT_EQ(update.updated, 1);
  EXPECT_EQ(update.added, 1);
  EXPECT_EQ(update.kept, 2);
  const auto& values = update.baseline.values;
  EXPECT_EQ(values.at({"serial/t0s0q0/seven", "reference", "digest"}), digest('7').substr(0, 16));
  EXPECT_FALSE(values.contains({"serial/t0s0q0/seven", "reference", "digest.logits"})) << "a case is replaced as a whole";
  EXPECT_EQ(values.at({"serial/t0s0q0/seven", "optimized", "digest"}), digest('1').substr(0, 16));
  EXPECT_TRUE(values.contains({"serial/t0s0q1:rolling:serial_aligned/seven", "reference", "digest"}));
  EXPECT_TRUE(values.contains({"serial/t0s0q0/other", "reference", "digest"}));
  const BaselineUpdate same = update_baseline(before, before);
  EXPECT_EQ(same.updated + same.added + same.kept, 0);
  for (const bool other_model : {false, true}) {
    Report other = sample();
    (other_model ? other.meta.model_sha256 : other.meta.set) = other_model ? std::string(64, 'b') : "smoke";
    EXPECT_THROW(update_baseline(before, baseline_of(other)), ConfigError);
  }
}

TEST(Baseline, OnlyPassingCompleteSweepsBecomeOne) {
  Report report = sample();
  report.meta.mutant = "swapped_norms";
  EXPECT_THROW(baseline_of(report), ConfigError);
  report = sample();
  report.cases[0].status = CaseStatus::failed;
  EXPECT_THROW(baseline_of(report), ConfigError);
  report = sample();
  report.cases[0].status = CaseStatus::not_run;
  EXPECT_THROW(baseline_of(report), ConfigError);
  report = sample();
  report.meta.shard = "1/4";
  EXPECT_THROW(baseline_of(report), ConfigError);
  // Without a device the optimized column is stated, not required.
  report = sample();
  report.cases.push_back(passing_case("serial/t0s0q0/seven", "optimized"));
  report.cases.back().status = CaseStatus::not_run;
  EXPECT_NO_THROW(baseline_of(report));
  report.meta.device_available = true;
  EXPECT_THROW(baseline_of(report), ConfigError);
}

TEST(Gate, TheSameReportIsUnchanged) {
  const GateResult result = judge(sample());
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.passed, 2);
  for (const GateCase& judged : result.cases) EXPECT_EQ(judged.word, GateWord::unchanged);
  const std::string text = gate_text(result);
  EXPECT_NE(text.find("2 unchanged, 0 new, 0 improved, 0 missing, 0 regression\n"), std::string::npos) << text;
  EXPECT_TRUE(text.ends_with("2 passed, 0 failed, 0 skipped\n")) << text;
}

struct Change {
  const char* name;
  std::function<void(Report&)> apply;
  GateWord word;  // of the first case
  int exit_code;
  const char* text;  // that the output must hold
};

TEST(Gate, WordsLimitsAndExitCodes) {
  const std::vector<Change> changes{
      {"digest", [](Report& r) { r.cases[0].digests[0].sha256 = digest('9'); }, GateWord::regression, 1, "digest: 1111"},
      {"logits digest", [](Report& r) { r.cases[0].digests[1].sha256 = digest('9'); }, GateWord::regression, 1, "digest.logits: 2222"},
      {"a digest that is not gated", [](Report& r) { r.cases[0].digests[2].sha256 = digest('9'); }, GateWord::unchanged, 0, "2 unchanged"},
      {"one byte more", [](Report& r) { r.cases[0].memory[0].physical_bytes += 1; }, GateWord::regression, 1,
       "memory.steady: 150 -> 151, limit: at most 150 bytes"},
      {"one byte fewer", [](Report& r) { r.cases[0].memory[2].physical_bytes -= 1; }, GateWord::improved, 0, "memory.peak: 500 -> 499"},
      {"logical bytes", [](Report& r) { r.cases[0].memory[0].logical_bytes += 1; }, GateWord::unchanged, 0, "2 unchanged"},
      // Both half widths are .002: the combined uncertainty is .00283.
      {"drift within",
       [](Report& r) {
         auto& d = r.cases[0].drift_summary[0];
         d.value = 0.0127, d.low = 0.0107, d.high = 0.0147;
       },
       GateWord::unchanged, 0, "2 unchanged"},
      {"drift beyond",
       [](Report& r) {
         auto& d = r.cases[0].drift_summary[0];
         d.value = 0.0130, d.low = 0.0110, d.high = 0.0150;
       },
       GateWord::regression, 1, "kl_mean: 0.01[0.008,0.012] -> 0.013[0.011,0.015], limit: change of at most 0.00282843"},
      {"drift better",
       [](Report& r) {
         auto& d = r.cases[0].drift_summary[0];
         d.value = 0.0070, d.low = 0.0050, d.high = 0.0090;
       },
       GateWord::improved, 0, "improved  serial"},
      {"same top-1 falls",
       [](Report& r) {
         auto& d = r.cases[0].drift_summary[2];
         d.value = 0.85, d.low = 0.82, d.high = 0.88;
       },
       GateWord::regression, 1, "same_top1"},
      {"same top-1 rises",
       [](Report& r) {
         auto& d = r.cases[0].drift_summary[2];
         d.value = 1.0, d.low = 0.99, d.high = 1.0;
       },
       GateWord::improved, 0, "same_top1"},
      {"no interval, last digits", [](Report& r) { r.cases[0].drift_summary[1].value = 0.300002; }, GateWord::unchanged, 0, "2 unchanged"},
      {"no interval, worse", [](Report& r) { r.cases[0].drift_summary[1].value = 0.301; }, GateWord::regression, 1,
       "first_token_kl: 0.3 -> 0.301"},
      {"metric gone", [](Report& r) { r.cases[0].drift_summary.erase(r.cases[0].drift_summary.begin()); }, GateWord::missing, 5,
       "missing  serial/t0s0q1:rolling:serial_aligned/seven reference kl_mean: 0.01[0.008,0.012] -> none"},
      {"case gone", [](Report& r) { r.cases.erase(r.cases.begin()); }, GateWord::missing, 5, "the report lacks this case"},
      {"not run",
       [](Report& r) {
         r.cases[0].status = CaseStatus::not_run;
         r.cases[0].reason = "interrupted";
       },
       GateWord::missing, 5, "interrupted"},
      {"fails",
       [](Report& r) {
         r.cases[0].status = CaseStatus::failed;
         r.cases[0].reason = "audit: found";
       },
       GateWord::regression, 1, "regression  serial/t0s0q1:rolling:serial_aligned/seven reference: audit: found"},
  };
  for (const Change& change : changes) {
    Report report = sample();
    const std::string id = report.cases[0].id;
    change.apply(report);
    const GateResult result = judge(report);
    const auto judged = std::find_if(result.cases.begin(), result.cases.end(), [&](const GateCase& c) { return c.id == id; });
    ASSERT_NE(judged, result.cases.end()) << change.name;
    EXPECT_EQ(judged->word, change.word) << change.name << ": " << to_string(judged->word);
    EXPECT_EQ(result.exit_code, change.exit_code) << change.name;
    EXPECT_NE(gate_text(result).find(change.text), std::string::npos) << change.name << "\n" << gate_text(result);
  }
}

TEST(Gate, ANewCaseIsNewUnlessItFails) {
  Report report = sample();
  report.cases.push_back(passing_case("split/t0s0q0/seven"));
  GateResult result = judge(report);
  EXPECT_EQ(result.cases.back().word, GateWord::added);
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.passed, 3);
  report.cases.back().status = CaseStatus::failed;
  result = judge(report);
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_EQ(result.failed, 1);
}

TEST(Gate, OptimizedCasesWithoutADeviceAreStatedAndDecideNothing) {
  Report before = sample();
  before.meta.device_available = true;
  before.cases.push_back(passing_case("serial/t0s0q0/seven", "optimized"));
  Report report = before;
  report.meta.device_available = false;
  report.cases.back().status = CaseStatus::not_run;
  report.cases.back().reason = "no CUDA device";
  GateResult result = judge(report, before);
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.skipped, 1);
  EXPECT_NE(gate_text(result).find("2 unchanged, 0 new, 0 improved, 0 missing, 0 regression, 1 not run here\n"), std::string::npos);
  EXPECT_NE(gate_text(result).find("note  1 optimized cases were not run: no CUDA device"), std::string::npos) << gate_text(result);
  // With a device the same hole is missing coverage.
  report.meta.device_available = true;
  EXPECT_EQ(judge(report, before).exit_code, 5);
  // So it is where the sweep was of the reference alone.
  report.meta.device_available = false;
  report.meta.executors = "reference";
  report.cases.pop_back();
  EXPECT_EQ(judge(report, before).exit_code, 5);
}

TEST(Gate, ARegressionOutweighsMissingCases) {
  Report report = sample();
  report.cases[0].digests[0].sha256 = digest('9');
  report.cases.pop_back();
  EXPECT_EQ(judge(report).exit_code, 1);
}

TEST(Gate, WhatIsNotComparableIsNoRegression) {
  Report report = sample();
  report.meta.model_sha256 = std::string(64, 'b');
  EXPECT_THROW(judge(report), FileError);
  report = sample();
  report.meta.set = "full";
  EXPECT_THROW(judge(report), FileError);
  report = sample();
  report.meta.mutant = "early_flush";
  EXPECT_THROW(judge(report), FileError);
}

}  // namespace
}  // namespace loopgauge::harness
