// SPDX-License-Identifier: Apache-2.0
#include "tests/harness_cli/sample_bench.hpp"

#include <string>

namespace loopgauge::test {

using harness::BenchReport;
using harness::BenchRow;

BenchReport sample_bench() {
  BenchReport report;
  report.meta = {"0.1.0", "abc", "GNU 12.2.0, Release", "a device", "a processor", "ouro-1.4b", 24};
  report.runs = {{"loopgauge bench ops", "2026-11-30T10:00:00Z", "2026-11-30T10:01:00Z", true, 4000, 800, ""},
                 {"loopgauge bench peers", "2026-11-30T10:02:00Z", "2026-11-30T10:03:00Z", false, 4000, 800, "torch <b>2.11</b>, a device"}};
  const auto add = [&](std::int64_t run, const std::string& what, const std::string& setting, double us, double bytes = 0) {
    BenchRow row{.run = run,
                 .what = what,
                 .setting = setting,
                 .context = 8192,
                 .batch = 1,
                 .repeats = 3,
                 .median_us = us,
                 .minimum_us = us - 1,
                 .maximum_us = us + 1,
                 .bytes = bytes};
    set_floor(row, report.runs[static_cast<std::size_t>(run)]);
    report.rows.push_back(row);
  };
  add(0, "decode step", "t0s0q0", 6000, 12e9);
  report.memory = {{0, "weights", "peak", 5'000'000'000}, {0, "BF16 planes", "peak", 6'000'000'000}};
  report.samples = {{0, 0, 6001}, {0, 1, 5999}, {0, 2, 6000}};
  add(0, "decode step, launched", "t0s0q0", 6500, 12e9);
  add(0, "decode step", "t1s1q1", 5000, 10e9);
  add(0, "decode step, launched", "t1s1q1", 5600, 10e9);
  add(0, "decode step", "t1s0q0", 5900, 11e9);
  for (const std::string loop : {"1", "2", "3", "4"}) add(0, "attention_decode.loop" + loop, "t0s0q0", 20, 60e6);
  add(0, "attention_decode.loop1", "t1s1q1", 10, 10e6);
  add(0, "reference_statistics", "t1s1q1", 15, 20e6);
  add(0, "select_keys", "t1s1q1", 5);
  add(0, "reference_contribution", "t1s1q1", 3);
  add(0, "sparse_correction.loop3", "t1s1q1", 6);
  add(0, "sparse_correction.loop4", "t1s1q1", 7);
  for (const std::string loop : {"1", "2", "3", "4"}) add(0, "attention_decode.loop" + loop, "t1s0q0", 18, 50e6);
  add(0, "decode step without attention", "", 3600, 10e9);
  report.rows.back().context = 0;
  add(0, "head", "", 100, 200e6);
  report.rows.back().context = 0;
  add(0, "encode", "t0s0q1", 64);
  report.rows.back().context = 64;
  add(1, "decode step", "t0s0q0", 6000, 12e9);
  add(1, "decode step", "dense", 9000, 12e9);
  report.rows.back().engine = harness::kTorchEngine;
  report.rows.back().implementation = "cuDNN, CUDA graph";
  report.end_to_end = {{.run = 0,
                        .setting = "t1s1q1",
                        .mode = "async+graph",
                        .load = "closed, 8 at once",
                        .requests = 9,
                        .finished = 8,
                        .failed = 1,
                        .ttft_ms_p50 = 1,
                        .ttft_ms_p90 = 2,
                        .ttft_ms_p99 = 3,
                        .tpot_ms_p50 = 4,
                        .tpot_ms_p90 = 5,
                        .tpot_ms_p99 = 6,
                        .latency_ms_p50 = 7,
                        .latency_ms_p90 = 8,
                        .latency_ms_p99 = 9,
                        .output_tokens_per_s = 123,
                        .requests_per_s = 2,
                        .duration_s = 4,
                        .note = "1 request: no memory"}};
  report.left_out = {{0, "decode t0s0q0, context 32768, batch 8", "device memory <full>"}};
  return report;
}

}  // namespace loopgauge::test
