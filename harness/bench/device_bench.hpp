// SPDX-License-Identifier: Apache-2.0
// The step bench of the CUDA runtime, its rows handed on as they come.
#pragma once

#include "harness/bench/bench_output.hpp"
#include "optimized/bench/step_bench.hpp"

namespace loopgauge::harness {

// Measures at the shape of Ouro-1.4B. Throws UnsupportedError without a device, Interrupted between rows.
void run_device_bench(const optimized::StepBenchOptions& options, BenchOutput& output);

}  // namespace loopgauge::harness
