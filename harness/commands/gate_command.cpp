// SPDX-License-Identifier: Apache-2.0
// `loopgauge gate`: a report against a committed baseline, for continuous integration.
#include <filesystem>
#include <iostream>
#include <memory>

#include "harness/commands/command.hpp"
#include "harness/gate/baseline.hpp"
#include "harness/gate/gate.hpp"
#include "harness/io/atomic_output.hpp"
#include "harness/report/report_file.hpp"
#include "models/error.hpp"

namespace loopgauge::harness {
namespace {

struct GateOptions {
  std::string report_file;
  std::string baseline_file;
  bool update = false;
  bool prune = false;
};

// The report's cases become the baseline's; cases that it lacks stay unless they are to be pruned.
void update(const GateOptions& options, const Report& report) {
  const Baseline fresh = baseline_of(report);
  BaselineUpdate update{fresh};
  if (std::filesystem::exists(options.baseline_file) && !options.prune) {
    update = update_baseline(read_baseline(options.baseline_file), fresh);
  }
  write_text_file(options.baseline_file, baseline_text(update.baseline));
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
  const auto options = std::make_shared<GateOptions>();
  command->add_option("report", options->report_file, "Report of a sweep")->type_name("FILE")->required();
  command->add_option("--baseline", options->baseline_file, "Baseline, a text file under version control")->type_name("FILE")->required();
  command->add_flag("--update", options->update,
                    "Write the baseline from the report instead of judging; review the difference before committing it");
  command->add_flag("--prune", options->prune, "With --update: drop the cases that the report lacks, which otherwise keep their values");
  command->footer(
      "Examples:\n"
      "  loopgauge sweep --set ci --report ci.h5 && loopgauge gate ci.h5 --baseline reports/baselines/ci.txt\n"
      "  loopgauge gate ci.h5 --baseline reports/baselines/ci.txt --update && git diff reports/baselines\n"
      "Words: regression (a digest differs, more bytes, a drift metric worse beyond the combined uncertainty, a case that fails), "
      "improved, new,\n"
      "missing (in the baseline, not run now), unchanged.\n"
      "Exit codes: 0 no regression, 1 regression, 3 not comparable or unreadable, 5 cases are missing.");
  command->callback([options, &exit_code] {
    if (options->prune && !options->update) throw ConfigError("--prune has no effect without --update");
    const Report report = read_report(options->report_file);
    if (options->update) {
      update(*options, report);
      exit_code = 0;
      return;
    }
    const GateResult result = judge_report(report, read_baseline(options->baseline_file));
    std::cout << gate_text(result);
    exit_code = result.exit_code;
  });
}

}  // namespace loopgauge::harness
