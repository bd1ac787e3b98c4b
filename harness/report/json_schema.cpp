// SPDX-License-Identifier: Apache-2.0
#include <nlohmann/json.hpp>
#include <ostream>
#include <type_traits>
#include <utility>

#include "harness/report/render.hpp"
#include "harness/report/report_file.hpp"
#include "harness/report/schema.hpp"

namespace loopgauge::harness {

namespace {

using Json = nlohmann::ordered_json;

const Json& status_words() {
  static const Json words{"passed", "skipped", "not_run", "failed", "error"};
  return words;
}

template <class Row>
Json column_schema(const Column<Row>& column) {
  Json schema{{"description", std::string(column.description)}};
  std::visit(
      [&](auto member) {
        using T = std::remove_cvref_t<decltype(std::declval<Row>().*member)>;
        if constexpr (std::is_same_v<T, CaseStatus>)
          schema["enum"] = status_words();
        else if constexpr (std::is_same_v<T, double>)
          schema["type"] = {"number", "null"};
        else if constexpr (std::is_same_v<T, bool>)
          schema["type"] = "boolean";
        else if constexpr (std::is_same_v<T, std::int64_t>)
          schema["type"] = "integer";
        else
          schema["type"] = "string";
      },
      column.member);
  if (column.units != "" && column.units != "1")
    schema["description"] = std::string(column.description) + " [" + std::string(column.units) + "]";
  return schema;
}

// An object with exactly these columns.
template <class Row>
Json row_schema() {
  Json properties = Json::object(), required = Json::array();
  for (const Column<Row>& column : columns<Row>()) {
    properties[std::string(column.name)] = column_schema(column);
    required.push_back(std::string(column.name));
  }
  return {{"type", "object"}, {"properties", properties}, {"required", required}, {"additionalProperties", false}};
}

}  // namespace

void render_json_schema(std::ostream& out) {
  Json definitions = Json::object(), tables = Json::object();
  visit_tables([&](const char* name, const char* description, auto table) {
    using Rows = std::remove_cvref_t<decltype(std::declval<CaseResult>().*table)>;
    definitions[std::string(name)] = row_schema<typename Rows::value_type>();
    tables[std::string(name)] = {
        {"description", description}, {"type", "array"}, {"minItems", 1}, {"items", {{"$ref", std::string("#/$defs/") + name}}}};
  });

  Json entry = row_schema<CaseResult>();
  entry["properties"]["tables"] = {{"description", "Tables of the case; one without rows is absent"},
                                   {"type", "object"},
                                   {"properties", tables},
                                   {"additionalProperties", false}};
  entry["required"].push_back("tables");

  Json counts = Json::object();
  for (const Json& word : status_words()) counts[word.get<std::string>()] = {{"type", "integer"}, {"minimum", 0}};

  const std::string version = std::to_string(kReportMajor) + "." + std::to_string(kReportMinor);
  const Json schema{
      {"$schema", "https://json-schema.org/draft/2020-12/schema"},
      {"title", "loopgauge report"},
      {"description", "Output of `loopgauge report FILE --json`, schema version " + version + ". A number that is not finite is null."},
      {"type", "object"},
      {"properties",
       {{"format", {{"const", std::string(kReportFormat)}}},
        {"schema_version", {{"const", version}}},
        {"verdict", {{"enum", status_words()}}},
        {"status", {{"enum", {"complete", "incomplete"}}}},
        {"counts", {{"type", "object"}, {"properties", counts}, {"required", status_words()}, {"additionalProperties", false}}},
        {"meta", row_schema<ReportMeta>()},
        {"cases", {{"type", "array"}, {"items", entry}}}}},
      {"required", {"format", "schema_version", "verdict", "status", "counts", "meta", "cases"}},
      {"additionalProperties", false},
      {"$defs", definitions}};
  out << schema.dump(1) << "\n";
}

}  // namespace loopgauge::harness
