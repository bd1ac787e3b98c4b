// SPDX-License-Identifier: Apache-2.0
// Starts the built program the way a shell does and keeps what it prints.
#pragma once

#include <csignal>
#include <filesystem>
#include <string>
#include <vector>

namespace loopgauge::test {

struct ProcessResult {
  int exit_code = -1;  // 128 + signal when a signal ended it
  std::string out;
  std::string err;
};

struct ProcessOptions {
  std::filesystem::path standard_output = {};  // write there instead of collecting
  int interrupt_after_ms = 0;                  // > 0: send `interrupt` after so long
  int interrupt = SIGINT;
  bool ignore_hangup = false;                  // as nohup starts it
  double kill_after_ms = -1;                   // >= 0: send SIGKILL after so long
  long address_space_mib = 0;                  // > 0: limit of the process's address space
  long file_kib = 0;                           // > 0: limit of the size of a file that the process writes, as a full disk limits it
  std::filesystem::path home = {};             // value of LOOPGAUGE_HOME; empty: the source tree
};

ProcessResult run_program(const std::vector<std::string>& arguments, const ProcessOptions& options = {});

// A fresh folder of the running test, removed with the object.
class TemporaryFolder {
 public:
  TemporaryFolder();
  ~TemporaryFolder();
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  const std::filesystem::path& path() const { return path_; }
  std::filesystem::path operator/(const std::string& name) const { return path_ / name; }

 private:
  std::filesystem::path path_;
};

std::string read_file(const std::filesystem::path& path);
void write_file(const std::filesystem::path& path, const std::string& content);

}  // namespace loopgauge::test
