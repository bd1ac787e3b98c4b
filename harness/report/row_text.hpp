// SPDX-License-Identifier: Apache-2.0
// Rows described by Column lists as lines of CSV and as JSON objects.
#pragma once

#include <cmath>
#include <nlohmann/json.hpp>
#include <string>
#include <type_traits>
#include <variant>

#include "harness/report/schema.hpp"

namespace loopgauge::harness {

// RFC 4180: quoted when it holds a separator, a quote or a line break.
inline std::string csv_field(const std::string& text) {
  if (text.find_first_of(",\"\r\n") == std::string::npos) return text;
  std::string quoted = "\"";
  for (const char c : text) {
    if (c == '"') quoted += '"';
    quoted += c;
  }
  return quoted + "\"";
}

// Without the line break.
template <class Row>
std::string csv_header() {
  std::string line;
  for (const Column<Row>& column : columns<Row>()) line += (line.empty() ? "" : ",") + std::string(column.name);
  return line;
}

template <class Row>
std::string csv_line(const Row& row) {
  std::string line;
  bool first = true;
  for (const Column<Row>& column : columns<Row>()) {
    if (!first) line += ",";
    first = false;
    line += csv_field(cell_text(row, column));
  }
  return line;
}

// NaN and infinity are null.
template <class Row>
nlohmann::ordered_json row_json(const Row& row) {
  nlohmann::ordered_json json = nlohmann::ordered_json::object();
  for (const Column<Row>& column : columns<Row>()) {
    std::visit(
        [&](auto member) {
          using T = std::remove_cvref_t<decltype(row.*member)>;
          nlohmann::ordered_json& cell = json[std::string(column.name)];
          if constexpr (std::is_same_v<T, CaseStatus>)
            cell = std::string(to_string(row.*member));
          else if constexpr (std::is_same_v<T, double>)
            cell = std::isfinite(row.*member) ? nlohmann::ordered_json(row.*member) : nlohmann::ordered_json(nullptr);
          else
            cell = row.*member;
        },
        column.member);
  }
  return json;
}

}  // namespace loopgauge::harness
