// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <array>

#include "harness/report/report.hpp"
#include "models/error.hpp"
#include "tests/report/sample_report.hpp"

namespace loopgauge::harness {
namespace {

Report report_of(std::vector<CaseResult> rows) {
  Report report;
  report.meta.executors = "both";
  report.meta.case_count = 0;
  for (const CaseResult& row : rows) report.meta.case_count = std::max(report.meta.case_count, row.ordinal + 1);
  report.cases = std::move(rows);
  return report;
}

TEST(Verdict, StatusWordsAreOrderedBySeverity) {
  const std::array<CaseStatus, 5> ascending{CaseStatus::passed, CaseStatus::skipped, CaseStatus::not_run, CaseStatus::failed,
                                            CaseStatus::error};
  for (std::size_t i = 0; i < ascending.size(); ++i) {
    EXPECT_EQ(parse_case_status(to_string(ascending[i])), ascending[i]);
    for (std::size_t j = 0; j < ascending.size(); ++j) EXPECT_EQ(worse(ascending[i], ascending[j]), ascending[std::max(i, j)]);
  }
  EXPECT_THROW(parse_case_status("not run"), FileError);
}

TEST(Verdict, OptimizedColumnWithoutDeviceIsStatedButDoesNotDecide) {
  const Report report =
      report_of({sample_row(0, "reference", CaseStatus::passed), sample_row(0, "optimized", CaseStatus::not_run, "no CUDA device")});
  EXPECT_EQ(verdict(report), CaseStatus::passed);
  EXPECT_EQ(count_statuses(report).passed, 1);
  EXPECT_EQ(count_statuses(report).not_run, 1);
  EXPECT_EQ(summary_line(count_statuses(report)), "1 passed, 0 failed, 1 skipped");
}

TEST(Verdict, OptimizedColumnThatWasNotRunOnAMachineWithDeviceIsIncomplete) {
  Report report =
      report_of({sample_row(0, "reference", CaseStatus::passed), sample_row(0, "optimized", CaseStatus::not_run, "head_dim 32")});
  report.meta.device_available = true;
  EXPECT_EQ(verdict(report), CaseStatus::not_run);
  EXPECT_EQ(exit_code_of(verdict(report)), 5);
}

TEST(Verdict, ReferenceCaseThatWasNotRunIsIncomplete) {
  const Report report =
      report_of({sample_row(0, "reference", CaseStatus::passed), sample_row(1, "reference", CaseStatus::not_run, "events")});
  EXPECT_EQ(exit_code_of(verdict(report)), 5);
}

TEST(Verdict, PlantedFaultThatNoRowFoundIsNotPassed) {
  Report report = report_of({sample_row(0, "reference", CaseStatus::passed), sample_row(0, "mutant:early_flush", CaseStatus::passed),
                             sample_row(1, "reference", CaseStatus::passed), sample_row(1, "mutant:early_flush", CaseStatus::not_run, "it changes nothing")});
  report.meta.mutant = "early_flush";
  EXPECT_FALSE(fault_found(report));
  EXPECT_EQ(exit_code_of(verdict(report)), 5);
  report.cases.resize(2);
  report.meta.case_count = 1;
  EXPECT_EQ(exit_code_of(verdict(report)), 5) << "it acts and no check noticed";
  report.cases[1].status = CaseStatus::failed;
  EXPECT_TRUE(fault_found(report));
  EXPECT_EQ(exit_code_of(verdict(report)), 1);
}

TEST(Verdict, OnlyNotRunRowsNeverPass) {
  Report report = report_of({sample_row(0, "optimized", CaseStatus::not_run, "no CUDA device")});
  EXPECT_EQ(verdict(report), CaseStatus::not_run);
  report.cases.clear();
  report.meta.case_count = 0;
  EXPECT_EQ(verdict(report), CaseStatus::not_run);
  report.meta.shard = "3/64";
  EXPECT_EQ(verdict(report), CaseStatus::skipped) << "a shard to which no case falls";
}

TEST(Verdict, FailuresAndErrorsOutweighMissingCoverage) {
  Report report =
      report_of({sample_row(0, "reference", CaseStatus::not_run, "events"), sample_row(1, "reference", CaseStatus::failed, "audit")});
  EXPECT_EQ(exit_code_of(verdict(report)), 1);
  report.cases.push_back(sample_row(2, "reference", CaseStatus::error, "out of memory"));
  EXPECT_EQ(exit_code_of(verdict(report)), 6);
  EXPECT_EQ(summary_line(count_statuses(report)), "0 passed, 2 failed, 1 skipped");
}

TEST(Verdict, WholeReportWithHolesIsIncomplete) {
  Report report = report_of({sample_row(0, "reference", CaseStatus::passed)});
  report.meta.case_count = 2;
  EXPECT_EQ(exit_code_of(verdict(report)), 5);
  report.meta.shard = "1/2";
  EXPECT_EQ(exit_code_of(verdict(report)), 0) << "a shard answers for its own cases";
}

}  // namespace
}  // namespace loopgauge::harness
