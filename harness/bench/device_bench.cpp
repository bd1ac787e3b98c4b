// SPDX-License-Identifier: Apache-2.0
#include "harness/bench/device_bench.hpp"

#include <utility>

#include "models/memory_category.hpp"

namespace loopgauge::harness {

namespace {

std::vector<BenchMemory> memory_rows(const optimized::MemoryUsage& usage) {
  std::vector<BenchMemory> rows;
  for (const auto& [phase, bytes] : {std::pair{"steady", &usage.in_use}, {"peak", &usage.peak}}) {
    for (int category = 0; category < kMemoryCategories; ++category) {
      const std::size_t count = (*bytes)[static_cast<std::size_t>(category)];
      if (count > 0) rows.push_back({0, std::string(to_string(static_cast<MemoryCategory>(category))), phase, static_cast<std::int64_t>(count)});
    }
  }
  return rows;
}

BenchRow own_row(const optimized::BenchRow& measured) {
  BenchRow row;
  row.what = measured.what;
  row.setting = measured.setting;
  row.implementation = measured.implementation;
  row.context = measured.context;
  row.batch = measured.batch;
  row.repeats = measured.timing.repeats;
  row.median_us = measured.timing.median_us;
  row.minimum_us = measured.timing.minimum_us;
  row.maximum_us = measured.timing.maximum_us;
  row.bytes = measured.bytes;
  row.flops = measured.flops;
  return row;
}

}  // namespace

void run_device_bench(const optimized::StepBenchOptions& options, BenchOutput& output) {
  optimized::StepBenchObserver observer;
  observer.announce = [&](const std::string& name) { output.announce(name); };
  observer.ceilings = [&](const optimized::Ceilings& ceilings) { output.ceilings(ceilings.read_gb_per_s, ceilings.bf16_tflop_per_s); };
  observer.left_out = [&](const std::string& name, const std::string& reason) { output.left_out(name, reason); };
  observer.row = [&](const optimized::BenchRow& row) {
    output.row(own_row(row), row.timing.samples_us, row.memory ? memory_rows(*row.memory) : std::vector<BenchMemory>{});
  };
  optimized::run_step_bench(optimized::ouro_1_4b_shape(), options, observer);
}

}  // namespace loopgauge::harness
