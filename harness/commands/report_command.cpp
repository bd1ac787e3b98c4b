// SPDX-License-Identifier: Apache-2.0
// `loopgauge report FILE`: renders a report of a sweep or a bench, to standard output and into files. `loopgauge report merge A B -o C`: puts shards together.
#include <algorithm>
#include <filesystem>
#include <iostream>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "harness/bench/bench_file.hpp"
#include "harness/bench/render_bench.hpp"
#include "harness/commands/command.hpp"
#include "harness/io/atomic_output.hpp"
#include "harness/io/replaceable.hpp"
#include "harness/report/render.hpp"
#include "harness/report/report_file.hpp"
#include "harness/report/report_merge.hpp"
#include "harness/report/schema.hpp"
#include "models/error.hpp"

namespace loopgauge::harness {

namespace {

struct ReportOptions {
  std::string file;
  std::map<std::string, bool> formats;  // by renderer name
  std::string html, junit;              // files to write
  bool json_schema = false;
  std::vector<std::string> merge_files;
  std::string merge_output;
};

void write_rendered(const std::string& path, Renderer renderer, const Report& report) {
  std::ostringstream text;
  renderer(report, text);
  write_text_file(path, text.view());
}

// What the files begin with that --html and --junit write.
constexpr std::string_view kPageStart = "<!doctype html>";
constexpr std::string_view kJunitStart = "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<testsuites ";

bool format_chosen(const ReportOptions& options) {
  return std::any_of(options.formats.begin(), options.formats.end(), [](const auto& format) { return format.second; });
}

// Whether the file is a bench report. What cannot be read is met, and named, by the reader of reports.
bool is_bench(const std::string& file) {
  try {
    return format_of_file(file) == kBenchFormat;
  } catch (const FileError&) {
    return false;
  }
}

void render_bench(const ReportOptions& options) {
  if (!options.junit.empty() || options.formats.at("quality"))
    throw ConfigError(options.file + " is a bench report: it has times and no verdicts, so no --junit and no --quality");
  const BenchReport report = read_bench(options.file);
  if (!options.html.empty()) {
    std::ostringstream text;
    render_bench_html(report, text);
    write_text_file(options.html, text.view());
  }
  if (options.formats.at("json")) render_bench_json(report, std::cout);
  if (options.formats.at("csv")) render_bench_csv(report, std::cout);
  if (options.formats.at("markdown")) render_bench_markdown(report, std::cout);
  if (options.formats.at("console") || (!format_chosen(options) && options.html.empty())) render_bench_terminal(report, std::cout);
  if (!options.html.empty() && !format_chosen(options))
    std::cout << "wrote " << options.html << "\n" << report.rows.size() + report.end_to_end.size() << " rows\n";
}

void render(const ReportOptions& options) {
  if (options.json_schema) {
    if (!options.file.empty() || format_chosen(options) || !options.html.empty() || !options.junit.empty())
      throw ConfigError("--json-schema describes the output of --json and takes no FILE and no other format");
    render_json_schema(std::cout);
    return;
  }
  if (options.file.empty()) throw ConfigError("report needs a FILE, or the subcommand merge");
  for (const std::string& path : {options.html, options.junit}) require_other_file(path, options.file, "the report itself");
  const auto place = [](const std::string& path) { return std::filesystem::weakly_canonical(path); };
  if (!options.html.empty() && !options.junit.empty() && place(options.html) == place(options.junit)) throw ConfigError("--html and --junit name the same file");
  require_replaceable_text(options.html, kPageStart, "--html");
  require_replaceable_text(options.junit, kJunitStart, "--junit");
  if (is_bench(options.file)) return render_bench(options);
  const Report report = read_report(options.file);  // before anything is written: a broken report leaves what is there
  if (!options.html.empty()) write_rendered(options.html, render_html, report);
  if (!options.junit.empty()) write_rendered(options.junit, render_junit, report);
  for (const RendererInfo& info : renderers()) {
    if (options.formats.at(std::string(info.name))) info.render(report, std::cout);
  }
  if (format_chosen(options)) return;
  if (options.html.empty() && options.junit.empty()) return renderers().front().render(report, std::cout);
  for (const std::string& path : {options.html, options.junit}) {
    if (!path.empty()) std::cout << "wrote " << path << "\n";
  }
  std::cout << summary_line(count_statuses(report)) << "\n";
}

void merge(const ReportOptions& options, int& exit_code) {
  for (const std::string& file : options.merge_files) require_other_file(options.merge_output, file, "one of the reports to merge");
  require_replaceable(options.merge_output, kReportFormat, "-o");
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
  command->add_option("file", options->file, "Report written by sweep, bench or merge")->type_name("FILE");
  for (const RendererInfo& info : renderers()) {
    const std::string name(info.name);
    options->formats[name] = false;
    CLI::Option* flag = command->add_flag("--" + name, options->formats[name], std::string(info.description));
    for (const auto& [other, set] : options->formats) {
      if (other != name) flag->excludes("--" + other);
    }
  }
  command->add_option("--html", options->html, "Write one self-contained page")->type_name("OUT");
  command->add_option("--junit", options->junit, "Write JUnit XML")->type_name("OUT");
  command->add_flag("--json-schema", options->json_schema, "Print the JSON Schema of what --json prints; needs no FILE");
  command->footer(
      "Examples:\n"
      "  loopgauge report sweep.h5\n"
      "  loopgauge report sweep.h5 --html sweep.html\n"
      "  loopgauge report sweep.h5 --html sweep.html --junit sweep.xml --markdown > comment.md\n"
      "  loopgauge report sweep.h5 --csv > sweep.csv\n"
      "  loopgauge report bench.h5 --html bench.html      times of `bench step` and its like: features, peers, where a step goes\n"
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
      if (!options->file.empty() || format_chosen(*options) || !options->html.empty() || !options->junit.empty() || options->json_schema)
        throw ConfigError("report merge takes its own files only: nothing may stand between report and merge");
      merge(*options, exit_code);
    } else {
      render(*options);
    }
  });
}

}  // namespace loopgauge::harness
