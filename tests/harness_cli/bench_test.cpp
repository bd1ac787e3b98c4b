// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "harness/bench/reference_bench.hpp"
#include "models/error.hpp"
#include "optimized/cuda_executor.hpp"
#include "tests/harness_cli/process.hpp"

namespace loopgauge::harness {
namespace {

TEST(Spread, MedianAndRange) {
  EXPECT_EQ(spread({3}).median, 3);
  EXPECT_EQ(spread({4, 1, 2}).median, 2);
  EXPECT_EQ(spread({4, 1, 2, 8}).median, 3);
  EXPECT_EQ(spread({4, 1, 2}).minimum, 1);
  EXPECT_EQ(spread({4, 1, 2}).maximum, 4);
  EXPECT_THROW(spread({}), ConfigError);
}

TEST(Bench, JsonGivesOrderedPositiveRates) {
  const auto result = test::run_program(
      {"bench", "--switches", "t0s0q0", "t1s1q1", "--context", "65", "--new-tokens", "2", "--repeat", "2", "--output", "json"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const auto json = nlohmann::json::parse(result.out);
  EXPECT_EQ(json.at("executor"), "reference");
  EXPECT_EQ(json.at("seed"), 1);
  EXPECT_GE(json.at("threads").get<int>(), 1);
  ASSERT_EQ(json.at("rows").size(), 2u);
  EXPECT_EQ(json.at("rows")[0].at("settings"), "t0s0q0");
  EXPECT_EQ(json.at("rows")[1].at("settings"), "t1s1q1:rolling:serial_aligned");
  for (const auto& row : json.at("rows")) {
    for (const char* rate : {"prefill_tokens_per_second", "decode_tokens_per_second"}) {
      EXPECT_GT(row.at(rate).at("minimum").get<double>(), 0);
      EXPECT_LE(row.at(rate).at("minimum").get<double>(), row.at(rate).at("median").get<double>());
      EXPECT_LE(row.at(rate).at("median").get<double>(), row.at(rate).at("maximum").get<double>());
    }
  }
}

TEST(Bench, CsvHasAsManyFieldsAsItsHeader) {
  const auto result =
      test::run_program({"bench", "--switches", "t0s0q0", "--context", "3", "--new-tokens", "1", "--repeat", "1", "--output", "csv"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const std::size_t line_end = result.out.find('\n');
  const auto commas = [](const std::string& text) { return std::count(text.begin(), text.end(), ','); };
  EXPECT_EQ(commas(result.out.substr(0, line_end)), commas(result.out.substr(line_end + 1)));
}

TEST(Bench, RefusesWhatItCannotMeasure) {
  EXPECT_EQ(test::run_program({"bench", "--context", "0"}).exit_code, 2);
  EXPECT_EQ(test::run_program({"bench", "--repeat", "0"}).exit_code, 2);
  EXPECT_EQ(test::run_program({"bench", "--context", "4096"}).exit_code, 2);
  EXPECT_EQ(test::run_program({"bench", "--executor", "fast"}).exit_code, 2);
  if (optimized::device_status().available) GTEST_SKIP() << "a CUDA device is present: " << optimized::device_status().description;
  const auto refused = test::run_program({"bench", "--executor", "optimized"});
  EXPECT_EQ(refused.exit_code, 4);
  EXPECT_NE(refused.err.find(optimized::device_status().description), std::string::npos) << refused.err;
}

// Values are looked at before a device is, and what would have no effect is refused.
TEST(DeviceBench, RefusesWhatItCannotMeasure) {
  for (const std::vector<std::string>& arguments : std::vector<std::vector<std::string>>{
           {"step", "--contexts", "-5"},
           {"step", "--batches", "65"},
           {"step", "--switches", "t2s0q0"},
           {"step", "--repeats", "0"},
           {"step", "--append"},
           {"step", "--output", "yaml"},
           {"step", "--prompts", "512"},
           {"ops", "--what", "everything"},
           {"prefill", "--prefill-rows", "300"},
           {"prefill", "--prompts", "100"},
           {"--context", "512", "step"},
           {"--what", "linear"},
           {"--shape", "ouro-1.4b"},
       }) {
    std::vector<std::string> command{"bench"};
    command.insert(command.end(), arguments.begin(), arguments.end());
    const auto result = test::run_program(command);
    EXPECT_EQ(result.exit_code, 2) << arguments[0] << " " << arguments[1] << ": " << result.err;
  }
}

TEST(DeviceBench, WithoutADeviceSaysSoAndWritesNothing) {
  if (optimized::device_status().available) GTEST_SKIP() << "a CUDA device is present: " << optimized::device_status().description;
  const test::TemporaryFolder folder;
  for (const std::string verb : {"ops", "step", "prefill"}) {
    const auto result = test::run_program({"bench", verb, "--report", (folder / "bench.h5").string()});
    EXPECT_EQ(result.exit_code, 4) << verb;
    EXPECT_NE(result.err.find(optimized::device_status().description), std::string::npos) << result.err;
    EXPECT_FALSE(std::filesystem::exists(folder / "bench.h5"));
  }
}

}  // namespace
}  // namespace loopgauge::harness
