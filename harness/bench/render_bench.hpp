// SPDX-License-Identifier: Apache-2.0
// A bench report as text: single rows while they are measured, and whole reports.
#pragma once

#include <iosfwd>
#include <string>
#include <string_view>

#include "harness/bench/bench_report.hpp"

namespace loopgauge::harness {

// One row on one line, and the line of names above it; `table`: "rows" or "end_to_end".
std::string bench_line_header(std::string_view table);
std::string bench_line(const BenchRow& row);
std::string bench_line(const EndToEndRow& row);
std::string bench_csv_header(std::string_view table);
std::string bench_csv_line(const BenchRow& row);
std::string bench_csv_line(const EndToEndRow& row);

void render_bench_terminal(const BenchReport& report, std::ostream& out);
// Sections with tables, for an issue, a pull request or a file.
void render_bench_markdown(const BenchReport& report, std::ostream& out);
// One self-contained page without a script.
void render_bench_html(const BenchReport& report, std::ostream& out);
// The rows; where there are none, the end-to-end rows.
void render_bench_csv(const BenchReport& report, std::ostream& out);
// Everything the report holds.
void render_bench_json(const BenchReport& report, std::ostream& out);

}  // namespace loopgauge::harness
