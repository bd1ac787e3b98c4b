// SPDX-License-Identifier: Apache-2.0
// PyTorch on the same GPU in the same run: harness/bench/peers.py, its rows beside the own ones.
#pragma once

#include <string>
#include <vector>

#include "harness/bench/bench_output.hpp"
#include "optimized/bench/step_bench.hpp"

namespace loopgauge::harness {

struct PeersOptions {
  std::string python = "python3";
  std::vector<optimized::StepShape> steps{{2048, 1}, {8192, 1}, {32768, 1}, {2048, 8}, {8192, 8}};
  std::vector<int> prompts{2048, 8192};
  int repeats = 15;
  double compile_seconds = 90;   // for torch.compile in all; 0: not at all
  double tune_seconds = 60;      // for kernels of batch 1 that it tunes, in all
  double seconds = 600;          // for the whole script
};

// What the script would measure with ("PyTorch 2.11.0+cu130, ..."). Throws UnsupportedError naming everything that is missing: the device of this
// program, Python, PyTorch, or a device that PyTorch sees; FileError where the script is not found.
std::string find_peer(const PeersOptions& options);

// Runs the script and hands its rows on. Returns why rows are missing where it did not come to its end; empty: it did.
std::string run_peers(const PeersOptions& options, BenchOutput& output);

// One line of the script. Throws FileError saying what is wrong with it.
void take_peer_line(const std::string& line, BenchOutput& output);

}  // namespace loopgauge::harness
