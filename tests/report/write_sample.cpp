// SPDX-License-Identifier: Apache-2.0
// write_sample KIND FILE: writes one of the reports made up for tests, for the browser test and for looking at pages by hand.
#include <cstdlib>
#include <iostream>
#include <string>

#include "harness/report/report_file.hpp"
#include "models/error.hpp"
#include "tests/report/large_report.hpp"
#include "tests/report/sample_report.hpp"

namespace {

loopgauge::harness::Report report_of(const std::string& kind) {
  using namespace loopgauge::harness;
  if (kind == "small") return sample_report();
  if (kind == "hostile") return hostile_report();
  if (kind == "empty") {
    Report report = sample_report();
    report.cases.clear();
    return report;
  }
  if (kind == "passed") return large_report({.cases = 640, .all_passed = true, .speculation = true});
  if (kind == "reference") return large_report({.cases = 640, .optimized = false, .all_passed = true});
  if (kind == "large") return large_report({.cases = 5000, .speculation = true});
  throw loopgauge::ConfigError("'" + kind + "' is not a kind of report: small, hostile, empty, passed, reference, large");
}

}  // namespace

int main(int argc, char** argv) {
  try {
    if (argc != 3) throw loopgauge::ConfigError("usage: write_sample KIND FILE");
    loopgauge::harness::write_report(argv[2], report_of(argv[1]));
    return EXIT_SUCCESS;
  } catch (const loopgauge::Error& error) {
    std::cerr << error.what() << "\n";
    return EXIT_FAILURE;
  }
}
