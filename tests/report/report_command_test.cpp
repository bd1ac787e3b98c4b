// SPDX-License-Identifier: Apache-2.0
// `loopgauge report` as a shell sees it: formats, files, and what it says about a report that cannot be read.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "harness/io/hdf5.hpp"
#include "harness/report/report_file.hpp"
#include "harness/report/schema.hpp"
#include "harness/report/terminal_text.hpp"
#include "tests/harness_cli/process.hpp"
#include "tests/report/sample_report.hpp"

namespace loopgauge::harness {
namespace {

using test::ProcessResult;
using test::TemporaryFolder;

class ReportCommand : public ::testing::Test {
 protected:
  void SetUp() override { write_report(folder_ / "good.h5", sample_report()); }
  std::string path(const std::string& name) const { return (folder_ / name).string(); }
  static ProcessResult report(std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), "report");
    return test::run_program(arguments);
  }

  TemporaryFolder folder_;
};

TEST_F(ReportCommand, WritesFilesAndPrintsAFormatInOneCall) {
  const ProcessResult result = report({path("good.h5"), "--html", path("a.html"), "--junit", path("a.xml"), "--markdown"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_TRUE(result.out.starts_with("## ")) << result.out;
  EXPECT_TRUE(test::read_file(path("a.html")).starts_with("<!doctype html>"));
  EXPECT_TRUE(test::read_file(path("a.xml")).starts_with("<?xml"));
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder_.path()), {}), 3) << "no temporary file is left";
}

TEST_F(ReportCommand, FilesAloneSayWhatWasWrittenAndEndWithTheCounts) {
  const ProcessResult result = report({path("good.h5"), "--html", path("a.html")});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(result.out, "wrote " + path("a.html") + "\n1 passed, 1 failed, 2 skipped\n");
}

