// SPDX-License-Identifier: Apache-2.0
// Bench reports: what is written is read again, what is not one is refused by name, and a run that is cut off keeps its rows.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "harness/bench/bench_file.hpp"
#include "harness/bench/bench_output.hpp"
#include "harness/bench/bench_tables.hpp"
#include "harness/io/hdf5.hpp"
#include "models/error.hpp"
#include "tests/harness_cli/process.hpp"
#include "tests/harness_cli/sample_bench.hpp"

namespace loopgauge::harness {
namespace {

using test::TemporaryFolder;

template <class Row>
std::string text(const std::vector<Row>& rows) {
  std::string out;
  for (const Row& row : rows) {
    for (const Column<Row>& column : columns<Row>()) out += cell_text(row, column) + "|";
    out += "\n";
  }
  return out;
}

TEST(BenchFile, ReadsWhatItWrote) {
  const TemporaryFolder folder;
  const BenchReport written = test::sample_bench();
  write_bench(folder / "bench.h5", written);
  const BenchReport read = read_bench(folder / "bench.h5");
  EXPECT_EQ(text(std::vector{read.meta}), text(std::vector{written.meta}));
  visit_bench_tables([&](const char* name, const char*, const char*, auto table) { EXPECT_EQ(text(read.*table), text(written.*table)) << name; });
}

TEST(BenchFile, RefusesWhatIsNone) {
  const TemporaryFolder folder;
  const auto refusal = [&](const std::string& name) {
    try {
      read_bench(folder / name);
    } catch (const FileError& error) {
      return std::string(error.what());
    }
    return std::string("read");
  };
  EXPECT_NE(refusal("missing.h5").find("missing.h5"), std::string::npos);
  write_bench(folder / "whole.h5", test::sample_bench());
  const std::string bytes = test::read_file(folder / "whole.h5");
  test::write_file(folder / "cut.h5", bytes.substr(0, bytes.size() / 2));
  EXPECT_NE(refusal("cut.h5"), "read");

  const auto changed = [&](const std::string& name, const std::string& attribute, auto value) {
    h5::File file = h5::File::create(folder / name);
    file.root().set_attribute("format", kBenchFormat);
    file.root().set_attribute("version", kBenchMajor);
    file.root().set_attribute("minor_version", kBenchMinor);
    file.root().set_attribute(attribute, value);
    file.close();
    return refusal(name);
  };
  EXPECT_NE(changed("foreign.h5", "format", "loopgauge-report").find("not a loopgauge bench report"), std::string::npos);
  EXPECT_NE(changed("newer.h5", "version", kBenchMajor + 1).find("read it with a newer loopgauge"), std::string::npos);

  BenchReport report = test::sample_bench();
  report.rows.front().run = 7;
  write_bench(folder / "dangling.h5", report);
  EXPECT_NE(refusal("dangling.h5").find("/rows: row 0: run 7"), std::string::npos) << refusal("dangling.h5");
}

TEST(BenchFloor, IsTheLongerOfBytesAndArithmetic) {
  const BenchRun run{.read_gb_per_s = 4000, .bf16_tflop_per_s = 800};
  BenchRow row{.median_us = 10, .bytes = 20e6, .flops = 800e6};
  set_floor(row, run);
  EXPECT_DOUBLE_EQ(row.floor_us, 5);
  EXPECT_DOUBLE_EQ(row.ratio_to_floor, 2);
  row.flops = 6.4e9;
  set_floor(row, run);
  EXPECT_DOUBLE_EQ(row.floor_us, 8);
  BenchRow uncounted{.median_us = 10};
  set_floor(uncounted, run);
  EXPECT_TRUE(std::isnan(uncounted.floor_us));
}

// Each would write what it read and its own rows: the rows of the other would be lost.
TEST(BenchOutputFile, OneRunAtATimeWritesAFile) {
  const TemporaryFolder folder;
  const std::string file = (folder / "bench.h5").string();
  {
    BenchOutput first({.report = file, .append = true, .output = "json"});
    EXPECT_THROW(BenchOutput({.report = file, .append = true, .output = "json"}), FileError);
    EXPECT_THROW(BenchOutput({.report = file, .output = "json"}), FileError);
  }
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

TEST(BenchOutputFile, APathThatCannotBeWrittenShowsBeforeTheWork) {
  const TemporaryFolder folder;
  EXPECT_THROW(BenchOutput({.report = (folder / "none" / "bench.h5").string()}), FileError);
  EXPECT_THROW(BenchOutput({.report = "/dev/null"}), FileError);
}

TEST(BenchOutputFile, KeepsEveryRowOfARunThatDoesNotEnd) {
  const TemporaryFolder folder;
  const std::string file = (folder / "bench.h5").string();
  {
    BenchOutput output({.report = file, .output = "json"});
    output.ceilings(4000, 800);
    output.row({.what = "decode step", .median_us = 10, .bytes = 20e6}, {9, 10, 11}, {{.category = "weights", .phase = "peak", .bytes = 5}});
    output.left_out("decode step at 32K", "no room");
  }
  const BenchReport cut = read_bench(file);
  ASSERT_EQ(cut.runs.size(), 1u);
  EXPECT_FALSE(cut.runs[0].complete);
  ASSERT_EQ(cut.rows.size(), 1u);
  EXPECT_DOUBLE_EQ(cut.rows[0].floor_us, 5);
  EXPECT_EQ(cut.samples.size(), 3u);
  EXPECT_EQ(cut.memory.size(), 1u);
  ASSERT_EQ(cut.left_out.size(), 1u);

  {
    BenchOutput output({.report = file, .append = true, .output = "console"});
    output.row({.what = "head", .median_us = 3});
    output.end_to_end({.setting = "t0s0q0", .load = "closed, 8 at once", .requests = 8, .finished = 8});
    output.finish();
  }
  const BenchReport both = read_bench(file);
  ASSERT_EQ(both.runs.size(), 2u);
  EXPECT_TRUE(both.runs[1].complete);
  ASSERT_EQ(both.rows.size(), 2u);
  EXPECT_EQ(both.rows[1].run, 1);
  EXPECT_EQ(both.end_to_end.at(0).run, 1);

  BenchReport elsewhere = both;
  elsewhere.meta.device = "another device";
  write_bench(file, elsewhere);
  EXPECT_THROW(BenchOutput({.report = file, .append = true}), FileError);
  test::write_file(folder / "notes.txt", "mine");
  EXPECT_THROW(BenchOutput({.report = (folder / "notes.txt").string()}), FileError);
}

TEST(BenchSchemaDocument, ListsEveryColumnAsItIsWritten) {
  const std::string document = test::read_file(std::string(LOOPGAUGE_SOURCE_DIR) + "/reports/BENCH_SCHEMA.md");
  const std::string version = std::to_string(kBenchMajor) + "." + std::to_string(kBenchMinor);
  EXPECT_NE(document.find("Schema version " + version), std::string::npos);
  EXPECT_NE(document.find("| " + version + " |"), std::string::npos) << "the version history lacks the current version";
  const auto expect_columns = [&]<class Row>(const std::string& heading, const Row&) {
    const std::size_t section = document.find("\n## " + heading + "\n");
    ASSERT_NE(section, std::string::npos) << heading;
    std::string table;
    for (const Column<Row>& column : columns<Row>()) {
      table += "| `" + std::string(column.name) + "` | " + (column.units.empty() ? "text" : std::string(column.units)) + " | " +
               std::string(column.description) + " |\n";
    }
    EXPECT_NE(document.substr(section, document.find("\n## ", section + 1) - section).find(table), std::string::npos) << heading << " should hold\n" << table;
  };
  expect_columns("/meta", BenchMeta{});
  visit_bench_tables([&](const char* name, const char*, const char*, auto table) {
    using Rows = std::remove_cvref_t<decltype(std::declval<BenchReport>().*table)>;
    expect_columns("/" + std::string(name), typename Rows::value_type{});
  });
}

TEST(BenchTables, AttributeAStepToItsParts) {
  const std::vector<StepAttribution> steps = attribute_steps(test::sample_bench());
  const auto of = [&](const std::string& setting) {
    return *std::find_if(steps.begin(), steps.end(), [&](const auto& step) { return step.setting == setting; });
  };
  const StepAttribution dense = of("t0s0q0");
  EXPECT_DOUBLE_EQ(dense.step_us, 6000);
  EXPECT_DOUBLE_EQ(dense.projections_us, 3500);
  EXPECT_DOUBLE_EQ(dense.head_us, 100);
  EXPECT_DOUBLE_EQ(dense.attention_us, 24 * 80);
  EXPECT_DOUBLE_EQ(dense.selection_us, 0);
  EXPECT_DOUBLE_EQ(dense.remainder_us, 6000 - 3500 - 100 - 24 * 80);
  EXPECT_DOUBLE_EQ(dense.packing_us, 0);
  const StepAttribution all = of("t1s1q1");
  EXPECT_DOUBLE_EQ(all.attention_us, 24 * (10 + 15 + 6 + 7));
  EXPECT_DOUBLE_EQ(all.selection_us, 24 * (5 + 3));
  EXPECT_DOUBLE_EQ(all.launches_us, 600);
  EXPECT_DOUBLE_EQ(all.packing_us, 1);
  EXPECT_TRUE(std::isnan(all.dequantisation_us)) << "t1s1q0 was not measured";
}

TEST(BenchTables, AttributeAPromptToItsParts) {
  BenchReport report;
  report.runs.resize(2);
  const auto add = [&](std::int64_t run, const std::string& what, const std::string& setting, double us) {
    report.rows.push_back({.run = run, .what = what, .setting = setting, .context = 8192, .batch = 2048, .median_us = us});
  };
  for (const std::string setting : {"t0s0q0", "t1s1q1"}) {
    add(1, "prefill", setting, 1000);
    add(1, "prefill.attention", setting, 300);
    add(1, "prefill.products", setting, 500);
  }
  add(1, "prefill.encode", "t1s1q1", 50);
  add(0, "prefill.encode", "t0s0q0", 70);  // of another run
  const std::vector<PrefillAttribution> prompts = attribute_prompts(report);
  ASSERT_EQ(prompts.size(), 2u);
  EXPECT_TRUE(std::isnan(prompts[0].encoding_us));
  EXPECT_DOUBLE_EQ(prompts[0].remainder_us, 200);
  EXPECT_DOUBLE_EQ(prompts[1].encoding_us, 50);
  EXPECT_DOUBLE_EQ(prompts[1].remainder_us, 150);
}

TEST(BenchTables, TellDequantisationFromTheReadersOfBf16) {
  BenchReport report = test::sample_bench();
  for (const BenchRow& row : test::sample_bench().rows) {
    if (row.setting != "t1s1q1" || row.what == "decode step") continue;
    report.rows.push_back(row);
    report.rows.back().setting = "t1s1q0";
    report.rows.back().median_us -= 1;
  }
  for (const StepAttribution& step : attribute_steps(report)) {
    if (step.setting != "t1s1q1") continue;
    EXPECT_DOUBLE_EQ(step.dequantisation_us, 24 * 4);
  }
}

TEST(BenchTables, CompareFeaturesAndPeersWithinOneRun) {
  const BenchReport report = test::sample_bench();
  const std::vector<FeatureGains> gains = feature_gains(report);
  ASSERT_EQ(gains.size(), 1u) << "the second run has one setting only";
  EXPECT_DOUBLE_EQ(gains[0].dense_us / gains[0].all_us, 1.2);
  EXPECT_TRUE(std::isnan(gains[0].s_us));
  const std::vector<PeerComparison> pairs = compare_with_peer(report);
  ASSERT_EQ(pairs.size(), 1u) << "rows of the run without a peer are not compared";
  EXPECT_DOUBLE_EQ(pairs[0].dense->median_us / pairs[0].own->median_us, 1.5);
  EXPECT_EQ(pairs[0].sparse, nullptr);
}

class BenchReportCommand : public ::testing::Test {
 protected:
  void SetUp() override { write_bench(folder_ / "bench.h5", test::sample_bench()); }
  test::ProcessResult report(std::vector<std::string> arguments) const {
    arguments.insert(arguments.begin(), {"report", (folder_ / "bench.h5").string()});
    return test::run_program(arguments);
  }
  TemporaryFolder folder_;
};

TEST_F(BenchReportCommand, ShowsEveryTableOnATerminalAndInMarkdown) {
  const auto terminal = report({});
  EXPECT_EQ(terminal.exit_code, 0) << terminal.err;
  const auto markdown = report({"--markdown"});
  EXPECT_EQ(markdown.exit_code, 0) << markdown.err;
  for (const std::string& out : {terminal.out, markdown.out}) {
    for (const char* part :
         {"Runs", "Against the peer in the same run", "What each feature is worth", "Where a decode step goes", "Requests from arrival to last token",
          "Every row", "Device memory", "Not measured", "1.20x", "1.50x", "broken off", "closed, 8 at once"}) {
      EXPECT_NE(out.find(part), std::string::npos) << part << " in\n" << out;
    }
  }
}

TEST_F(BenchReportCommand, WritesOnePageWithoutAScript) {
  const std::string page_file = (folder_ / "bench.html").string();
  const auto result = report({"--html", page_file});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_NE(result.out.find("wrote " + page_file), std::string::npos);
  const std::string page = test::read_file(page_file);
  EXPECT_TRUE(page.starts_with("<!doctype html>"));
  EXPECT_EQ(page.find("<script"), std::string::npos);
  EXPECT_EQ(page.find("{{"), std::string::npos);
  EXPECT_NE(page.find("torch &lt;b&gt;2.11&lt;/b&gt;"), std::string::npos) << "text of a file is never markup";
  EXPECT_NE(page.find("id=\"attribution\""), std::string::npos);
}

TEST_F(BenchReportCommand, GivesProgramsEverything) {
  const auto json = report({"--json"});
  ASSERT_EQ(json.exit_code, 0) << json.err;
  const auto parsed = nlohmann::json::parse(json.out);
  EXPECT_EQ(parsed.at("format"), "loopgauge-bench");
  EXPECT_EQ(parsed.at("rows").size(), test::sample_bench().rows.size());
  EXPECT_EQ(parsed.at("end_to_end").at(0).at("failed"), 1);
  EXPECT_TRUE(parsed.at("end_to_end").at(0).at("transfer_share").is_null());
  const auto csv = report({"--csv"});
  ASSERT_EQ(csv.exit_code, 0) << csv.err;
  EXPECT_TRUE(csv.out.starts_with("run,engine,what,setting,"));
  EXPECT_NE(csv.out.find("\"decode step, launched\""), std::string::npos);
  EXPECT_NE(csv.out.find("\n\nrun,engine,setting,mode,load,"), std::string::npos) << "requests have a header of their own";
}

TEST_F(BenchReportCommand, RefusesWhatABenchHasNot) {
  EXPECT_EQ(report({"--quality"}).exit_code, 2);
  EXPECT_EQ(report({"--junit", (folder_ / "bench.xml").string()}).exit_code, 2);
  const std::string bench = (folder_ / "bench.h5").string();
  const auto merged = test::run_program({"report", "merge", bench, bench, "-o", (folder_ / "both.h5").string()});
  EXPECT_EQ(merged.exit_code, 3);
  EXPECT_NE(merged.err.find("not a loopgauge report"), std::string::npos) << merged.err;
  const std::string bytes = test::read_file(bench);
  test::write_file(bench, bytes.substr(0, bytes.size() / 2));
  EXPECT_EQ(report({}).exit_code, 3);
}

}  // namespace
}  // namespace loopgauge::harness
