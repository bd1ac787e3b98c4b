// SPDX-License-Identifier: Apache-2.0
// Tables that the terminal, markdown and the page show alike: cells are texts, so that one place decides what is shown and how.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "harness/report/report.hpp"

namespace loopgauge::harness {

struct CompactTable {
  std::string title;  // what a row is and what the columns mean, in a sentence or two
  std::vector<std::string> header;
  std::vector<std::vector<std::string>> rows;  // each as long as the header; empty: nothing to show
};

// Requests that were handed from prefill to decode, by executor, transport and setting, over modes and traces. Bytes are those of requests that
// were handed over; rows of planted faults are left out.
struct HandoffSummary {
  std::string executor, transport, settings;
  std::int64_t requests = 0, handed_over = 0;
  HandoffRow sums;                        // bytes of each kind, dense bytes and those that left early; largest in flight and reserved
  std::vector<double> seconds;            // ascending
  std::int64_t compared = 0, equal = 0;   // requests that another executor handed over too, and of these with as many bytes of every kind there
};
std::vector<HandoffSummary> handoff_summaries(const Report& report);
HandoffSummary handoffs_of(const CaseResult& row);  // of one case, not compared
CompactTable handoff_table(const Report& report);

// Speculation over encoded K/V, by mode, timing, tail and flush: how many candidates are accepted, and where the timing lets rows differ from those of the
// serial plan, how many do and how far (acceptance_summaries).
CompactTable encoding_timing_table(const Report& report);

}  // namespace loopgauge::harness
