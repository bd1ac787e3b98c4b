// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "harness/bench/bench_file.hpp"
#include "harness/bench/end_to_end_bench.hpp"
#include "harness/bench/reference_bench.hpp"
#include "harness/bench/render_bench.hpp"
#include "harness/io/data_paths.hpp"
#include "models/checkpoint.hpp"
#include "models/error.hpp"
#include "optimized/bench/step_bench.hpp"
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
           {"peers", "--what", "linear"},
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

TEST(EndToEndBench, ServesOnTheReferenceAndChecksEveryToken) {
  const test::TemporaryFolder folder;
  const std::string file = (folder / "e2e.h5").string();
  const auto result = test::run_program({"bench", "e2e", "--executor", "reference", "--load", "high,failures", "--requests", "3", "--switches", "t1s1q1",
                                         "--new-tokens", "3", "--prompts", "20,30", "--check", "--report", file, "--output", "csv"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const BenchReport report = read_bench(file);
  EXPECT_EQ(report.meta.shape, "ouro-tiny, model " + load_checkpoint(default_checkpoint()).sha256.substr(0, 12));
  ASSERT_EQ(report.end_to_end.size(), 2u);
  const EndToEndRow &high = report.end_to_end[0], &failures = report.end_to_end[1];
  EXPECT_EQ(high.finished, 3);
  EXPECT_EQ(high.failed, 0);
  EXPECT_GT(high.ttft_ms_p50, 0);
  EXPECT_LT(high.ttft_ms_p50, high.latency_ms_p50);
  EXPECT_TRUE(std::isnan(high.ttft_ms_p90) && std::isnan(high.latency_ms_p99)) << "of three requests";
  EXPECT_NE(high.note.find("3 of 3 requests have the tokens that they have alone"), std::string::npos) << high.note;
  EXPECT_EQ(failures.requests, 4);
  EXPECT_EQ(failures.refused, 1);
  EXPECT_EQ(failures.finished + failures.failed, 4);
  EXPECT_NE(failures.note.find("bytes of device memory"), std::string::npos) << failures.note;
}

TEST(EndToEndBench, AMistakeInTheCallReplacesNoReport) {
  const test::TemporaryFolder folder;
  const std::string file = (folder / "e2e.h5").string();
  const std::vector<std::string> call{"bench", "e2e", "--executor", "reference", "--load", "low", "--requests", "1", "--switches", "t0s0q0", "--new-tokens", "2", "--report", file};
  ASSERT_EQ(test::run_program(call).exit_code, 0);
  std::vector<std::string> mistaken = call;
  mistaken.insert(mistaken.end(), {"--prompts", "16000"});
  EXPECT_EQ(test::run_program(mistaken).exit_code, 2);
  const BenchReport report = read_bench(file);
  EXPECT_EQ(report.runs.size(), 1u);
  EXPECT_EQ(report.end_to_end.size(), 1u);
}

TEST(EndToEndBench, WhatIsLeftOutMakesTheCallIncomplete) {
  const auto result = test::run_program({"bench", "e2e", "--executor", "reference", "--load", "fit", "--switches", "t0s0q0"});
  EXPECT_EQ(result.exit_code, 5) << result.err;
  EXPECT_NE(result.out.find("left out: fit"), std::string::npos) << result.out;
}

TEST(EndToEndBench, RefusesWhatItCannotServe) {
  for (const auto& [option, value] : {std::pair{"--load", "many"}, {"--policy", "sometimes"}, {"--requests", "0"}, {"--prompts", "0"}, {"--in-flight", "0"},
                                      {"--switches", "t2s0q0"}, {"--decode-rows", "65"}, {"--live", "257"}, {"--rate", "-1"}}) {
    EXPECT_EQ(test::run_program({"bench", "e2e", "--executor", "reference", option, value}).exit_code, 2) << option;
  }
  // Longer than the model's positions.
  const auto too_long = test::run_program({"bench", "e2e", "--executor", "reference", "--prompts", "9000", "--requests", "1"});
  EXPECT_EQ(too_long.exit_code, 2) << too_long.err;
  // The reference has nothing in flight and captures nothing; a refused prompt beside prompts that fill the model has no room.
  const auto refusal = [](std::vector<std::string> options) {
    options.insert(options.begin(), {"bench", "e2e", "--executor", "reference", "--switches", "t0s0q0"});
    const auto result = test::run_program(options);
    EXPECT_EQ(result.exit_code, 2) << result.err;
    return result.err;
  };
  EXPECT_NE(refusal({"--in-flight", "2"}).find("nothing in flight"), std::string::npos);
  EXPECT_NE(refusal({"--graph"}).find("captures no steps"), std::string::npos);
  EXPECT_NE(refusal({"--load", "failures", "--prompts", "2044"}).find("--prompts takes shorter ones"), std::string::npos);
  if (optimized::device_status().available) GTEST_SKIP() << "a CUDA device is present: " << optimized::device_status().description;
  const auto refused = test::run_program({"bench", "e2e"});
  EXPECT_EQ(refused.exit_code, 4);
  EXPECT_NE(refused.err.find(optimized::device_status().description), std::string::npos) << refused.err;
}

TEST(EndToEndBench, ByPredictionMoreThanFiveTimesAsManyPromptsFitWithEverythingOn) {
  const ModelConfig model = optimized::ouro_1_4b_shape();
  LoadOptions options;
  options.requests = 1;
  options.prompt_tokens = {8192};
  options.new_tokens = 17;
  const ServingLoad load = make_load(options, model.vocab);
  const auto fit = [&](const char* switches, EncodingPolicy policy = EncodingPolicy::rolling) {
    AlgorithmConfig config;
    apply_switches(config, switches);
    config.kv_residual_quantization.policy = policy;
    return most_that_fit(predicted_bytes(model, EffectiveConfig::resolve(config, model), load, 1).front(), 144'000'000'000);
  };
  EXPECT_EQ(fit("t0s0q0"), 22);  // 6.49 GB each: 129 pages of four planes
  // The last prompt needs its BF16 rows until it is complete, under streaming those of a window.
  EXPECT_EQ(fit("t1s1q1"), 118);
  EXPECT_EQ(fit("t1s1q1", EncodingPolicy::fixed_prompt), 122);
  EXPECT_EQ(fit("t1s1q1", EncodingPolicy::streaming), 128);
  EXPECT_EQ(most_that_fit({10, 4}, 9), 0);
  EXPECT_EQ(most_that_fit({10, 4}, 10), 1);
  EXPECT_EQ(most_that_fit({10, 4}, 18), 3);
}

TEST(EndToEndBench, SummarizesFinishedRequestsAndCountsTheOthers) {
  LoadOptions options;
  options.requests = 3;
  options.requests_per_s = 0;
  options.prompt_tokens = {5};
  options.new_tokens = 3;
  const ServingLoad load = make_load(options, 10);
  ServingResult result;
  result.requests.resize(3);
  result.requests[0].outcome = ServedOutcome::finished;
  result.requests[0].token_s = {1.0, 1.5, 2.5};
  result.requests[0].end_s = 2.5;
  result.requests[1].outcome = ServedOutcome::finished;
  result.requests[1].token_s = {2.0, 3.0, 4.0};
  result.requests[1].end_s = 4.0;
  result.requests[2].outcome = ServedOutcome::cancelled;
  result.requests[2].end_s = 9;
  const EndToEndRow row = summarize(result, load);
  EXPECT_EQ(row.requests, 3);
  EXPECT_EQ(row.finished, 2);
  EXPECT_EQ(row.failed, 1);
  EXPECT_EQ(row.cancelled, 1);
  EXPECT_EQ(row.prompt_tokens, 5);
  EXPECT_DOUBLE_EQ(row.ttft_ms_p50, 1000);
  EXPECT_TRUE(std::isnan(row.ttft_ms_p99)) << "two requests have no 99th percentile";
  EXPECT_DOUBLE_EQ(row.tpot_ms_p50, 750);
  EXPECT_DOUBLE_EQ(row.latency_ms_p50, 2500);
  EXPECT_NE(bench_line(row).find(" 1000.0 - - "), std::string::npos) << bench_line(row);
  EXPECT_DOUBLE_EQ(row.token_gap_ms_p50, 1000);
  EXPECT_DOUBLE_EQ(row.duration_s, 4);
  EXPECT_DOUBLE_EQ(row.output_tokens_per_s, 1.5);
  EXPECT_EQ(row.note, "1 given up");
}

TEST(EndToEndBench, PercentilesOfTheTailNeedAValueBeyondThem) {
  for (const int requests : {9, 10, 99, 100}) {
    ServingLoad load;
    ServingResult result;
    for (int i = 0; i < requests; ++i) {
      load.trace.requests.emplace_back().max_new_tokens = 1;
      ServedRequest& request = result.requests.emplace_back();
      request.outcome = ServedOutcome::finished;
      request.token_s = {1.0 + i};
      request.end_s = 1.0 + i;
    }
    const EndToEndRow row = summarize(result, load);
    EXPECT_DOUBLE_EQ(row.ttft_ms_p50, 1e3 * ((requests + 1) / 2));
    EXPECT_EQ(std::isnan(row.ttft_ms_p90), requests < 10);
    EXPECT_EQ(std::isnan(row.ttft_ms_p99), requests < 100);
    if (requests == 100) {
      EXPECT_DOUBLE_EQ(row.ttft_ms_p99, 99e3);
    }
  }
}

// What is timed has one name: a prompt of one group of positions is not the sealing of one.
TEST(DeviceBench, NoTwoRowsHaveTheSameKey) {
  if (!optimized::device_status().available) GTEST_SKIP() << optimized::device_status().description;
  const test::TemporaryFolder folder;
  const std::string file = (folder / "ops.h5").string();
  const auto result = test::run_program({"bench", "ops", "--what", "encode", "--contexts", "64", "--batches", "1", "--switches", "t0s0q1", "--repeats", "2", "--report", file});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  std::set<std::string> names;
  const BenchReport report = read_bench(file);
  for (const BenchRow& row : report.rows) names.insert(row.what);
  EXPECT_EQ(names, (std::set<std::string>{"encode", "encode.prompt"}));
  EXPECT_EQ(report.rows.size(), 2u);
}

TEST(DeviceBench, TheMedianOfAnEvenNumberIsTheMeanOfTheMiddleTwo) {
  EXPECT_EQ(optimized::timing_of({4, 1, 3, 8}).median_us, 3.5);
  EXPECT_EQ(optimized::timing_of({4, 1, 3}).median_us, 3);
  EXPECT_EQ(optimized::timing_of({4, 1, 3, 8}).samples_us, (std::vector<double>{4, 1, 3, 8}));
}

}  // namespace
}  // namespace loopgauge::harness
