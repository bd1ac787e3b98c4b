// SPDX-License-Identifier: Apache-2.0
#include <nlohmann/json.hpp>
#include <ostream>

#include "harness/report/render.hpp"
#include "harness/report/report_file.hpp"
#include "harness/report/row_text.hpp"
#include "harness/report/schema.hpp"

namespace loopgauge::harness {

namespace {

using Json = nlohmann::ordered_json;

}  // namespace

void render_json(const Report& report, std::ostream& out) {
  const StatusCounts counts = count_statuses(report);
  Json json;
  json["format"] = std::string(kReportFormat);
  json["schema_version"] = std::to_string(kReportMajor) + "." + std::to_string(kReportMinor);
  json["verdict"] = std::string(to_string(verdict(report)));
  json["status"] = is_complete(report) ? "complete" : "incomplete";
  json["counts"] = {{"passed", counts.passed},
                    {"failed", counts.failed},
                    {"error", counts.error},
                    {"skipped", counts.skipped},
                    {"not_run", counts.not_run}};
  json["meta"] = row_json(report.meta);
  json["cases"] = Json::array();
  for (const CaseResult& result : report.cases) {
    Json entry = row_json(result);
    Json& tables = entry["tables"] = Json::object();  // apart: a table and a column are both named timing
    visit_tables([&](const char* name, const char*, auto table) {
      if ((result.*table).empty()) return;
      Json rows = Json::array();
      for (const auto& row : result.*table) rows.push_back(row_json(row));
      tables[name] = std::move(rows);
    });
    json["cases"].push_back(std::move(entry));
  }
  // A reason may quote bytes of a file: what is not UTF-8 is replaced instead of ending the rendering.
  out << json.dump(1, ' ', false, Json::error_handler_t::replace) << "\n";
}

}  // namespace loopgauge::harness
