// SPDX-License-Identifier: Apache-2.0
// A file that a command reads, changes and writes again, a report or a baseline: nobody else may write it meanwhile.
#pragma once

#include <filesystem>
#include <string_view>

#include "harness/io/path_lock.hpp"

namespace loopgauge::harness {

// Held from before the earlier file is read until the last writing, so that two sweeps, benches or updates never lose each other's rows.
class ReportLock {
 public:
  // Call it before the work. Throws FileError where the file cannot be written there, and, naming the process, where another one is writing it. `flag`:
  // the option that named it, for that message.
  explicit ReportLock(const std::filesystem::path& report, std::string_view flag = "--report");

 private:
  PathLock lock_;
};

}  // namespace loopgauge::harness
