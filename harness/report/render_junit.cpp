// SPDX-License-Identifier: Apache-2.0
// JUnit XML: a suite per executor, a test case per row. What decides the verdict is red: a failure, an error, and a row that was not run
// although it was asked for (type "not_run"), since readers of JUnit take a skipped test for a good one. Rows that do not decide are
// skipped.
#include <algorithm>
#include <cmath>
#include <ostream>
#include <string>
#include <vector>

#include "harness/report/aggregates.hpp"
#include "harness/report/markup.hpp"
#include "harness/report/render.hpp"
#include "harness/report/report_file.hpp"
#include "harness/report/schema.hpp"
#include "harness/report/summary.hpp"

namespace loopgauge::harness {

namespace {

constexpr std::size_t kTextBytes = 4000;

std::string attribute(std::string_view value) { return "\"" + xml_text(clipped(value, kTextBytes)) + "\""; }

std::string seconds_text(double seconds) { return std::isfinite(seconds) ? number_text(seconds) : "0"; }

struct Suite {
  std::string executor;
  std::vector<const CaseResult*> rows;
};

void write_row(const Report& report, const CaseResult& row, std::ostream& out) {
  out << "    <testcase classname=" << attribute(row.executor + "." + row.mode + "." + settings_of(row)) << " name=" << attribute(row.id)
      << " time=\"" << seconds_text(row.seconds) << "\"";
  const auto element = [&](const char* name, const std::string& type, bool with_checks) {
    out << ">\n      <" << name;
    if (!type.empty()) out << " type=" << attribute(type);
    out << " message=" << attribute(row.reason);
    if (!with_checks) {
      out << "/>\n    </testcase>\n";
      return;
    }
    out << ">";
    for (const CheckRow& check : row.checks)
      out << xml_text(clipped(check.name + ": " + check.status + ": " + check.detail, kTextBytes)) << "\n";
    out << xml_text("loopgauge explain " + row.id) << "</" << name << ">\n    </testcase>\n";
  };
  switch (row.status) {
    case CaseStatus::passed:
      out << "/>\n";
      return;
    case CaseStatus::failed:
      return element("failure", "mismatch", true);
    case CaseStatus::error:
      return element("error", "error", true);
    case CaseStatus::not_run:
      if (!is_excused(report, row)) return element("error", "not_run", false);
      [[fallthrough]];
    case CaseStatus::skipped:
      return element("skipped", "", false);
  }
}

}  // namespace

void render_junit(const Report& report, std::ostream& out) {
  std::vector<Suite> suites;
  for (const CaseResult& row : report.cases) {
    auto suite = suites.begin();
    while (suite != suites.end() && suite->executor != row.executor) ++suite;
    if (suite == suites.end()) suite = suites.insert(suite, {row.executor, {}});
    suite->rows.push_back(&row);
  }
  // A request with holes has no row to blame, so the hole is a test of its own.
  const bool red_row = std::any_of(report.cases.begin(), report.cases.end(),
                                   [&](const CaseResult& row) { return row.status > CaseStatus::skipped && !is_excused(report, row); });
  const bool holes = !red_row && exit_code_of(verdict(report)) != 0;
  std::size_t tests = report.cases.size() + holes, failures = 0, errors = holes, skipped = 0;
  for (const CaseResult& row : report.cases) {
    failures += row.status == CaseStatus::failed;
    errors += row.status == CaseStatus::error || (row.status == CaseStatus::not_run && !is_excused(report, row));
    skipped += row.status == CaseStatus::skipped || (row.status == CaseStatus::not_run && is_excused(report, row));
  }
  out << "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<testsuites name=" << attribute(report.meta.title) << " tests=\"" << tests
      << "\" failures=\"" << failures << "\" errors=\"" << errors << "\" skipped=\"" << skipped << "\">\n";
  for (const Suite& suite : suites) {
    std::size_t suite_failures = 0, suite_errors = 0, suite_skipped = 0;
    double time = 0.0;
    for (const CaseResult* row : suite.rows) {
      suite_failures += row->status == CaseStatus::failed;
      const bool missing = row->status == CaseStatus::not_run;
      suite_errors += row->status == CaseStatus::error || (missing && !is_excused(report, *row));
      suite_skipped += row->status == CaseStatus::skipped || (missing && is_excused(report, *row));
      if (std::isfinite(row->seconds)) time += row->seconds;
    }
    out << "  <testsuite name=" << attribute(suite.executor) << " tests=\"" << suite.rows.size() << "\" failures=\"" << suite_failures
        << "\" errors=\"" << suite_errors << "\" skipped=\"" << suite_skipped << "\" time=\"" << number_text(time)
        << "\" timestamp=" << attribute(report.meta.started) << ">\n    <properties>\n";
    for (const auto& [name, value] : {std::pair{"model_sha256", report.meta.model_sha256},
                                      std::pair{"source_revision", report.meta.source_revision}, std::pair{"device", report.meta.device},
                                      std::pair{"seed", report.meta.seed}, std::pair{"command_line", report.meta.command_line}})
      out << "      <property name=\"" << name << "\" value=" << attribute(value) << "/>\n";
    out << "    </properties>\n";
    for (const CaseResult* row : suite.rows) write_row(report, *row, out);
    out << "  </testsuite>\n";
  }
  if (holes) {
    out << "  <testsuite name=\"coverage\" tests=\"1\" failures=\"0\" errors=\"1\" skipped=\"0\">\n"
           "    <testcase classname=\"coverage\" name=\"every case of the request\">\n      <error type=\"not_run\" message="
        << attribute(verdict_reason(report)) << "/>\n    </testcase>\n  </testsuite>\n";
  }
  out << "</testsuites>\n";
}

}  // namespace loopgauge::harness
