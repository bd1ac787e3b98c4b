// SPDX-License-Identifier: Apache-2.0
#include "tests/report/sample_report.hpp"

#include <gtest/gtest.h>
#include <unistd.h>

namespace loopgauge::harness {

TemporaryDirectory::TemporaryDirectory() {
  const auto* test = ::testing::UnitTest::GetInstance()->current_test_info();
  std::string name = std::string(test->test_suite_name()) + "." + test->name() + "." + std::to_string(::getpid());
  for (char& c : name) {
    if (c == '/') c = '_';
  }
  path_ = std::filesystem::path(::testing::TempDir()) / name;
  std::filesystem::remove_all(path_);
  std::filesystem::create_directories(path_);
}

TemporaryDirectory::~TemporaryDirectory() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

CaseResult sample_row(std::int64_t ordinal, const std::string& executor, CaseStatus status, const std::string& reason) {
  CaseResult row;
  row.ordinal = ordinal;
  row.mode = "serial";
  row.switches = "t1s0q0";
  row.trace = "trace-" + std::to_string(ordinal);
  row.id = "serial/t1s0q0/" + row.trace;
  row.executor = executor;
  row.profile = executor == "optimized" ? "" : "declared";
  row.configuration = "{}";
  row.status = status;
  row.reason = reason;
  return row;
}

Report sample_report() {
  Report report;
  ReportMeta& meta = report.meta;
  meta.title = "sweep of set sample, 2 cases";
  meta.tool_version = "0.1.0";
  meta.source_revision = "0123456789abcdef0123456789abcdef01234567";
  meta.compiler = "GNU 12.2.0, Release";
  meta.model_sha256 = std::string(64, 'a');
  meta.model_config = R"({"layers":4})";
  meta.device = "no CUDA device";
  meta.cpu = "some processor, 2 threads";
  meta.set = "sample";
  meta.set_sha256 = std::string(64, 'b');
  meta.executors = "both";
  meta.configuration = "{}";
  meta.command_line = "loopgauge sweep --set sample --filter 'a b'";
  meta.seed = "7";
  meta.case_count = 2;
  meta.started = "2026-01-02T03:04:05Z";
  meta.finished = "2026-01-02T03:05:05Z";

  CaseResult passed = sample_row(0, "reference", CaseStatus::passed);
  passed.same_top1 = 0.9583333333333334;
  passed.kl_mean = 0.014;
  passed.kl_max = 0.3;
  passed.first_token_kl = 0.32;
  passed.bits_per_byte = 2.5;
  passed.task_accuracy = 0.5;
  passed.memory_ratio = 1.0;
  passed.seconds = 0.25;
  passed.checks = {{"audit", "passed", "12 checks of 3 rules"}, {"repeat_with_taps", "skipped", "not asked for"}};
  passed.digests = {{"all", std::string(64, 'c')}, {"tokens", std::string(64, 'd')}};
  passed.drift = {{0, 0, 6, 0.32, false, -0.25}, {0, 1, 7, 0.014, true, 0.125}, {0, 2, 8, 0.3, true, 0.0}};
  passed.drift_summary = {{"kl_mean", "continuation", 0.157, 0.1, 0.2, 2, "bootstrap"},
                          {"kl_max", "continuation", 0.3, kNotApplicable, kNotApplicable, 2, "none"},
                          {"bits_per_byte", "all", 2.5, 2.0, 3.0, 3, "bootstrap"},
                          {"task_accuracy", "all", 0.5, 0.1, 0.9, 2, "wilson"}};
  passed.memory = {{"BF16 planes", "steady", "predicted", 1000, 1024}, {"weights", "steady", "predicted", 5000, 5000}};
  passed.timings = {{"run", 0, 0.25}};

  CaseResult failed = sample_row(1, "reference", CaseStatus::failed, "audit: \"kl\", and a\nline break; \xc3\xa9t\xc3\xa9");
  failed.policy = "rolling";
  failed.timing = "serial_aligned";
  failed.tolerance = {{"rms_norm.norm", 3, 768, 1.0, 0.0078125, "request 0 position 17 element 5", 0.001, 0.0, 0.0, 1.0, 1.0, 1, 0, 1.0,
                       1.0, "passed", "operation", "candidate"}};
  failed.decisions = {{"token_selection", 0, 17, 3, -1, -1, 1e-5, 2e-5, true, true, "17 instead of 18"}};
  failed.acceptance = {{0, 10, 9, 1, 0}, {1, 9, 7, 2, 1}};

  report.cases = {passed, sample_row(0, "optimized", CaseStatus::not_run, "no CUDA device"), failed,
                  sample_row(1, "optimized", CaseStatus::skipped, "left out")};
  return report;
}

}  // namespace loopgauge::harness
