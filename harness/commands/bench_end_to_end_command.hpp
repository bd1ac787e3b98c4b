// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <CLI/CLI.hpp>

namespace loopgauge::harness {

// `loopgauge bench e2e`. The callback writes the process exit code or throws, as those of the verbs (command.hpp).
void add_bench_end_to_end_command(CLI::App& bench, int& exit_code);

}  // namespace loopgauge::harness
