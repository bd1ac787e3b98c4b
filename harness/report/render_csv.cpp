// SPDX-License-Identifier: Apache-2.0
#include <ostream>

#include "harness/report/render.hpp"
#include "harness/report/schema.hpp"

namespace loopgauge::harness {

namespace {

// RFC 4180: quoted when it holds a separator, a quote or a line break.
std::string csv_field(const std::string& text) {
  if (text.find_first_of(",\"\r\n") == std::string::npos) return text;
  std::string quoted = "\"";
  for (const char c : text) {
    if (c == '"') quoted += '"';
    quoted += c;
  }
  return quoted + "\"";
}

}  // namespace

void render_csv(const Report& report, std::ostream& out) {
  const char* separator = "";
  for (const Column<CaseResult>& column : columns<CaseResult>()) {
    out << separator << column.name;
    separator = ",";
  }
  out << "\n";
  for (const CaseResult& row : report.cases) {
    separator = "";
    for (const Column<CaseResult>& column : columns<CaseResult>()) {
      out << separator << csv_field(cell_text(row, column));
      separator = ",";
    }
    out << "\n";
  }
}

}  // namespace loopgauge::harness
