// SPDX-License-Identifier: Apache-2.0
// A small bench report with made-up times that are easy to add up.
#pragma once

#include "harness/bench/bench_report.hpp"

namespace loopgauge::test {

harness::BenchReport sample_bench();

}  // namespace loopgauge::test