TEST_F(ReportCommand, SchemaNeedsNoReport) {
  const ProcessResult result = report({"--json-schema"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(nlohmann::json::parse(result.out)["title"], "loopgauge report");
  EXPECT_EQ(report({"--json-schema", path("good.h5")}).exit_code, 2);
  EXPECT_EQ(report({}).exit_code, 2);
  EXPECT_EQ(report({path("good.h5"), "--json", "--csv"}).exit_code, 2);
  EXPECT_EQ(report({"--html", path("a.html"), "merge", path("good.h5"), path("good.h5"), "-o", path("c.h5")}).exit_code, 2);
}

TEST_F(ReportCommand, TheReportItselfIsNeverOverwritten) {
  const std::string before = test::read_file(path("good.h5"));
  EXPECT_EQ(report({path("good.h5"), "--html", path("good.h5")}).exit_code, 2);
  EXPECT_EQ(report({path("good.h5"), "--junit", path("./good.h5")}).exit_code, 2);
  EXPECT_EQ(report({path("good.h5"), "--html", path("a"), "--junit", path("a")}).exit_code, 2);
  EXPECT_EQ(report({path("good.h5"), "--html", path("a"), "--junit", path("./a")}).exit_code, 2);
  EXPECT_EQ(test::read_file(path("good.h5")), before);
}

TEST_F(ReportCommand, AnotherKindOfFileIsNotReplaced) {
  for (const std::string option : {"--html", "--junit"}) {
    test::write_file(path("notes.txt"), "mine");
    const ProcessResult refused = report({path("good.h5"), option, path("notes.txt")});
    EXPECT_EQ(refused.exit_code, 3) << option;
    EXPECT_NE(refused.err.find(path("notes.txt") + ": exists and is no earlier output of " + option), std::string::npos) << refused.err;
    EXPECT_EQ(test::read_file(path("notes.txt")), "mine");
    for (int round = 0; round < 2; ++round) EXPECT_EQ(report({path("good.h5"), option, path("again" + option)}).exit_code, 0) << option;
  }
}

TEST_F(ReportCommand, OutputThatCannotBeWrittenIsNamed) {
  const ProcessResult result = report({path("good.h5"), "--html", path("absent/a.html")});
  EXPECT_EQ(result.exit_code, 3) << result.err;
  EXPECT_NE(result.err.find("absent"), std::string::npos) << result.err;
}

TEST_F(ReportCommand, ControlCharactersOfAFileAreShownEscapedInEveryFormat) {
  Report hostile = sample_report();
  const std::string bad = "x\x1b[2J\x1b]0;t\x07\xc2\x9b" "1m\xe2\x80\xae\x7f\n::stop-commands::y";
  hostile.meta.title = hostile.meta.device = hostile.meta.command_line = bad;
  for (CaseResult& row : hostile.cases) row.reason += bad, row.trace = bad, row.mode = bad, row.id += bad;
  write_report(folder_ / "bad.h5", hostile);
  std::vector<std::vector<std::string>> calls{{}, {"--json"}, {"--csv"}, {"--markdown"}, {"--quality"}};
  for (std::vector<std::string>& words : calls) {
    words.insert(words.begin(), path("bad.h5"));
    const ProcessResult result = report(words);
    for (const std::string control : {"\x1b", "\x07", "\xc2\x9b", "\xe2\x80\xae", "\x7f"})
      EXPECT_EQ(result.out.find(control), std::string::npos) << words.back() << " prints " << without_controls(control);
    if (words.back() == "--json") {
      EXPECT_EQ(nlohmann::json::parse(result.out).at("meta").at("title"), bad);
    }
    if (words.back() == "--markdown" || words.size() == 1) {
      EXPECT_EQ(result.out.find("\n::stop"), std::string::npos) << words.back();
    }
  }
  const ProcessResult gate = test::run_program({"gate", path("bad.h5"), "--baseline", path("no\x1b[31m.txt")});
  EXPECT_EQ(gate.exit_code, 3);
  EXPECT_NE(gate.err.find("no\\u001b[31m.txt"), std::string::npos) << gate.err;
}

TEST_F(ReportCommand, MergeDoesNotOverwriteAShard) {
  Report first = sample_report(), second = sample_report();
  std::erase_if(first.cases, [](const CaseResult& row) { return row.ordinal != 0; });
  std::erase_if(second.cases, [](const CaseResult& row) { return row.ordinal != 1; });
  first.meta.shard = "1/2";
  second.meta.shard = "2/2";
  write_report(folder_ / "1.h5", first);
  write_report(folder_ / "2.h5", second);
  const std::string before = test::read_file(path("1.h5"));
  const ProcessResult refused = report({"merge", path("1.h5"), path("2.h5"), "-o", path("1.h5")});
  EXPECT_EQ(refused.exit_code, 2) << refused.err;
  EXPECT_NE(refused.err.find("one of the reports to merge"), std::string::npos) << refused.err;
  EXPECT_EQ(test::read_file(path("1.h5")), before);
  const ProcessResult merged = report({"merge", path("1.h5"), path("2.h5"), "-o", path("all.h5")});
  EXPECT_EQ(merged.exit_code, 0) << merged.err;
  EXPECT_EQ(read_report(folder_ / "all.h5").cases.size(), 4u);
}

TEST_F(ReportCommand, BrokenReportsAreOneSentenceExitThreeAndLeaveWhatIsThere) {
  const std::string good = test::read_file(path("good.h5"));
  test::write_file(path("empty.h5"), "");
  test::write_file(path("text.h5"), "<html>not a report</html>");
  test::write_file(path("cut.h5"), good.substr(0, good.size() / 2));
  test::write_file(path("start.h5"), good.substr(0, 16));
  std::string damaged = good;
  std::fill(damaged.begin() + static_cast<std::ptrdiff_t>(damaged.size() / 4),
            damaged.begin() + static_cast<std::ptrdiff_t>(damaged.size() / 2), '\xff');
  test::write_file(path("damaged.h5"), damaged);
  std::filesystem::create_directory(path("folder.h5"));
  const auto with_root = [&](const std::string& name, const std::string& format, int version) {
    h5::File file = h5::File::create(folder_ / name);
    {
      const h5::Group root = file.root();
      root.set_attribute("format", format);
      root.set_attribute("version", version);
      root.set_attribute("minor_version", 0);
    }
    file.close();
  };
  with_root("trace.h5", "loopgauge-trace", 1);
  with_root("older.h5", std::string(kReportFormat), kReportMajor - 1);
  with_root("newer.h5", std::string(kReportFormat), kReportMajor + 1);
  with_root("hollow.h5", std::string(kReportFormat), kReportMajor);

  const std::vector<std::pair<std::string, std::string>> expected{{"absent.h5", "absent.h5"},
                                                                  {"empty.h5", "empty"},
                                                                  {"text.h5", "HDF5"},
                                                                  {"cut.h5", "cut.h5"},
                                                                  {"start.h5", "start.h5"},
                                                                  {"damaged.h5", "damaged.h5"},
                                                                  {"folder.h5", "folder.h5"},
                                                                  {"trace.h5", "not a loopgauge report but a loopgauge-trace"},
                                                                  {"older.h5", "schema version 0"},
                                                                  {"newer.h5", "a newer loopgauge"},
                                                                  {"hollow.h5", "meta"}};
  for (const auto& [name, words] : expected) {
    for (const char* format : {"--html", "--junit", "--markdown", "--json", "--csv", ""}) {
      const std::string output = path("out");
      const bool page = std::string_view(format) == "--html";
      const std::string before = page ? "<!doctype html>what was there" : "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<testsuites what=\"was there\">";
      test::write_file(output, before);
      std::vector<std::string> arguments{path(name)};
      if (*format != 0) arguments.emplace_back(format);
      if (std::string(format) == "--html" || std::string(format) == "--junit") arguments.push_back(output);
      const ProcessResult result = report(arguments);
      EXPECT_EQ(result.exit_code, 3) << name << " " << format << ": " << result.err;
      EXPECT_EQ(result.out, "") << name << " " << format;
      EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << name << ": " << result.err;
      EXPECT_NE(result.err.find(words), std::string::npos) << name << ": " << result.err;
      EXPECT_EQ(test::read_file(output), before) << name << " " << format;
    }
  }
}

}  // namespace
}  // namespace loopgauge::harness
