// SPDX-License-Identifier: Apache-2.0
#include "harness/bench/bench_output.hpp"

#include <CLI/CLI.hpp>
#include <filesystem>
#include <iostream>
#include <utility>

#include "harness/bench/bench_file.hpp"
#include "harness/bench/render_bench.hpp"
#include "harness/interrupt.hpp"
#include "harness/io/replaceable.hpp"
#include "harness/provenance.hpp"
#include "harness/report/terminal_text.hpp"
#include "models/error.hpp"
#include "optimized/bench/step_bench.hpp"

namespace loopgauge::harness {

namespace {

BenchMeta meta_of_this_build(const std::string& shape, const std::string& device) {
  const BuildInfo& build = build_info();
  const HostInfo host = host_info();
  // Single operations are measured at the one shape that the device benches know.
  const std::int64_t layers = shape == "ouro-1.4b" ? optimized::ouro_1_4b_shape().layers : 0;
  return {build.version, build.revision, build.compiler + ", " + build.build_type, device.empty() ? host.device : device, host.cpu, shape, layers};
}

// A run may be added to a file whose rows it can stand beside.
void require_same(const std::string& path, const BenchMeta& found, const BenchMeta& own) {
  for (const auto& [name, member] : {std::pair{"sources", &BenchMeta::source_revision}, {"device", &BenchMeta::device}, {"shape", &BenchMeta::shape}}) {
    if (found.*member != own.*member)
      throw FileError(path + ": --append would mix " + std::string(name) + ": the file has " + found.*member + ", this run " + own.*member +
                      "; write to another file");
  }
}

}  // namespace

void add_bench_output_options(CLI::App& command, BenchOutputOptions& options) {
  CLI::Option* report =
      command.add_option("--report", options.report, "Write the rows to this file as they come (see `report`)")->type_name("FILE");
  command.add_flag("--append", options.append, "Add them to the file's earlier runs, of the same build and device, instead of replacing it")->needs(report);
  command.add_option("--output", options.output, "console, csv: rows as they come; json: everything at the end")
      ->check(CLI::IsMember({"console", "json", "csv"}))
      ->capture_default_str();
}

BenchOutput::BenchOutput(BenchOutputOptions options) : options_(std::move(options)), progress_("bench", 0) {
  report_.meta = meta_of_this_build(options_.shape, options_.device);
  if (!options_.report.empty()) {
    require_replaceable(options_.report, kBenchFormat, "--report");
    lock_.emplace(options_.report);
    std::error_code error;
    if (options_.append && std::filesystem::exists(options_.report, error)) {
      BenchReport earlier = read_bench(options_.report);
      require_same(options_.report, earlier.meta, report_.meta);
      report_ = std::move(earlier);
    }
  }
  BenchRun run;
  run.command_line = command_line();
  run.started = utc_timestamp();
  report_.runs.push_back(std::move(run));
  if (options_.output == "console") std::cout << report_.meta.device << "\n";
}

void BenchOutput::announce(const std::string& what) {
  throw_if_interrupted();
  progress_.update(0, what);
}

void BenchOutput::ceilings(double read_gb_per_s, double bf16_tflop_per_s) {
  BenchRun& run = report_.runs.back();
  run.read_gb_per_s = read_gb_per_s;
  run.bf16_tflop_per_s = bf16_tflop_per_s;
  if (options_.output == "console") {
    progress_.clear();
    std::cout << formatted("ceilings of this run: read %.0f GB/s, BF16 product %.0f TFLOP/s\n", read_gb_per_s, bf16_tflop_per_s);
    std::cout.flush();
  }
  save();
}

void BenchOutput::peer(const std::string& description) {
  if (run().peer == description) return;
  report_.runs.back().peer = description;
  if (options_.output == "console") {
    progress_.clear();
    std::cout << "peer: " << description << "\n";
  }
  save();
}

void BenchOutput::print_header(const char* kind) {
  progress_.clear();
  if (printed_kind_ == kind) return;
  printed_kind_ = kind;
  const std::string header = options_.output == "csv" ? bench_csv_header(kind) : bench_line_header(kind);
  std::cout << header << "\n";
}

void BenchOutput::row(BenchRow row, const std::vector<double>& samples_us, std::vector<BenchMemory> memory) {
  row.run = static_cast<std::int64_t>(report_.runs.size()) - 1;
  set_floor(row, run());
  const auto index = static_cast<std::int64_t>(report_.rows.size());
  for (std::size_t i = 0; i < samples_us.size(); ++i) report_.samples.push_back({index, static_cast<std::int64_t>(i), samples_us[i]});
  for (BenchMemory& part : memory) {
    part.row = index;
    report_.memory.push_back(std::move(part));
  }
  report_.rows.push_back(std::move(row));
  if (options_.output != "json") {
    print_header("rows");
    const std::string line = options_.output == "csv" ? bench_csv_line(report_.rows.back()) : bench_line(report_.rows.back());
    std::cout << line << "\n";
    std::cout.flush();
  }
  save();
}

void BenchOutput::end_to_end(EndToEndRow row) {
  row.run = static_cast<std::int64_t>(report_.runs.size()) - 1;
  report_.end_to_end.push_back(std::move(row));
  if (options_.output != "json") {
    print_header("end_to_end");
    const std::string line = options_.output == "csv" ? bench_csv_line(report_.end_to_end.back()) : bench_line(report_.end_to_end.back());
    std::cout << line << "\n";
    std::cout.flush();
  }
  save();
}

void BenchOutput::left_out(const std::string& what, const std::string& reason) {
  anything_left_out_ = true;
  report_.left_out.push_back({static_cast<std::int64_t>(report_.runs.size()) - 1, what, reason});
  if (options_.output == "console") {
    progress_.clear();
    std::cout << "left out: " << what << ": " << reason << "\n";
    std::cout.flush();
  }
  save();
}

void BenchOutput::finish(bool complete) {
  report_.runs.back().complete = complete;
  save();
  progress_.clear();
  if (options_.output == "json") render_bench_json(report_, std::cout);
  if (options_.output == "console" && !options_.report.empty()) std::cout << "wrote " << options_.report << "\n";
  std::cout.flush();
}

void BenchOutput::save() {
  report_.runs.back().finished = utc_timestamp();
  if (!options_.report.empty()) write_bench(options_.report, report_);
}

}  // namespace loopgauge::harness
