// SPDX-License-Identifier: Apache-2.0
// Name, unit and description of every column of a report, once: the HDF5 writer and reader, the CSV and JSON renderers and the test that
// compares them with reports/SCHEMA.md all walk these lists.
//
// To change the schema: reports/SCHEMA.md, "Changing the schema".
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <variant>

#include "harness/report/report.hpp"

namespace loopgauge::harness {

inline constexpr std::string_view kReportFormat = "loopgauge-report";
inline constexpr int kReportMajor = 1;  // changes of meaning
inline constexpr int kReportMinor = 3;  // additions

// One column of a table whose rows are `Row`. Units are UDUNITS words, "1" for ratios and counts, "" for text.
template <class Row>
struct Column {
  std::string_view name;
  std::string_view units;
  std::string_view description;
  std::variant<std::int64_t Row::*, double Row::*, bool Row::*, std::string Row::*, CaseStatus Row::*> member;
  int since_minor = 0;  // reports of an earlier minor version lack the column: it then keeps its default value
};

template <class Row>
std::span<const Column<Row>> columns();

template <>
std::span<const Column<ReportMeta>> columns();  // attributes of /meta
template <>
std::span<const Column<CaseResult>> columns();  // datasets of /cases
template <>
std::span<const Column<CheckRow>> columns();
template <>
std::span<const Column<DigestRow>> columns();
template <>
std::span<const Column<ToleranceRow>> columns();
template <>
std::span<const Column<DecisionRow>> columns();
template <>
std::span<const Column<DriftRow>> columns();
template <>
std::span<const Column<DriftSummaryRow>> columns();
template <>
std::span<const Column<AnswerRow>> columns();
template <>
std::span<const Column<AcceptanceRow>> columns();
template <>
std::span<const Column<MemoryRow>> columns();
template <>
std::span<const Column<TimingRow>> columns();
template <>
std::span<const Column<CounterRow>> columns();
template <>
std::span<const Column<DivergenceRow>> columns();
template <>
std::span<const Column<HandoffRow>> columns();

// Calls visit(name, description, pointer to the vector member of CaseResult) for every table of /case/<n>/.
template <class Visit>
void visit_tables(Visit&& visit) {
  visit("checks", "Checks that decided the status, a row per check", &CaseResult::checks);
  visit("digests", "SHA-256 of every record group (digest-v1), a row per group", &CaseResult::digests);
  visit("tolerance", "Distance from the reference, a row per operation (equal inputs) or metric (whole runs) and loop",
        &CaseResult::tolerance);
  visit("decisions", "Discrete decisions that differ from the reference, a row per flip", &CaseResult::decisions);
  visit("drift", "Distance from dense Ouro on the same executor, a row per logits row", &CaseResult::drift);
  visit("drift_summary", "Drift of the whole trace with its uncertainty, a row per metric and scope", &CaseResult::drift_summary);
  visit("answers", "Marked answers of a task, a row per answer", &CaseResult::answers);
  visit("acceptance", "Speculation, a row per draft position", &CaseResult::acceptance);
  visit("memory", "Bytes per category, a row per category, phase and source", &CaseResult::memory);
  visit("timing", "Wall time, a row per phase and repetition", &CaseResult::timings);
  visit("counters", "What the run did, a row per counter", &CaseResult::counters);
  visit("divergence", "Distance from the serial plan under execution_dependent timing, a row per logits row", &CaseResult::divergence);
  visit("handoffs", "Handoffs from prefill to decode, a row per request", &CaseResult::handoffs);
}

// The value as text: numbers in the shortest form that reads back exactly, NaN as "", booleans as "true" and "false".
template <class Row>
std::string cell_text(const Row& row, const Column<Row>& column);

}  // namespace loopgauge::harness

#include "harness/report/schema_cell.hpp"
