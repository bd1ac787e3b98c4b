// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>

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
  // The device bench: values are looked at before a device is, and what would have no effect is refused.
  for (const auto& [option, value] : {std::pair{"--contexts", "-5"}, {"--batches", "65"}, {"--prefill-rows", "300"}, {"--prompts", "100"}, {"--switches", "t2s0q0"},
                                      {"--what", "everything"}, {"--seed", "3"}, {"--context", "512"}}) {
    const auto shaped = test::run_program({"bench", "--executor", "optimized", "--shape", "ouro-1.4b", option, value});
    EXPECT_EQ(shaped.exit_code, 2) << option << ": " << shaped.err;
  }
  EXPECT_EQ(test::run_program({"bench", "--what", "decode"}).exit_code, 2);
  if (optimized::device_status().available) GTEST_SKIP() << "a CUDA device is present: " << optimized::device_status().description;
  const auto refused = test::run_program({"bench", "--executor", "optimized"});
  EXPECT_EQ(refused.exit_code, 4);
  EXPECT_NE(refused.err.find(optimized::device_status().description), std::string::npos) << refused.err;
}

}  // namespace
}  // namespace loopgauge::harness
