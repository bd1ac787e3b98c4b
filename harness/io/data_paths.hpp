// SPDX-License-Identifier: Apache-2.0
// Where the shipped model, traces and scripts are. Tried in this order: the directory named by the environment variable LOOPGAUGE_HOME (and then
// nothing else), the executable's own directory and the ones above it, share/loopgauge beside the executable's bin, the source
// directory that was compiled. Each must contain what is asked for.
#pragma once

#include <filesystem>

namespace loopgauge::harness {

// models/ouro-tiny, a directory with config.json. Throws FileError listing what was tried.
std::filesystem::path default_checkpoint();

// data, a directory with traces/. Throws FileError listing what was tried.
std::filesystem::path data_directory();

// harness/bench/peers.py. Throws FileError listing what was tried.
std::filesystem::path peers_script();

}  // namespace loopgauge::harness
