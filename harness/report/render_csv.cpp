// SPDX-License-Identifier: Apache-2.0
#include <ostream>
#include <string>

#include "harness/compare/error_stats.hpp"
#include "harness/report/compact_tables.hpp"
#include "harness/report/render.hpp"
#include "harness/report/row_text.hpp"

namespace loopgauge::harness {

namespace {

// Columns of /case/<n>/handoffs that are summed over the requests of the case, or whose largest counts.
constexpr std::string_view kHandoffColumns[] = {"bytes",
                                                "dense_bytes",
                                                "validity_bytes",
                                                "activity_bytes",
                                                "base_payload_bytes",
                                                "residual_payload_bytes",
                                                "parameters_bytes",
                                                "rows_bytes",
                                                "final_hidden_bytes",
                                                "bytes_before_prompt_end",
                                                "bytes_final_before_last_loop",
                                                "most_bytes_in_flight",
                                                "most_reserved_bytes"};

// Transport, requests handed over, the columns above and the median latency; empty without handoffs.
std::string handoff_fields(const CaseResult& row) {
  HandoffSummary summary = handoffs_of(row);
  const bool any = summary.requests > 0;
  std::string line = "," + csv_field(summary.transport) + "," + (any ? std::to_string(summary.handed_over) : "");
  for (const std::string_view name : kHandoffColumns) {
    line += ",";
    for (const Column<HandoffRow>& column : columns<HandoffRow>()) {
      if (any && column.name == name) line += cell_text(summary.sums, column);
    }
  }
  if (!summary.seconds.empty()) summary.sums.seconds = median_of_sorted(summary.seconds);
  for (const Column<HandoffRow>& column : columns<HandoffRow>()) {
    if (column.name == "seconds") line += "," + cell_text(summary.sums, column);
  }
  return line;
}

}  // namespace

void render_csv(const Report& report, std::ostream& out) {
  out << csv_header<CaseResult>() << ",handoff_transport,handoff_requests";
  for (const std::string_view name : kHandoffColumns) out << ",handoff_" << name;
  out << ",handoff_seconds\n";
  for (const CaseResult& row : report.cases) out << csv_line(row) << handoff_fields(row) << "\n";
}

}  // namespace loopgauge::harness
