// SPDX-License-Identifier: Apache-2.0
// Where the results of a device bench go, row by row: to standard output, and into a file that a killed run leaves whole.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "harness/bench/bench_report.hpp"
#include "harness/progress.hpp"
#include "harness/report_lock.hpp"

namespace CLI {
class App;
}

namespace loopgauge::harness {

struct BenchOutputOptions {
  std::string report{};             // file to write; empty: none
  bool append = false;              // add this run to the file
  std::string output = "console";   // console, json, csv
  std::string shape = "ouro-1.4b";  // what is measured, for the file
  std::string device{};             // where, for the file; empty: the CUDA device
};

// --report, --append, --output.
void add_bench_output_options(CLI::App& command, BenchOutputOptions& options);

class BenchOutput {
 public:
  // Begins a run. Call it before the work: throws ConfigError for options that do not go together, FileError where the report may not be
  // replaced (another kind of file), cannot be written or read, is being written by another process, or belongs to another build, device or shape.
  explicit BenchOutput(BenchOutputOptions options);

  // What is measured next: shown on a terminal. Throws Interrupted once a signal has arrived.
  void announce(const std::string& what);
  void ceilings(double read_gb_per_s, double bf16_tflop_per_s);
  void peer(const std::string& description);
  // The row's run, floor and ratio are set here. `samples_us`: single times, may be empty; `memory`: its row indices are set here.
  void row(BenchRow row, const std::vector<double>& samples_us = {}, std::vector<BenchMemory> memory = {});
  void end_to_end(EndToEndRow row);
  void left_out(const std::string& what, const std::string& reason);
  // The run has come to its end, and is complete where nothing broke off. What was measured stays in the file without it.
  void finish(bool complete = true);
  bool anything_left_out() const { return anything_left_out_; }

  const BenchReport& report() const { return report_; }
  const BenchRun& run() const { return report_.runs.back(); }

 private:
  void save();
  void print_header(const char* kind);

  BenchOutputOptions options_;
  std::optional<ReportLock> lock_;
  Progress progress_;
  BenchReport report_;
  std::string printed_kind_;        // of the lines printed last
  bool anything_left_out_ = false;  // by this run
};

}  // namespace loopgauge::harness
