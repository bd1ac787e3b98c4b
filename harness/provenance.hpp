// SPDX-License-Identifier: Apache-2.0
// Where a result comes from: this build, this host, this command line. Reports and dumps carry it; nothing here influences a result.
#pragma once

#include <string>

namespace loopgauge::harness {

struct BuildInfo {
  std::string version;     // "0.1.0"
  std::string revision;    // full commit hash, "-dirty" appended when tracked files differ; "unknown" outside a checkout
  std::string compiler;    // "GNU 12.2.0"
  std::string build_type;  // "Release"
  std::string cuda;        // "built without CUDA", "CUDA 13.0"
};
const BuildInfo& build_info();

struct HostInfo {
  std::string system;    // "Linux 6.1.0 x86_64"
  std::string cpu;       // model name, or "unknown"
  int logical_cpus = 0;  // available to this process
  int threads = 0;       // used by the executors' parallel loops (OMP_NUM_THREADS)
  std::string device;    // optimized::device_status().description
};
HostInfo host_info();

// The command line of this process, quoted so that a shell reads it back. Set once by main.
void set_command_line(int argc, const char* const* argv);
const std::string& command_line();

// This process in one line, for others that meet it: "process 4711 on host7 since 2026-11-29T22:18:00Z: loopgauge sweep --set ci".
std::string process_text();

// Now, UTC, ISO 8601 with seconds: "2026-11-29T22:18:00Z".
std::string utc_timestamp();

// Several lines for `--version`.
std::string version_text();

}  // namespace loopgauge::harness
