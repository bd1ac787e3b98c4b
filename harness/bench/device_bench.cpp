// SPDX-License-Identifier: Apache-2.0
#include "harness/bench/device_bench.hpp"

#include <cstdio>
#include <iostream>
#include <nlohmann/json.hpp>

#include "harness/progress.hpp"
#include "harness/provenance.hpp"

namespace loopgauge::harness {
namespace {

using optimized::BenchRow;
using optimized::StepBenchResult;

double gb_per_s(const BenchRow& row) { return row.bytes / row.timing.median_us / 1e3; }
double tflop_per_s(const BenchRow& row) { return row.flops / row.timing.median_us / 1e6; }

void print_console(const StepBenchResult& result) {
  std::printf("device bench at the shape of Ouro-1.4B, random weights and K/V\n%s\n", optimized::device_status().description.c_str());
  std::printf("ceilings of this run: read %.0f GB/s, BF16 product %.0f TFLOP/s\n", result.ceilings.read_gb_per_s, result.ceilings.bf16_tflop_per_s);
  std::printf("times in microseconds, median [minimum, maximum]; share of the read ceiling, or of the product ceiling where only FLOPs are counted\n\n");
  std::printf("%-26s %-18s %8s %6s %38s %9s %9s %7s\n", "what", "setting", "context", "batch", "time", "GB/s", "TFLOP/s", "share");
  for (const BenchRow& row : result.rows) {
    const double share = row.bytes > 0 ? gb_per_s(row) / result.ceilings.read_gb_per_s : tflop_per_s(row) / result.ceilings.bf16_tflop_per_s;
    std::printf("%-26s %-18s %8d %6d %12.1f [%10.1f, %10.1f] %9.0f %9.1f %6.1f%%\n", row.what.c_str(), row.setting.c_str(), row.context, row.batch,
                row.timing.median_us, row.timing.minimum_us, row.timing.maximum_us, gb_per_s(row), tflop_per_s(row), 100 * share);
  }
  for (const std::string& reason : result.left_out) std::printf("left out: %s\n", reason.c_str());
  std::fflush(stdout);
}

void print_json(const StepBenchResult& result) {
  nlohmann::ordered_json json{{"executor", "optimized"},
                              {"shape", "ouro-1.4b"},
                              {"device", optimized::device_status().description},
                              {"tool_version", build_info().version},
                              {"revision", build_info().revision},
                              {"read_gb_per_s", result.ceilings.read_gb_per_s},
                              {"bf16_tflop_per_s", result.ceilings.bf16_tflop_per_s},
                              {"rows", nlohmann::ordered_json::array()},
                              {"left_out", result.left_out}};
  for (const BenchRow& row : result.rows) {
    json["rows"].push_back({{"what", row.what},
                            {"setting", row.setting},
                            {"context", row.context},
                            {"batch", row.batch},
                            {"repeats", row.timing.repeats},
                            {"median_us", row.timing.median_us},
                            {"minimum_us", row.timing.minimum_us},
                            {"maximum_us", row.timing.maximum_us},
                            {"bytes", row.bytes},
                            {"flops", row.flops}});
  }
  std::cout << json.dump(2) << "\n";
}

void print_csv(const StepBenchResult& result) {
  std::cout << "what,setting,context,batch,repeats,median_us,minimum_us,maximum_us,bytes,flops,read_gb_per_s_ceiling,bf16_tflop_per_s_ceiling\n";
  for (const BenchRow& row : result.rows) {
    std::cout << row.what << "," << row.setting << "," << row.context << "," << row.batch << "," << row.timing.repeats << "," << row.timing.median_us
              << "," << row.timing.minimum_us << "," << row.timing.maximum_us << "," << row.bytes << "," << row.flops << ","
              << result.ceilings.read_gb_per_s << "," << result.ceilings.bf16_tflop_per_s << "\n";
  }
}

}  // namespace

void run_device_bench(const optimized::StepBenchOptions& options, const std::string& output) {
  Progress progress("bench", 0);
  const StepBenchResult result =
      optimized::run_step_bench(optimized::ouro_1_4b_shape(), options, [&](const std::string& what) { progress.update(0, what); });
  if (output == "json") {
    print_json(result);
  } else if (output == "csv") {
    print_csv(result);
  } else {
    print_console(result);
  }
}

}  // namespace loopgauge::harness
