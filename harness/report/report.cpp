// SPDX-License-Identifier: Apache-2.0
#include "harness/report/report.hpp"

#include <algorithm>
#include <array>
#include <utility>

#include "models/error.hpp"

namespace loopgauge::harness {

namespace {

constexpr std::array<std::pair<CaseStatus, std::string_view>, 5> kStatusWords{{{CaseStatus::passed, "passed"},
                                                                               {CaseStatus::skipped, "skipped"},
                                                                               {CaseStatus::not_run, "not_run"},
                                                                               {CaseStatus::failed, "failed"},
                                                                               {CaseStatus::error, "error"}}};

// Distinct cases among the rows.
std::int64_t distinct_cases(const Report& report) {
  std::vector<std::int64_t> ordinals;
  for (const CaseResult& row : report.cases) ordinals.push_back(row.ordinal);
  std::sort(ordinals.begin(), ordinals.end());
  return std::unique(ordinals.begin(), ordinals.end()) - ordinals.begin();
}

}  // namespace

std::string_view to_string(CaseStatus status) {
  for (const auto& [value, word] : kStatusWords) {
    if (value == status) return word;
  }
  throw InternalError("a case status has no word");
}

CaseStatus parse_case_status(std::string_view text) {
  for (const auto& [value, word] : kStatusWords) {
    if (word == text) return value;
  }
  throw FileError("'" + std::string(text) + "' is not a case status: passed, skipped, not_run, failed, error");
}

CaseStatus worse(CaseStatus a, CaseStatus b) { return std::max(a, b); }

void StatusCounts::add(CaseStatus status) {
  switch (status) {
    case CaseStatus::passed:
      ++passed;
      break;
    case CaseStatus::skipped:
      ++skipped;
      break;
    case CaseStatus::not_run:
      ++not_run;
      break;
    case CaseStatus::failed:
      ++failed;
      break;
    case CaseStatus::error:
      ++error;
      break;
  }
}

StatusCounts& StatusCounts::operator+=(const StatusCounts& other) {
  passed += other.passed;
  skipped += other.skipped;
  not_run += other.not_run;
  failed += other.failed;
  error += other.error;
  return *this;
}

StatusCounts count_statuses(const Report& report) {
  StatusCounts counts;
  for (const CaseResult& row : report.cases) counts.add(row.status);
  return counts;
}

bool is_excused(const Report& report, const CaseResult& row) {
  return row.status == CaseStatus::not_run && row.executor == "optimized" && report.meta.executors == "both" &&
         !report.meta.device_available;
}

bool is_mutant(const CaseResult& row) { return row.executor.starts_with("mutant:"); }

bool fault_found(const Report& report) {
  return std::any_of(report.cases.begin(), report.cases.end(),
                     [](const CaseResult& row) { return is_mutant(row) && row.status == CaseStatus::failed; });
}

CaseStatus verdict(const Report& report) {
  // A hash may leave a shard without cases: nothing was asked of it.
  if (report.cases.empty() && !report.meta.shard.empty()) return CaseStatus::skipped;
  CaseStatus result = CaseStatus::passed;
  bool any_passed = false;
  for (const CaseResult& row : report.cases) {
    if (!is_excused(report, row)) result = worse(result, row.status);
    any_passed = any_passed || row.status == CaseStatus::passed;
  }
  // Nothing that ran and passed is no evidence, and neither is a request with holes.
  if (result < CaseStatus::not_run && !any_passed) result = CaseStatus::not_run;
  // A sweep with a planted fault is there to find it.
  if (!report.meta.mutant.empty() && !fault_found(report)) result = worse(result, CaseStatus::not_run);
  if (report.meta.shard.empty() && distinct_cases(report) < report.meta.case_count) result = worse(result, CaseStatus::not_run);
  return result;
}

int exit_code_of(CaseStatus status) {
  switch (status) {
    case CaseStatus::passed:
    case CaseStatus::skipped:
      return 0;
    case CaseStatus::not_run:
      return 5;
    case CaseStatus::failed:
      return 1;
    case CaseStatus::error:
      return 6;
  }
  throw InternalError("a case status has no exit code");
}

std::string summary_line(const StatusCounts& counts) {
  return std::to_string(counts.passed) + " passed, " + std::to_string(counts.failed + counts.error) + " failed, " +
         std::to_string(counts.skipped + counts.not_run) + " skipped";
}

}  // namespace loopgauge::harness
