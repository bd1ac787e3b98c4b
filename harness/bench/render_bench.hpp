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

// Everything the report holds.
void render_bench_json(const BenchReport& report, std::ostream& out);

}  // namespace loopgauge::harness
