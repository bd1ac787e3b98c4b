// SPDX-License-Identifier: Apache-2.0
// The subcommands of `loopgauge bench` that measure the device at a model's shape.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

namespace loopgauge::harness {

inline constexpr int kIncompleteExit = 5;  // something that was asked for has no row

// The callbacks write the process exit code or throw, as those of the verbs (command.hpp).
void add_bench_ops_command(CLI::App& bench, int& exit_code);
void add_bench_step_command(CLI::App& bench, int& exit_code);
void add_bench_prefill_command(CLI::App& bench, int& exit_code);
void add_bench_peers_command(CLI::App& bench, int& exit_code);

// --switches; words that are no switches are usage errors.
void add_switches_option(CLI::App& command, std::vector<std::string>& switches, const std::string& description = "Switch settings to measure");

// Throws UnsupportedError with the reason where there is no device: before a report is begun.
void require_device();

}  // namespace loopgauge::harness
