// SPDX-License-Identifier: Apache-2.0
// One process at a time at a path: whoever holds its lock keeps every other one out that asks for it.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

namespace loopgauge::harness {

// An exclusive lock (flock) on the file `<path>.lock`, which says who holds it and goes with the object. The kernel gives up the lock of a process that
// ends: a file that a killed one left keeps nobody out and is taken over. Where the file system has no such locks nobody is kept out.
class PathLock {
 public:
  // `holder`: this process in one line, for the message of whoever comes second. `subject` begins messages ("--socket PATH", the path), `busy` says what
  // another holder means and what to do. Throws FileError `<subject>: <busy> (<holder>)` where another process has it, and where the file cannot be made
  // or is no lock.
  PathLock(const std::filesystem::path& path, std::string_view holder, std::string_view subject, std::string_view busy);
  ~PathLock();
  PathLock(const PathLock&) = delete;
  PathLock& operator=(const PathLock&) = delete;

 private:
  std::filesystem::path file_;
  int descriptor_ = -1;
};

}  // namespace loopgauge::harness
