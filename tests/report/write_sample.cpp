// SPDX-License-Identifier: Apache-2.0
// write_sample KIND FILE: writes one of the reports made up for tests, as its page when FILE ends with .html. For the browser test, and for
// looking at pages by hand.
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <string>

#include "harness/report/render.hpp"
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
  if (kind == "python") return large_report({.cases = 28, .all_passed = true});
  if (kind == "passed") return large_report({.cases = 640, .all_passed = true, .speculation = true});
  if (kind == "reference") return large_report({.cases = 640, .optimized = false, .all_passed = true});
  if (kind == "large") return large_report({.cases = 5000, .speculation = true});
  throw loopgauge::ConfigError("'" + kind + "' is not a kind of report: small, hostile, empty, python, passed, reference, large");
}

}  // namespace

int main(int argc, char** argv) {
  try {
    if (argc != 3) throw loopgauge::ConfigError("usage: write_sample KIND FILE");
    const std::string file = argv[2];
    const loopgauge::harness::Report report = report_of(argv[1]);
    if (!file.ends_with(".html")) {
      loopgauge::harness::write_report(file, report);
      return EXIT_SUCCESS;
    }
    std::ofstream out(file, std::ios::binary);
    loopgauge::harness::render_html(report, out);
    return out.flush() ? EXIT_SUCCESS : EXIT_FAILURE;
  } catch (const loopgauge::Error& error) {
    std::cerr << error.what() << "\n";
    return EXIT_FAILURE;
  }
}
