// SPDX-License-Identifier: Apache-2.0
// `loopgauge bench peers` without a device: what it says about what is missing, and how it reads its script.
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "harness/bench/bench_file.hpp"
#include "harness/bench/child_lines.hpp"
#include "harness/bench/peers_bench.hpp"
#include "harness/io/data_paths.hpp"
#include "models/error.hpp"
#include "optimized/cuda_executor.hpp"
#include "tests/harness_cli/process.hpp"

namespace loopgauge::harness {
namespace {

using test::TemporaryFolder;

// A program that stands in for Python: it gets the script and its options, and does what `body` says.
std::string stand_in(const TemporaryFolder& folder, const std::string& body) {
  const std::string path = (folder / "python").string();
  test::write_file(path, "#!/bin/sh\n" + body);
  std::filesystem::permissions(path, std::filesystem::perms::owner_all);
  return path;
}

TEST(Child, GivesItsLinesAndItsLastError) {
  std::vector<std::string> lines;
  const ChildResult result = run_child(
      {"sh", "-c", "echo one; echo two; printf rest; echo first >&2; echo last >&2; exit 7"}, 10, [&](const std::string& line) { lines.push_back(line); },
      ChildErrors::kept_back);
  EXPECT_EQ(result.exit_code, 7);
  EXPECT_EQ(result.last_error, "last");
  EXPECT_EQ(lines, (std::vector<std::string>{"one", "two"})) << "a line that was not ended is none";
  EXPECT_FALSE(result.timed_out);
}

TEST(Child, IsEndedWhenItRunsTooLong) {
  const ChildResult result = run_child({"sh", "-c", "sleep 60; echo late"}, 0.2, [](const std::string&) { FAIL() << "no line is due"; });
  EXPECT_TRUE(result.timed_out);
  EXPECT_EQ(result.exit_code, 128 + 9);
}

TEST(Child, ThatCannotBeStartedSaysWhy) {
  const ChildResult result = run_child({"/no/such/program"}, 1, [](const std::string&) {});
  EXPECT_EQ(result.exit_code, 127);
  EXPECT_NE(result.last_error.find("No such file"), std::string::npos);
}

TEST(Peers, MissingPartsAreNamedTogether) {
  if (optimized::device_status().available) GTEST_SKIP() << "a CUDA device is present: " << optimized::device_status().description;
  const TemporaryFolder folder;
  const std::string report = (folder / "peers.h5").string();
  const auto no_python = test::run_program({"bench", "peers", "--python", "/no/such/python", "--report", report});
  EXPECT_EQ(no_python.exit_code, 4);
  EXPECT_NE(no_python.err.find("a CUDA device (" + optimized::device_status().description + ")"), std::string::npos) << no_python.err;
  EXPECT_NE(no_python.err.find("'/no/such/python'"), std::string::npos) << no_python.err;
  const auto no_torch =
      test::run_program({"bench", "peers", "--python", stand_in(folder, "echo 'peers.py: no PyTorch to compare with' >&2; exit 4\n"), "--report", report});
  EXPECT_EQ(no_torch.exit_code, 4);
  EXPECT_NE(no_torch.err.find("no PyTorch to compare with"), std::string::npos) << no_torch.err;
  EXPECT_FALSE(std::filesystem::exists(report));
}

TEST(Peers, ShapesAreLookedAtFirst) {
  for (const std::string shape : {"8192", "8192x", "x1", "8192x65", "0x1", "70000x1", "8192x1x1"}) {
    const auto result = test::run_program({"bench", "peers", "--shapes", shape});
    EXPECT_EQ(result.exit_code, 2) << shape << ": " << result.err;
  }
}

TEST(Peers, RowsOfTheScriptStandInTheFile) {
  const TemporaryFolder folder;
  const std::string file = (folder / "peers.h5").string();
  PeersOptions options;
  options.python = stand_in(folder, R"(
echo '{"kind": "peer", "description": "PyTorch 2.11"}'
echo '{"kind": "announce", "what": "decode"}'
row='"what": "decode step", "setting": "dense", "implementation": "compiled", "context": 8192, "batch": 1'
echo "{\"kind\": \"row\", $row, \"samples_us\": [3, 1, 2], \"bytes\": 8000, \"flops\": 0, \"peak_bytes\": 77}"
echo '{"kind": "left_out", "what": "decode step sparse", "reason": "no time"}'
echo 'RuntimeError: the card is gone' >&2
exit 1
)");
  BenchOutput output({.report = file, .output = "json"});
  output.ceilings(4000, 800);
  EXPECT_EQ(run_peers(options, output), "peers.py ended with exit code 1: RuntimeError: the card is gone");
  const BenchReport report = read_bench(file);
  EXPECT_EQ(report.runs.at(0).peer, "PyTorch 2.11");
  ASSERT_EQ(report.rows.size(), 1u);
  EXPECT_EQ(report.rows[0].engine, kTorchEngine);
  EXPECT_DOUBLE_EQ(report.rows[0].median_us, 2);
  EXPECT_DOUBLE_EQ(report.rows[0].floor_us, 0.002);
  EXPECT_EQ(report.memory.at(0).bytes, 77);
  EXPECT_EQ(report.left_out.at(0).what, "pytorch: decode step sparse");
}

TEST(Peers, ALineThatIsNoRowIsAnError) {
  BenchOutput output({.output = "json"});
  for (
      const std::string line :
      {"Traceback (most recent call last):", R"({"kind": "verdict"})", R"({"kind": "row", "what": "decode step"})",
       R"({"kind": "row", "what": "x", "setting": "", "implementation": "", "context": 1, "batch": 1, "samples_us": []})"}) {
    EXPECT_THROW(take_peer_line(line, output), FileError) << line;
  }
}

// Dense and sparse attention, cached and whole, compiled and not: the script's own check of its model on the CPU.
TEST(Peers, TheScriptsModelAgreesWithItself) {
  if (run_child(
          {"python3", "-c", "import torch"}, 120, [](const std::string&) {}, ChildErrors::kept_back)
          .exit_code != 0)
    GTEST_SKIP() << "python3 has no PyTorch";
  std::string lines;
  const ChildResult result = run_child({"python3", peers_script().string(), "--self-check"}, 300, [&](const std::string& line) { lines += line + "\n"; });
  EXPECT_EQ(result.exit_code, 0) << lines;
}

}  // namespace
}  // namespace loopgauge::harness
