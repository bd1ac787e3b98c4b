// SPDX-License-Identifier: Apache-2.0
// The device's times as a table, JSON or CSV.
#pragma once

#include <string>

#include "optimized/bench/step_bench.hpp"

namespace loopgauge::harness {

// Measures at the shape of Ouro-1.4B and prints to standard output; `output` is console, json or csv. Throws UnsupportedError without a
// device.
void run_device_bench(const optimized::StepBenchOptions& options, const std::string& output);

}  // namespace loopgauge::harness
