// SPDX-License-Identifier: Apache-2.0
// What the scripts of the HTML page read: two JSON texts. The first is the overview, read when the page opens: every row in columns, with
// texts in dictionaries, and the aggregates of harness/report/aggregates.hpp, which cover all rows of the report whatever the page lists.
// The second holds tables of single cases and is read when a case is opened. Numbers carry six significant digits; NaN is null and
// infinity the text "Infinity".
#pragma once

#include <cstddef>
#include <string>

#include "harness/report/report.hpp"

namespace loopgauge::harness {

struct PageLimits {
  std::size_t listed_rows = 20000;                  // beyond: failures and errors first, then in the order of the report
  std::size_t detail_bytes = std::size_t{7} << 20;  // failures and errors first, then the nearest to their limit
  std::size_t listed_flips = 200;                   // a kind and executor
  std::size_t plotted_flips = 600;                  // a kind and executor
  std::size_t text_bytes = 1000;                    // of one reason in the list; 4 times that in the tables of a case
};

struct PageData {
  std::string overview, details;
  std::size_t listed_rows = 0, detailed_rows = 0;
};

PageData page_data(const Report& report, const PageLimits& limits = {});

}  // namespace loopgauge::harness
