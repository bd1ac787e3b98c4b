// SPDX-License-Identifier: Apache-2.0
#include "harness/report/compact_tables.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <tuple>
#include <utility>

#include "harness/compare/drift.hpp"
#include "harness/report/aggregates.hpp"
#include "harness/report/summary.hpp"
#include "harness/report/text_table.hpp"
#include "models/handoff/protocol.hpp"

namespace loopgauge::harness {

namespace {

constexpr std::array kKinds{&HandoffRow::validity_bytes,         &HandoffRow::activity_bytes,   &HandoffRow::base_payload_bytes,
                            &HandoffRow::residual_payload_bytes, &HandoffRow::parameters_bytes, &HandoffRow::rows_bytes,
                            &HandoffRow::final_hidden_bytes};

bool handed_over(const HandoffRow& row) { return row.outcome == handoff::to_string(handoff::Outcome::handed_over); }

bool same_bytes(const HandoffRow& a, const HandoffRow& b) {
  return std::all_of(kKinds.begin(), kKinds.end(), [&](auto kind) { return a.*kind == b.*kind; });
}

void add(HandoffSummary& summary, const HandoffRow& entry) {
  ++summary.requests;
  if (!handed_over(entry)) return;
  ++summary.handed_over;
  HandoffRow& sums = summary.sums;
  for (const auto kind : kKinds) sums.*kind += entry.*kind;
  sums.bytes += entry.bytes;
  sums.dense_bytes += entry.dense_bytes;
  sums.bytes_before_prompt_end += entry.bytes_before_prompt_end;
  sums.bytes_final_before_last_loop += entry.bytes_final_before_last_loop;
  sums.most_bytes_in_flight = std::max(sums.most_bytes_in_flight, entry.most_bytes_in_flight);
  sums.most_reserved_bytes = std::max(sums.most_reserved_bytes, entry.most_reserved_bytes);
  if (!std::isnan(entry.seconds)) summary.seconds.push_back(entry.seconds);
}

std::string share(std::int64_t part, std::int64_t whole) {
  return whole == 0 ? "-" : percent(static_cast<double>(part) / static_cast<double>(whole));
}

std::string bytes_text(std::int64_t bytes) { return bytes == 0 ? "-" : byte_count(bytes); }

std::string milliseconds(double seconds) { return short_number(1e3 * seconds); }

// "78.2 % (74.7..81.3)", "-" without samples.
std::string percent_with_interval(const Interval& rate) {
  if (std::isnan(rate.value)) return "-";
  const std::string value = short_number(100.0 * rate.value, 3) + " %";
  return std::isnan(rate.low) ? value : value + " (" + short_number(100.0 * rate.low, 3) + ".." + short_number(100.0 * rate.high, 3) + ")";
}

std::string with_interval(const Interval& value) {
  if (std::isnan(value.low)) return short_number(value.value);
  return short_number(value.value) + " (" + short_number(value.low) + ".." + short_number(value.high) + ")";
}

Interval rate_of(std::int64_t part, std::int64_t whole) {
  if (whole == 0) return {};
  const Estimate rate = wilson_interval(part, whole);
  return {rate.value, rate.low, rate.high};
}

}  // namespace

HandoffSummary handoffs_of(const CaseResult& row) {
  HandoffSummary summary{row.executor, row.handoffs.empty() ? "" : row.handoffs.front().transport, settings_of(row), 0, 0, {}, {}, 0, 0};
  for (const HandoffRow& entry : row.handoffs) add(summary, entry);
  std::sort(summary.seconds.begin(), summary.seconds.end());
  return summary;
}

std::vector<HandoffSummary> handoff_summaries(const Report& report) {
  // The same request of the same case in other columns.
  std::map<std::pair<std::string, std::int64_t>, std::vector<std::pair<std::string, const HandoffRow*>>> by_request;
  for (const CaseResult& row : report.cases) {
    if (is_mutant(row)) continue;
    for (const HandoffRow& entry : row.handoffs) {
      if (handed_over(entry)) by_request[{row.id, entry.request}].emplace_back(row.executor, &entry);
    }
  }
  std::vector<HandoffSummary> list;
  std::map<std::tuple<std::string, std::string, std::string>, std::size_t> index;
  for (const CaseResult& row : report.cases) {
    if (is_mutant(row)) continue;
    for (const HandoffRow& entry : row.handoffs) {
      const auto [place, added] = index.try_emplace({row.executor, entry.transport, settings_of(row)}, list.size());
      if (added) list.push_back({row.executor, entry.transport, settings_of(row), 0, 0, {}, {}, 0, 0});
      HandoffSummary& summary = list[place->second];
      add(summary, entry);
      if (!handed_over(entry)) continue;
      bool other = false, equal = true;
      for (const auto& [executor, twin] : by_request.at({row.id, entry.request})) {
        if (executor == row.executor) continue;
        other = true;
        equal = equal && same_bytes(entry, *twin);
      }
      summary.compared += other ? 1 : 0;
      summary.equal += other && equal ? 1 : 0;
    }
  }
  for (HandoffSummary& summary : list) std::sort(summary.seconds.begin(), summary.seconds.end());
  return list;
}

CompactTable handoff_table(const Report& report) {
  CompactTable table;
  table.title =
      "Handoffs from prefill to decode: bytes of all requests handed over, by kind of region and against K and V of all loops in BF16; what left "
      "before the prompt's end, and what no row of the last loop decides; most bytes in flight and reserved at the receiver at once; milliseconds "
      "from the prompt's end to the acknowledgement; requests with as many bytes of every kind in the other column";
  table.header = {"setting",    "executor",  "transport", "requests", "bytes",           "dense / this",           "base payload", "residual payload",
                  "parameters", "BF16 rows", "maps",      "hidden",   "left before end", "final before last loop", "in flight",    "reserved",
                  "ms median",  "ms most",   "bytes equal"};
  for (const HandoffSummary& summary : handoff_summaries(report)) {
    const HandoffRow& sums = summary.sums;
    const std::string requests = std::to_string(summary.handed_over);
    table.rows.push_back(
        {summary.settings, summary.executor, summary.transport,
         summary.handed_over == summary.requests ? requests : requests + " of " + std::to_string(summary.requests), bytes_text(sums.bytes),
         sums.bytes == 0 ? "-" : short_number(static_cast<double>(sums.dense_bytes) / static_cast<double>(sums.bytes)), bytes_text(sums.base_payload_bytes),
         bytes_text(sums.residual_payload_bytes), bytes_text(sums.parameters_bytes), bytes_text(sums.rows_bytes),
         bytes_text(sums.validity_bytes + sums.activity_bytes), bytes_text(sums.final_hidden_bytes),
         share(sums.bytes_before_prompt_end, sums.bytes), share(sums.bytes_final_before_last_loop, sums.bytes),
         bytes_text(sums.most_bytes_in_flight), bytes_text(sums.most_reserved_bytes),
         summary.seconds.empty() ? "-" : milliseconds(median_of_sorted(summary.seconds)),
         summary.seconds.empty() ? "-" : milliseconds(summary.seconds.back()),
         summary.compared == 0 ? "-" : std::to_string(summary.equal) + " of " + std::to_string(summary.compared)});
  }
  return table;
}

CompactTable encoding_timing_table(const Report& report) {
  CompactTable table;
  table.title =
      "Timing of the encoding: what is accepted at the first place, and where the timing lets rows differ from those of the serial plan, the logits "
      "rows with the same tokens before them: how many differ, mean KL in nats (95 %, bootstrapped over requests), rows with another top-1 token "
      "(Wilson), and requests that come to another token";
  table.header = {"mode",        "encoding", "executor", "cases",          "tokens / round",   "accepted, first place", "rows compared",
                  "rows differ", "mean KL",  "KL max",   "other top-1", "requests diverged", "dense / this"};
  for (const AcceptanceSummary& summary : acceptance_summaries(report)) {
    if (summary.timing.empty()) continue;
    const bool compared = summary.divergent_rows > 0;
    std::int64_t diverged = 0;
    for (const AcceptanceSummary::Position& position : summary.positions) diverged += position.divergences;
    const AcceptanceSummary::Position first = summary.positions.empty() ? AcceptanceSummary::Position{} : summary.positions.front();
    std::string differ = compared ? std::to_string(summary.different_rows) : summary.equals_serial == 0 ? "-" : "none: bits equal";
    if (!compared && summary.equals_serial > 0 && summary.equals_serial < summary.cases)
      differ += " in " + std::to_string(summary.equals_serial) + " of " + std::to_string(summary.cases);
    std::string ratio = short_number(summary.least_memory_ratio);
    if (summary.most_memory_ratio > summary.least_memory_ratio) ratio += ".." + short_number(summary.most_memory_ratio);
    table.rows.push_back({summary.mode, summary.timing, summary.executor, std::to_string(summary.cases), short_number(summary.mean_emitted, 3),
                          percent_with_interval(rate_of(first.accepted, first.drafted)), compared ? std::to_string(summary.divergent_rows) : "-",
                          std::move(differ), compared ? with_interval(summary.kl_mean) : "-", short_number(summary.kl_max),
                          compared ? percent_with_interval(rate_of(summary.flips, summary.divergent_rows)) : "-",
                          compared ? std::to_string(diverged) + " of " + std::to_string(summary.compared_requests) : "-", ratio});
  }
  return table;
}

}  // namespace loopgauge::harness
