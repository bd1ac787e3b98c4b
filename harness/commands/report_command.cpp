// SPDX-License-Identifier: Apache-2.0
// `loopgauge report FILE`: renders a report. `loopgauge report merge A B -o C`: puts shards together.
#include <algorithm>
#include <filesystem>
#include <iostream>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "harness/commands/command.hpp"
#include "harness/report/render.hpp"
#include "harness/report/report_file.hpp"
#include "harness/report/report_merge.hpp"
#include "models/error.hpp"

namespace loopgauge::harness {

namespace {

struct ReportOptions {
  std::string file;
  std::map<std::string, bool> formats;  // by renderer name
  std::vector<std::string> merge_files;
  std::string merge_output;
};

void render(const ReportOptions& options) {
  if (options.file.empty()) throw ConfigError("report needs a FILE, or the subcommand merge");
  Renderer renderer = renderers().front().render;
  for (const RendererInfo& info : renderers()) {
    if (options.formats.at(std::string(info.name))) renderer = info.render;
  }
  renderer(read_report(options.file), std::cout);
}

void merge(const ReportOptions& options, int& exit_code) {
  std::vector<NamedReport> parts;
  for (const std::string& file : options.merge_files) parts.push_back({file, read_report(file)});
  const Report merged = merge_reports(parts);
  write_report(options.merge_output, merged);
  std::cout << "wrote " << options.merge_output << ": " << merged.cases.size() << " rows of " << parts.size() << " reports\n";
  if (!is_complete(merged) || !merged.meta.shard.empty()) {
    std::cout << "incomplete: "
              << (merged.meta.shard.empty() ? "a shard did not reach all of its cases" : "it holds shards " + merged.meta.shard + " only")
              << "\n";
    exit_code = exit_code_of(CaseStatus::not_run);
  }
  std::cout << summary_line(count_statuses(merged)) << "\n";
}

}  // namespace

void add_report_command(CLI::App& app, int& exit_code) {
  CLI::App* command = app.add_subcommand("report", "Show a report, or merge the reports of shards");
  auto options = std::make_shared<ReportOptions>();
  command->add_option("file", options->file, "Report written by sweep or merge")->type_name("FILE");
  for (const RendererInfo& info : renderers()) {
    const std::string name(info.name);
    options->formats[name] = false;
    CLI::Option* flag = command->add_flag("--" + name, options->formats[name], std::string(info.description));
    for (const auto& [other, set] : options->formats) {
      if (other != name) flag->excludes("--" + other);
    }
  }
  command->footer(
      "Examples:\n"
      "  loopgauge report sweep.h5\n"
      "  loopgauge report sweep.h5 --csv > sweep.csv\n"
      "  loopgauge report merge shard-1.h5 shard-2.h5 -o sweep.h5\n"
      "Rendering a report exits with 0 whatever its verdict: sweep and gate judge.");

  CLI::App* merge_command =
      command->add_subcommand("merge", "Put the reports of shards together; exits with 5 while shards or cases are missing");
  merge_command->add_option("files", options->merge_files, "Reports of the shards of one sweep")
      ->type_name("FILE")
      ->required()
      ->expected(2, 100000);
  merge_command->add_option("-o,--output-file", options->merge_output, "Report to write")->type_name("FILE")->required();
  merge_command->footer("Example:\n  loopgauge report merge shard-1.h5 shard-2.h5 -o sweep.h5");

  command->callback([options, merge_command, &exit_code] {
    exit_code = 0;
    if (*merge_command) {
      const bool other = std::any_of(options->formats.begin(), options->formats.end(), [](const auto& format) { return format.second; });
      if (!options->file.empty() || other)
        throw ConfigError("report merge takes its own files only: nothing may stand between report and merge");
      merge(*options, exit_code);
    } else {
      render(*options);
    }
  });
}

}  // namespace loopgauge::harness
