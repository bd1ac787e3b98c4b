// SPDX-License-Identifier: Apache-2.0
// When two reports belong to one request, and putting shards together.
#pragma once

#include <string>
#include <vector>

#include "harness/report/report.hpp"

namespace loopgauge::harness {

// What must agree for rows of two reports to stand in one: sources, compiler, model, request, options, seed, device.
// One sentence per difference: "model_sha256 is 1f.. in the report and 2a.. now".
std::vector<std::string> request_differences(const ReportMeta& a, const ReportMeta& b, const std::string& name_a,
                                             const std::string& name_b);

struct NamedReport {
  std::string name;  // the file, for messages
  Report report;
};

// Rows of all reports in the order of the unsharded request. Throws ConfigError when there are fewer than two, when requests differ, or
// when two of them hold the same row, FileError when a row is not of its own report's request; each sentence names the files and what they
// disagree on.
Report merge_reports(const std::vector<NamedReport>& reports);

}  // namespace loopgauge::harness
