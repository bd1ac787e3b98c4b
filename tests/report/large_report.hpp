// SPDX-License-Identifier: Apache-2.0
// Reports made up for the renderers: plausible numbers from a fixed seed, no measurement.
#pragma once

#include <string>

#include "harness/report/report.hpp"

namespace loopgauge::harness {

struct LargeReport {
  int cases = 5000;
  bool optimized = true;     // with a column that ran on a device; else that column is not run
  bool all_passed = false;   // else a few rows fail, one could not be judged and some are skipped
  int drift_rows = 48;       // of a serial case
  bool speculation = false;  // acceptance tables
  unsigned seed = 1;
};
Report large_report(const LargeReport& options = {});

// Names, reasons and details that try to be markup, scripts, links, mentions, control sequences and broken UTF-8.
Report hostile_report();

}  // namespace loopgauge::harness
