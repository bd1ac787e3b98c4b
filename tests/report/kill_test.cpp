// SPDX-License-Identifier: Apache-2.0
// A sweep killed with SIGKILL at random moments: whatever it left opens, --resume completes it, and nothing tells it from a sweep that
// nobody disturbed. Three moments in the ordinary run, fifty under the label `long`.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <iostream>
#include <map>
#include <random>

#include "harness/report/report_file.hpp"
#include "harness/report_lock.hpp"
#include "tests/report/sweep_command_fixture.hpp"

namespace loopgauge::harness {
namespace {

class KilledSweep : public SweepCommand {
 protected:
  // What a report says whatever the time of day.
  static std::string meta_text(ReportMeta meta) {
    meta.started = meta.finished = meta.command_line = "";
    std::string text;
    for (const Column<ReportMeta>& column : columns<ReportMeta>()) text += cell_text(meta, column) + "|";
    return text;
  }

  static void expect_same(const Report& report, const Report& undisturbed) {
    EXPECT_TRUE(is_complete(report));
    EXPECT_EQ(meta_text(report.meta), meta_text(undisturbed.meta));
    ASSERT_EQ(report.cases.size(), undisturbed.cases.size());
    for (std::size_t n = 0; n < report.cases.size(); ++n) EXPECT_EQ(row_text(report.cases[n]), row_text(undisturbed.cases[n]));
  }

  // A report that a killed sweep left: every row is either not reached or as it is in the undisturbed sweep.
  void expect_good(const Report& left, const Report& undisturbed) const {
    ASSERT_EQ(left.cases.size(), undisturbed.cases.size());
    for (std::size_t n = 0; n < left.cases.size(); ++n) {
      if (left.cases[n].status == CaseStatus::not_run && left.cases[n].reason == kNotReached) continue;
      EXPECT_EQ(row_text(left.cases[n]), row_text(undisturbed.cases[n]));
    }
    const test::ProcessResult shown = test::run_program({"report", path("killed.h5")});
    EXPECT_EQ(shown.exit_code, 0) << shown.err;
  }

  void kill_at_random_moments(int kills, std::uint32_t seed) {
    const std::vector<std::string> flags{"--executor", "reference", "--filter", "*t?s?q0/*", "--write-interval", "0", "--resume"};
    const auto start = std::chrono::steady_clock::now();
    ASSERT_EQ(sweep(flags, "whole.h5").exit_code, 0);
    const double whole_ms = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
    const Report whole = read_report(path("whole.h5"));

    std::mt19937 random(seed);
    const auto share = [&] { return std::uniform_real_distribution<double>(0.0, 1.0)(random); };
    double remaining = 1.0;  // of the work, as far as it is known
    std::map<std::string, int> moments;
    int completed = 0;
    // A sweep that is over before its moment was not killed; a few of those are no news.
    for (int killed = 0, attempts = 0; killed < kills; ++attempts) {
      ASSERT_LT(attempts, 4 * kills + 20) << "nearly every sweep was over before it could be killed";
      test::ProcessOptions options;
      options.kill_after_ms = share() * whole_ms * remaining;
      const test::ProcessResult result = test::run_program(arguments(flags, "killed.h5"), options);
      const bool was_killed = result.exit_code == 128 + SIGKILL;
      ASSERT_TRUE(was_killed || result.exit_code == 0) << result.err;
      killed += was_killed;
      if (!std::filesystem::exists(path("killed.h5"))) {
        ++moments["before the first report"];
        continue;
      }
      const Report left = read_report(path("killed.h5"));
      expect_good(left, whole);
      const int left_over = count_statuses(left).not_run;
      if (was_killed)
        ++moments[left_over == std::ssize(left.cases) ? "before a case" : left_over > 0 ? "among the cases" : "after the last case"];
      remaining = std::max(0.1, static_cast<double>(left_over) / static_cast<double>(left.cases.size()));
      // Half of the killed sweeps are killed again while they resume.
      if (was_killed && killed < kills && left_over > 0 && share() < 0.5) continue;
      ASSERT_EQ(sweep(flags, "killed.h5").exit_code, 0);
      const Report resumed = read_report(path("killed.h5"));
      expect_same(resumed, whole);
      ++completed;
      // What was finished before the kill was not run again: its times are the old ones.
      for (std::size_t n = 0; n < left.cases.size(); ++n) {
        if (left.cases[n].status == CaseStatus::passed) {
          EXPECT_EQ(left.cases[n].seconds, resumed.cases[n].seconds);
        }
      }
      std::filesystem::remove(path("killed.h5"));
      remaining = 1.0;
    }
    EXPECT_GT(completed, 0);
    // Beside the report there is nothing: what kills interrupted in writing, and the lock that they left, go with the next writing.
    { const ReportLock next(path("killed.h5")); }
    for (const auto& entry : std::filesystem::directory_iterator(folder_.path())) {
      const std::string name = entry.path().filename();
      EXPECT_TRUE(name == "whole.h5" || name == "killed.h5" || name == "model" || name == "single.h5" || name == "several.h5") << name;
    }
    std::cout << kills << " kills, " << completed << " sweeps completed";
    for (const auto& [moment, count] : moments) std::cout << ", " << count << " " << moment;
    std::cout << "\n";
  }
};

TEST_F(KilledSweep, AtThreeRandomMomentsIsCompletedByResume) { kill_at_random_moments(3, 1); }

class LongKilledSweep : public KilledSweep {};

TEST_F(LongKilledSweep, AtFiftyRandomMomentsIsCompletedByResume) { kill_at_random_moments(50, 2); }

}  // namespace
}  // namespace loopgauge::harness
