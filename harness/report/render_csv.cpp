// SPDX-License-Identifier: Apache-2.0
#include <ostream>

#include "harness/report/render.hpp"
#include "harness/report/row_text.hpp"

namespace loopgauge::harness {

void render_csv(const Report& report, std::ostream& out) {
  out << csv_header<CaseResult>() << "\n";
  for (const CaseResult& row : report.cases) out << csv_line(row) << "\n";
}

}  // namespace loopgauge::harness
