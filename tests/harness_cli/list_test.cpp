// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "harness/case.hpp"
#include "harness/io/trace_file.hpp"
#include "tests/harness_cli/process.hpp"

namespace loopgauge::harness {
namespace {

using test::run_program;

std::vector<std::string> lines_of(const std::string& text) {
  std::istringstream stream(text);
  std::vector<std::string> lines;
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

std::vector<std::string> list(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), "list");
  const auto result = run_program(arguments);
  EXPECT_EQ(result.exit_code, 0) << result.err;
  return lines_of(result.out);
}

TEST(List, EveryLineIsACaseId) {
  const auto ids = list({"--set", "smoke"});
  ASSERT_FALSE(ids.empty());
  for (const std::string& id : ids) EXPECT_EQ(case_id(parse_case_id(id)), id);
  EXPECT_EQ(std::set<std::string>(ids.begin(), ids.end()).size(), ids.size());
  EXPECT_EQ(ids, list({}));  // smoke is the default
}

TEST(List, JsonSaysTheSame) {
  const auto ids = list({"--set", "smoke"});
  const auto result = run_program({"list", "--set", "smoke", "--output", "json"});
  const auto json = nlohmann::json::parse(result.out);
  ASSERT_EQ(json.size(), ids.size());
  for (std::size_t i = 0; i < ids.size(); ++i) {
    EXPECT_EQ(json[i].at("id"), ids[i]);
    EXPECT_TRUE(std::filesystem::is_regular_file(json[i].at("trace_file").get<std::string>()));
  }
}

TEST(List, TheCiSetCoversExitsByThresholdAndByTrace) {
  EXPECT_FALSE(list({"--set", "ci", "--filter", "*:exit=trace/*"}).empty());
  EXPECT_FALSE(list({"--set", "ci", "--filter", "*:exit=threshold*/*"}).empty());
}

// What is handed off is everything that `ci` replays.
TEST(List, TheHandoffsOfTheCiSetAreItsCasesWithAHandoff) {
  std::vector<std::string> expected;
  for (const std::string& id : list({"--set", "ci"})) {
    Case value = parse_case_id(id);
    value.mode.pd = true;
    expected.push_back(case_id(value));
  }
  EXPECT_EQ(list({"--set", "pd-ci"}), expected);
  EXPECT_EQ(expected.size(), 480u);
}

TEST(List, FiltersAreAlternatives) {
  const auto serial = list({"--filter", "serial/t0s0q0/*"});
  const auto both = list({"--filter", "serial/t0s0q0/*", "split/t0s0q0/*"});
  ASSERT_FALSE(serial.empty());
  EXPECT_EQ(both.size(), 2 * serial.size());
}

TEST(List, ShardsPartitionTheSet) {
  auto all = list({});
  std::vector<std::string> together;
  for (const char* shard : {"1/3", "2/3", "3/3"}) {
    const auto part = list({"--shard", shard});
    together.insert(together.end(), part.begin(), part.end());
  }
  std::sort(all.begin(), all.end());
  std::sort(together.begin(), together.end());
  EXPECT_EQ(all, together);
}

TEST(List, TraceFilesInsteadOfASet) {
  const std::string trace = std::string(LOOPGAUGE_SOURCE_DIR) + "/data/traces/seven.h5";
  EXPECT_EQ(list({"--traces", trace, "--mode", "split.p64"}).size(), 16u);
  // Two files with one trace name would give two cases one id.
  const test::TemporaryFolder folder;
  std::filesystem::copy_file(trace, folder / "copy.h5");
  const auto twice = run_program({"list", "--traces", trace, (folder / "copy.h5").string()});
  EXPECT_EQ(twice.exit_code, 2);
  EXPECT_NE(twice.err.find("same name 'seven'"), std::string::npos) << twice.err;
}

TEST(List, IllegalCombinationsWithTheirReason) {
  const auto lines = list({"--illegal"});
  ASSERT_EQ(lines.size(), illegal_combinations("TRACE").size());
  for (const std::string& line : lines) {
    EXPECT_EQ(std::count(line.begin(), line.end(), '\t'), 2) << line;
    EXPECT_NE(line.find("\tillegal\t"), std::string::npos) << line;
  }
  const auto json = nlohmann::json::parse(run_program({"list", "--illegal", "--output", "json"}).out);
  EXPECT_EQ(json.size(), lines.size());
}

TEST(List, Refusals) {
  EXPECT_EQ(run_program({"list", "--filter", "nothing-matches"}).exit_code, 2);
  EXPECT_EQ(run_program({"list", "--shard", "5/4"}).exit_code, 2);
  EXPECT_EQ(run_program({"list", "--mode", "sideways"}).exit_code, 2);
  EXPECT_EQ(run_program({"list", "--mode", "serial", "serial"}).exit_code, 2);
  EXPECT_EQ(run_program({"list", "--mode", "pd+preempt"}).exit_code, 2);
  EXPECT_EQ(run_program({"list", "--output", "xml"}).exit_code, 2);
  EXPECT_EQ(run_program({"list", "--illegal", "--set", "ci"}).exit_code, 2);
  const auto unknown = run_program({"list", "--set", "no-such-set"});
  EXPECT_EQ(unknown.exit_code, 3);
  EXPECT_NE(unknown.err.find("set 'no-such-set' is not one of ci, full, modes, pd, "), std::string::npos) << unknown.err;
  EXPECT_EQ(run_program({"list", "--traces", "no-such-file.h5"}).exit_code, 3);
}

TEST(List, WhatALineOfASetFileSaysIsRefusedByFileAndLine) {
  const test::TemporaryFolder folder;
  const std::filesystem::path path = folder / "mine.txt";
  const auto refusal = [&](const std::string& text) {
    std::ofstream(path) << text;
    const auto result = run_program({"list", "--set", path.string()});
    EXPECT_EQ(result.exit_code, 3) << result.err;
    return result.err;
  };
  const std::string place = path.string() + ":2: ";
  EXPECT_NE(refusal("# mine\ntrace seven modes sideways\n").find(place), std::string::npos);
  EXPECT_NE(refusal("# mine\ntrace no-such-trace\n").find(place), std::string::npos);
  EXPECT_NE(refusal("# mine\ncase serial/t0s0q0\n").find(place), std::string::npos);
  EXPECT_NE(refusal("# mine\ncase pd+preempt/t0s0q0/seven\n").find(place), std::string::npos);
  EXPECT_NE(refusal("# mine\ncase serial/t0s0q0/no-such-trace\n").find(place), std::string::npos);
}

}  // namespace
}  // namespace loopgauge::harness
