// SPDX-License-Identifier: Apache-2.0
// The gate's words, limits and exit codes, and baselines as text.
#include "harness/gate/gate.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string>

#include "models/error.hpp"

namespace loopgauge::harness {
namespace {

const std::string kModel(64, 'a');
const std::string kConfig = R"({"layers":4,"rms_norm_eps":"1e-06","rope_theta":10000.0})";
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
  report.meta.model_config = kConfig;
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
  EXPECT_EQ(text.substr(0, text.find('\n')), "loopgauge-baseline 3");
  EXPECT_NE(text.find("\nserial/t0s0q0/seven reference kl_mean 0.01[0.008,0.012]\n"), std::string::npos) << text;
  EXPECT_NE(text.find("\nserial/t0s0q0/seven reference memory.steady 150\n"), std::string::npos) << text;
  EXPECT_NE(text.find("\nserial/t0s0q0/seven reference first_token_kl 0.3\n"), std::string::npos) << text;
  const Baseline back = parse_baseline(text, "memory");
  EXPECT_EQ(back.values, baseline.values);
  EXPECT_EQ(back.model_sha256, kModel);
  EXPECT_EQ(back.model_config, kConfig);
  EXPECT_EQ(back.set, "ci");
  EXPECT_EQ(back.device, "none");
  EXPECT_EQ(baseline_text(back), text);
}

TEST(Baseline, RemarksSurviveAnUpdate) {
  const std::string text = baseline_text(baseline_of(sample())), remarked = "# agreed in review 12\n\n" + text + "# the end\n";
  const Baseline before = parse_baseline(remarked, "memory");
  EXPECT_EQ(baseline_text(update_baseline(before, baseline_of(sample())).baseline), "# agreed in review 12\n# the end\n" + text);
  EXPECT_TRUE(is_baseline(remarked));
  EXPECT_TRUE(is_baseline("loopgauge-baseline 9\n"));
  for (const char* other : {"", "#", "# loopgauge-baseline 3", "\n", "notes\nloopgauge-baseline 3\n", "loopgauge-baseline3"}) EXPECT_FALSE(is_baseline(other)) << other;
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
  for (const char* version : {"0", "4", "33", "-1", "x"})
    EXPECT_NE(message("loopgauge-baseline " + std::string(version) + "\n").find("version " + std::string(version) + "; this program reads versions 1 to 3"), std::string::npos);
  for (const char* config : {"", "config", "config ", "config x", "config 1", "config {", "set ci"}) {
    EXPECT_NE(message("loopgauge-baseline 3\nmodel " + kModel + "\n" + config + "\nset ci\ndevice none\na reference kl_mean 1\n").find("expected 'config <model_config"),
              std::string::npos)
        << config;
  }
  EXPECT_NE(message("loopgauge-baseline 2\r\n").find("ci.txt:1: the line ends in CR LF"), std::string::npos);
  EXPECT_NE(message("loopgauge-baseline 1\nmodel xyz\n").find("ci.txt:2:"), std::string::npos);
  const std::string header = "loopgauge-baseline 1\nmodel " + kModel + "\nset ci\n";
  EXPECT_NE(message("loopgauge-baseline 2\nmodel " + kModel + "\nset ci\na reference kl_mean 1\n").find("ci.txt:4: expected 'device"),
            std::string::npos);
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

std::string refusal(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    return error.what();
  }
  return "accepted";
}

// The hash of the weights does not cover config.json.
TEST(Baseline, TheSameWeightsInAnotherConfigurationAreAnotherModel) {
  const Baseline before = baseline_of(sample());
  Report other = sample();
  other.meta.model_config = R"({"layers":4,"rms_norm_eps":"1e-05","rope_theta":500000.0})";
  const std::string difference =
      "rms_norm_eps is \"1e-06\" in the baseline and \"1e-05\" in the report, rope_theta is 10000.0 in the baseline and 500000.0 in the report";
  EXPECT_EQ(refusal([&] { judge_report(other, before); }), "not comparable: other configurations of the model: " + difference);
  EXPECT_NE(refusal([&] { update_baseline(before, baseline_of(other)); }).find(difference), std::string::npos);
  other.meta.model_config = R"({"layers":4,"rms_norm_eps":"1e-06"})";
  EXPECT_NE(refusal([&] { judge_report(other, before); }).find("rope_theta is 10000.0 in the baseline and absent in the report"), std::string::npos);
  other.meta.model_config.clear();
  EXPECT_NE(refusal([&] { judge_report(other, before); }), "accepted");
  EXPECT_NE(refusal([&] { baseline_of(other); }), "accepted");
}

TEST(Baseline, VersionTwoIsJudgedByTheWeightsAloneAndBecomesThree) {
  std::string text = baseline_text(baseline_of(sample()));
  text.replace(text.find("config "), text.find("\nset ") - text.find("config ") + 1, "");
  text[text.find(" 3\n") + 1] = '2';
  const Baseline old = parse_baseline(text, "old");
  EXPECT_EQ(old.version, 2);
  EXPECT_EQ(old.device, "none");
  const GateResult result = judge_report(sample(), old);
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_NE(gate_text(result).find("note  the baseline is of version 2: the model is known by its weights alone, not by its configuration; --update writes it"),
            std::string::npos)
      << gate_text(result);
  // Cases that stay are of the report's configuration where a digest is the same, else nothing says so.
  Report part = sample();
  part.cases.pop_back();
  EXPECT_EQ(update_baseline(old, baseline_of(part)).baseline.model_config, kConfig);
  part.cases[0].digests[0].sha256 = digest('9');
  EXPECT_NE(refusal([&] { update_baseline(old, baseline_of(part)); }).find("does not record the model's configuration"), std::string::npos);
  Report whole = sample();
  for (CaseResult& row : whole.cases) row.digests[0].sha256 = digest('9');
  EXPECT_EQ(update_baseline(old, baseline_of(whole)).updated, 2);
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
  EXPECT_NE(text.find("2 unchanged, 0 new, 0 improved, 0 known, 0 missing, 0 regression\n"), std::string::npos) << text;
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
      // The reference promises its bits: 2 % of .01.
      {"drift within", [](Report& r) { r.cases[0].drift_summary[0].value = 0.0101; }, GateWord::unchanged, 0, "2 unchanged"},
      {"drift five percent worse", [](Report& r) { r.cases[0].drift_summary[0].value *= 1.05; }, GateWord::regression, 1,
       "kl_mean: 0.01[0.008,0.012] -> 0.0105[0.008,0.012], limit: change of at most 0.0002 (2 %: the same bits are promised)"},
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
      {"no interval, worse", [](Report& r) { r.cases[0].drift_summary[1].value = 0.31; }, GateWord::regression, 1,
       "first_token_kl: 0.3 -> 0.31"},
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
  EXPECT_NE(gate_text(result).find("2 unchanged, 0 new, 0 improved, 0 known, 0 missing, 0 regression, 1 not run here\n"),
            std::string::npos);
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

TEST(Baseline, VersionOneIsReadAndJudgesWhatItHolds) {
  const std::string header = "loopgauge-baseline 1\nmodel " + kModel + "\nset ci\n";
  const Baseline old = parse_baseline(header + "serial/t0s0q0/seven reference digest " + digest('1').substr(0, 16) + "\n", "old");
  EXPECT_EQ(old.version, 1);
  EXPECT_EQ(old.values.size(), 1u);
  Report report = sample();
  report.cases.erase(report.cases.begin());
  report.cases[0].digests.push_back({"tokens", digest('4')});
  const GateResult result = judge_report(report, old);
  ASSERT_EQ(result.cases.size(), 1u);
  for (const GateMetric& metric : result.cases[0].metrics) EXPECT_NE(metric.metric, "digest.decisions") << "it could not hold it";
  EXPECT_NE(gate_text(result).find("note  the baseline is of version 1"), std::string::npos) << gate_text(result);
}

// --- policies ---------------------------------------------------------------------------------------------------------------------------

CaseResult device_case(const std::string& id) {
  CaseResult row = passing_case(id, "optimized");
  row.digests.push_back({"tokens", digest('4')});
  row.acceptance = {{0, 100, 80, 10, 0}, {1, 100, 60, 10, 0}};
  row.timings = {{"run", 0, 1.00}, {"run", 1, 1.02}, {"run", 2, 1.04}};
  ToleranceRow bound;
  bound.operation = "linear";
  bound.level = "operation";
  bound.source = "candidate";
  bound.verdict = "passed";
  bound.error_over_bound = 0.4;
  row.tolerance = {bound};
  return row;
}

Report device_report(const std::string& device, int traces = 1) {
  Report report = sample();
  report.meta.device_available = true;
  report.meta.device = device;
  report.cases.clear();
  for (int i = 0; i < traces; ++i) report.cases.push_back(device_case("serial/t1s0q0/trace" + std::to_string(i)));
  return report;
}

TEST(Gate, PoliciesOfADeviceColumn) {
  struct Policy {
    const char* name;
    std::function<void(CaseResult&)> apply;
    GateWord same_device, other_device;
  };
  const Policy policies[] = {
      {"nothing", [](CaseResult&) {}, GateWord::unchanged, GateWord::unchanged},
      {"digest", [](CaseResult& r) { r.digests[0].sha256 = digest('9'); }, GateWord::regression, GateWord::unchanged},
      {"a flipped token", [](CaseResult& r) { r.digests.back().sha256 = digest('9'); }, GateWord::regression, GateWord::unchanged},
      {"a byte more", [](CaseResult& r) { ++r.memory[0].physical_bytes; }, GateWord::regression, GateWord::regression},
      {"bound within", [](CaseResult& r) { r.tolerance[0].error_over_bound = 0.51; }, GateWord::unchanged, GateWord::unchanged},
      {"bound beyond", [](CaseResult& r) { r.tolerance[0].error_over_bound = 0.53; }, GateWord::regression, GateWord::regression},
      {"bound smaller", [](CaseResult& r) { r.tolerance[0].error_over_bound = 0.2; }, GateWord::improved, GateWord::improved},
      // Both half widths are .002: together .00283.
      {"drift by 5 %", [](CaseResult& r) { r.drift_summary[0].value *= 1.05; }, GateWord::regression, GateWord::unchanged},
      {"drift beyond both intervals",
       [](CaseResult& r) {
         auto& d = r.drift_summary[0];
         d.value = 0.0130, d.low = 0.0110, d.high = 0.0150;
       },
       GateWord::regression, GateWord::regression},
      {"acceptance by a little", [](CaseResult& r) { r.acceptance[1].accepted = 55; }, GateWord::regression, GateWord::unchanged},
      {"acceptance by much", [](CaseResult& r) { r.acceptance[1].accepted = 20; }, GateWord::regression, GateWord::regression},
      {"slower within the spread", [](CaseResult& r) { r.timings[0].seconds = r.timings[1].seconds = r.timings[2].seconds = 1.09; },
       GateWord::unchanged, GateWord::unchanged},
      {"slower", [](CaseResult& r) { r.timings[0].seconds = r.timings[1].seconds = r.timings[2].seconds = 1.10; }, GateWord::regression,
       GateWord::unchanged},
      {"faster", [](CaseResult& r) { r.timings[0].seconds = r.timings[1].seconds = r.timings[2].seconds = 0.95; }, GateWord::improved,
       GateWord::unchanged},
  };
  const Baseline baseline = baseline_of(device_report("H200"));
  EXPECT_EQ(baseline.device, "H200");
  for (const Policy& policy : policies) {
    for (const bool same : {true, false}) {
      Report report = device_report(same ? "H200" : "another");
      policy.apply(report.cases[0]);
      const GateResult result = judge_report(report, parse_baseline(baseline_text(baseline), "b"));
      EXPECT_EQ(result.cases[0].word, same ? policy.same_device : policy.other_device)
          << policy.name << (same ? "" : " on another device") << "\n"
          << gate_text(result);
      EXPECT_EQ(gate_text(result).find("ran on 'another', the baseline's on 'H200'") != std::string::npos, !same);
    }
  }
}

TEST(Gate, OnAnotherDeviceAChangeThatAllTracesShareIsFound) {
  const Baseline baseline = baseline_of(device_report("H200", 6));
  const auto judge_with = [&](const std::vector<double>& factors) {
    Report report = device_report("another", 6);
    for (std::size_t i = 0; i < factors.size(); ++i) report.cases[i].drift_summary[0].value *= factors[i];
    return judge_report(report, baseline);
  };
  // Noise of either sign, a fifth of the value: nothing.
  EXPECT_EQ(judge_with({1.2, 0.85, 1.1, 0.9, 1.05, 0.95}).exit_code, 0);
  // Five percent more with a percent of noise: each trace is within its interval, all together are not.
  const GateResult worse = judge_with({1.05, 1.04, 1.06, 1.05, 1.045, 1.055});
  EXPECT_EQ(worse.exit_code, 1);
  EXPECT_EQ(worse.cases.back().id, "t1s0q0 over 6 traces");
  EXPECT_NE(gate_text(worse).find("regression  t1s0q0 over 6 traces optimized kl_mean: 1 -> 1.05["), std::string::npos) << gate_text(worse);
  EXPECT_EQ(judge_with({0.95, 0.96, 0.94, 0.95, 0.955, 0.945}).cases.back().word, GateWord::improved);
  EXPECT_EQ(judge_with({1.01, 1.011, 1.009, 1.01, 1.01, 1.01}).exit_code, 0) << "one percent is within two";
}

// --- known issues -----------------------------------------------------------------------------------------------------------------------

constexpr const char* kIssues =
    "loopgauge-known-issues 1\n"
    "# until      case                 executor   metric    why\n"
    "2027-01-31   serial/t0s0q1:*/*    reference  kl_mean   ticket 1: known\n"
    "2027-01-31   *                    optimized  *         ticket 2: matches nothing\n";

TEST(Gate, KnownIssuesLetARegressionPassUntilTheirDay) {
  Report report = sample();
  report.cases[0].drift_summary[0].value *= 2;
  const Baseline baseline = baseline_of(sample());
  const auto on = [&](const std::string& day, const std::string& text = kIssues) {
    return judge_report(report, baseline, {parse_known_issues(text, "known"), day});
  };
  GateResult result = on("2027-01-31");
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.failed, 0);
  EXPECT_EQ(result.skipped, 1);
  EXPECT_NE(gate_text(result).find("known  serial/t0s0q1:rolling:serial_aligned/seven reference kl_mean: "), std::string::npos);
  EXPECT_NE(gate_text(result).find("known until 2027-01-31: ticket 1: known"), std::string::npos) << gate_text(result);
  EXPECT_NE(gate_text(result).find("known issue of line 4 (ticket 2: matches nothing) matches nothing: delete it"), std::string::npos);
  result = on("2027-02-01");
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_NE(gate_text(result).find("has expired on 2027-01-31"), std::string::npos) << gate_text(result);
  // Only what it names.
  report.cases[0].digests[0].sha256 = digest('9');
  EXPECT_EQ(on("2027-01-31").exit_code, 1);
  // A case as a whole.
  report = sample();
  report.cases.pop_back();
  EXPECT_EQ(on("2027-01-31").exit_code, 5);
  const std::string whole = "loopgauge-known-issues 1\n2027-01-31 serial/t0s0q0/seven * case ticket 3\n";
  result = on("2027-01-31", whole);
  EXPECT_EQ(result.exit_code, 0) << gate_text(result);
}

TEST(Gate, MalformedKnownIssuesAreRefusedWithTheLine) {
  const auto message = [](const std::string& text) -> std::string {
    try {
      parse_known_issues(text, "known.txt");
    } catch (const FileError& error) {
      return error.what();
    }
    return "accepted";
  };
  const std::string header = "loopgauge-known-issues 1\n";
  EXPECT_EQ(message(header), "accepted");
  EXPECT_EQ(message(kIssues), "accepted");
  EXPECT_NE(message("").find("the first line must be"), std::string::npos);
  EXPECT_NE(message("loopgauge-known-issues 2\n").find("known.txt:1: not a list of known issues"), std::string::npos);
  EXPECT_NE(message(header + "2027-02-30 * * * why\n").find("known.txt:2: '2027-02-30' is not a date"), std::string::npos);
  EXPECT_NE(message(header + "tomorrow * * * why\n").find("is not a date"), std::string::npos);
  EXPECT_NE(message(header + "2027-02-01 * * *\n").find("expected '<until>"), std::string::npos);
}

TEST(Gate, AnnotationsAreEscapedAndLimited) {
  Report report = sample();
  report.cases[0].status = CaseStatus::failed;
  report.cases[0].reason = "50 % of\nall";
  report.cases.push_back(passing_case("split/t0s0q0/seven"));
  const std::string text = github_annotations(judge(report));
  EXPECT_EQ(text,
            "::error title=loopgauge regression::serial/t0s0q1:rolling:serial_aligned/seven reference: 50 %25 of%0Aall\n"
            "::notice title=loopgauge new::split/t0s0q0/seven reference\n");
  EXPECT_NE(gate_text(judge(report)).find("reference: 50 % of\\nall\n"), std::string::npos) << gate_text(judge(report));
  report = sample();
  for (CaseResult& row : report.cases) {
    for (DigestRow& entry : row.digests) entry.sha256 = digest('9');
  }
  const std::string many = github_annotations(judge(report), 3);
  EXPECT_EQ(std::count(many.begin(), many.end(), '\n'), 4);
  EXPECT_NE(many.find("::error title=loopgauge::1 more"), std::string::npos) << many;
}

}  // namespace
}  // namespace loopgauge::harness
