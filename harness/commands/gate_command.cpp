// SPDX-License-Identifier: Apache-2.0
// `loopgauge gate`: a report against a committed baseline, for continuous integration.
#include <filesystem>
#include <iostream>
#include <memory>
#include <string>
#include <system_error>

#include "harness/commands/command.hpp"
#include "harness/gate/baseline.hpp"
#include "harness/gate/gate.hpp"
#include "harness/gate/known_issues.hpp"
#include "harness/io/atomic_output.hpp"
#include "harness/io/replaceable.hpp"
#include "harness/io/text_file.hpp"
#include "harness/report/report_file.hpp"
#include "harness/report_lock.hpp"
#include "models/error.hpp"

namespace loopgauge::harness {
namespace {

struct CommandOptions {
  std::string report_file;
  std::string baseline_file;
  bool update = false;
  bool prune = false;
  std::string known_issues_file;
  std::string today;  // empty: the clock's
  std::string annotations;
};

// The report's cases become the baseline's; cases that it lacks stay unless they are to be pruned.
void update(const CommandOptions& options, const Report& report) {
  require_other_file(options.baseline_file, options.report_file, "the report itself");
  const Baseline fresh = baseline_of(report);
  const ReportLock lock(options.baseline_file, "--baseline");  // before what is there is read
  BaselineUpdate update{fresh};
  std::error_code unknown;
  if (std::filesystem::exists(options.baseline_file, unknown) && std::filesystem::file_size(options.baseline_file, unknown) > 0) {
    if (!options.prune) {
      update = update_baseline(read_baseline(options.baseline_file), fresh);
    } else if (!is_baseline(read_text_file(options.baseline_file, "baseline"))) {
      throw FileError(options.baseline_file + ": is no baseline, so it is not replaced; choose another --baseline or remove it");
    }
  }
  const std::string text = baseline_text(update.baseline);
  parse_baseline(text, "the baseline of " + options.report_file);  // a report of another program may hold ids that no baseline can
  write_text_file(options.baseline_file, text);
  std::cout << "wrote " << options.baseline_file << ": " << update.baseline.values.size() << " values of set " << update.baseline.set;
  if (options.prune) {
    std::cout << ", of this report alone\n";
    return;
  }
  std::cout << "; " << update.updated << " cases updated, " << update.added << " new, " << update.kept << " kept that the report lacks"
            << (update.kept > 0 ? " (--prune drops them)" : "") << "\n";
}

}  // namespace

void add_gate_command(CLI::App& app, int& exit_code) {
  CLI::App* command = app.add_subcommand("gate", "Judge a report against a baseline: regressions fail");
  const auto options = std::make_shared<CommandOptions>();
  command->add_option("report", options->report_file, "Report of a sweep")->type_name("FILE")->required();
  command->add_option("--baseline", options->baseline_file, "Baseline, a text file under version control")->type_name("FILE")->required();
  command->add_flag("--update", options->update,
                    "Write the baseline from the report instead of judging; review the difference before committing it");
  command->add_flag("--prune", options->prune, "With --update: drop the cases that the report lacks, which otherwise keep their values");
  command
      ->add_option("--known-issues", options->known_issues_file,
                   "Regressions to let pass until a day: lines `<until> <case glob> <executor glob> <metric glob> <why>` after the line "
                   "`loopgauge-known-issues 1`; metric `case` is a case as a whole")
      ->type_name("FILE");
  command->add_option("--today", options->today, "The day on which known issues are judged (default: today, UTC)")->type_name("YYYY-MM-DD");
  command->add_option("--annotations", options->annotations, "Print annotations for a CI system as well: github")->type_name("WORD");
  command->footer(
      "Examples:\n"
      "  loopgauge sweep --set ci --report ci.h5 && loopgauge gate ci.h5 --baseline reports/baselines/ci.txt\n"
      "  loopgauge gate ci.h5 --baseline reports/baselines/ci.txt --update && git diff reports/baselines\n"
      "  loopgauge gate ci.h5 --baseline ci.txt --known-issues known.txt --annotations github\n"
      "Words: regression, missing (in the baseline, not run now), known (a known issue), improved, new, unchanged. A regression is\n"
      "  a digest that differs, more bytes, error / bound above 1.25 times what it was, a failing case;\n"
      "  a drift metric or a rate that is worse by more than 2 %; on another device than the baseline's beyond both 95 % intervals, or in "
      "a\n"
      "  paired test over the traces of a setting;\n"
      "  on the same device, a fastest repetition slower than the slowest was by more than 5 %.\n"
      "reports/ci/ has workflows for runners with and without a GPU.\n"
      "The model is known by its weights and its configuration (rope_theta, rms_norm_eps, sizes): a report of another one is not comparable.\n"
      "Exit codes: 0 no regression, 1 regression, 3 not comparable or unreadable, or another process is updating the baseline, 5 cases are missing.");
  command->callback([options, &exit_code] {
    if (options->prune && !options->update) throw ConfigError("--prune has no effect without --update");
    if (options->update && (!options->known_issues_file.empty() || !options->annotations.empty())) {
      throw ConfigError("--known-issues and --annotations have no effect with --update, which judges nothing");
    }
    if (!options->annotations.empty() && options->annotations != "github") {
      throw ConfigError("--annotations '" + options->annotations + "' is not one of: github");
    }
    GateOptions judging;
    judging.today = options->today.empty() ? today() : options->today;
    require_date(judging.today);
    if (!options->known_issues_file.empty()) judging.known_issues = read_known_issues(options->known_issues_file);
    const Report report = read_report(options->report_file);
    if (options->update) {
      update(*options, report);
      exit_code = 0;
      return;
    }
    const GateResult result = judge_report(report, read_baseline(options->baseline_file), judging);
    std::cout << gate_text(result);
    if (!options->annotations.empty()) std::cout << github_annotations(result);
    exit_code = result.exit_code;
  });
}

}  // namespace loopgauge::harness
