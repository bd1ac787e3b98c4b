// SPDX-License-Identifier: Apache-2.0
// Bench reports: what is written is read again, what is not one is refused by name, and a run that is cut off keeps its rows.
#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "harness/bench/bench_file.hpp"
#include "harness/bench/bench_output.hpp"
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

}  // namespace
}  // namespace loopgauge::harness
