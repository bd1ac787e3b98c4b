// SPDX-License-Identifier: Apache-2.0
// One function per verb: adds its subcommand to the application. The callback writes the process exit code, or throws an Error that
// main() turns into one sentence on standard error and the documented exit code.
#pragma once

#include <CLI/CLI.hpp>

namespace loopgauge::harness {

void add_sweep_command(CLI::App& app, int& exit_code);
void add_run_command(CLI::App& app, int& exit_code);
void add_list_command(CLI::App& app, int& exit_code);
void add_explain_command(CLI::App& app, int& exit_code);
void add_report_command(CLI::App& app, int& exit_code);
void add_gate_command(CLI::App& app, int& exit_code);
void add_bench_command(CLI::App& app, int& exit_code);
void add_trace_command(CLI::App& app, int& exit_code);
void add_model_command(CLI::App& app, int& exit_code);
void add_pd_command(CLI::App& app, int& exit_code);
void add_doctor_command(CLI::App& app, int& exit_code);

}  // namespace loopgauge::harness
