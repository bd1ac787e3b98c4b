// SPDX-License-Identifier: Apache-2.0
#include "harness/provenance.hpp"

#include <omp.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <array>
#include <ctime>
#include <fstream>
#include <string_view>

#include "optimized/cuda_executor.hpp"

namespace loopgauge::harness {
namespace {

std::string& stored_command_line() {
  static std::string text;
  return text;
}

// `argument` as one word of a POSIX shell.
std::string shell_word(std::string_view argument) {
  constexpr std::string_view kPlain = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_=+./:,@%";
  if (!argument.empty() && argument.find_first_not_of(kPlain) == std::string_view::npos) return std::string(argument);
  std::string word = "'";
  for (char c : argument) word += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return word + "'";
}

std::string cpu_model() {
  std::ifstream cpuinfo("/proc/cpuinfo");
  for (std::string line; std::getline(cpuinfo, line);) {
    if (line.starts_with("model name")) {
      const std::size_t value = line.find_first_not_of(" \t", line.find(':') + 1);
      if (value != std::string::npos) return line.substr(value);
    }
  }
  return "unknown";
}

}  // namespace

HostInfo host_info() {
  HostInfo info;
  utsname system{};
  info.system = uname(&system) == 0 ? std::string(system.sysname) + " " + system.release + " " + system.machine : "unknown";
  info.cpu = cpu_model();
  info.logical_cpus = omp_get_num_procs();
  info.threads = omp_get_max_threads();
  info.device = optimized::device_status().description;
  return info;
}

void set_command_line(int argc, const char* const* argv) {
  std::string text;
  for (int i = 0; i < argc; ++i) text += (i == 0 ? "" : " ") + shell_word(argv[i]);
  stored_command_line() = text;
}

const std::string& command_line() { return stored_command_line(); }

std::string process_text() {
  utsname system{};
  const std::string host = uname(&system) == 0 ? std::string(system.nodename) : "an unknown host";
  return "process " + std::to_string(getpid()) + " on " + host + " since " + utc_timestamp() + ": " + command_line();
}

std::string utc_timestamp() {
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  gmtime_r(&now, &utc);
  std::array<char, 32> buffer{};
  std::strftime(buffer.data(), buffer.size(), "%Y-%m-%dT%H:%M:%SZ", &utc);
  return buffer.data();
}

std::string version_text() {
  const BuildInfo& build = build_info();
  const std::string device = optimized::device_status().description;
  return "loopgauge " + build.version + "\nrevision  " + build.revision + "\ncompiler  " + build.compiler + ", " + build.build_type +
         "\nruntime   " + (device == build.cuda ? device : build.cuda + "; " + device);
}

}  // namespace loopgauge::harness
