// SPDX-License-Identifier: Apache-2.0
// A report that a command writes again and again while it runs: nobody else may write it meanwhile.
#pragma once

#include <filesystem>

#include "harness/io/path_lock.hpp"

namespace loopgauge::harness {

// Held from before an earlier report is read until the last writing, so that two sweeps or benches never lose each other's rows.
class ReportLock {
 public:
  // Call it before the work. Throws FileError where the report cannot be written there, and, naming the process, where another one is writing it.
  explicit ReportLock(const std::filesystem::path& report);

 private:
  PathLock lock_;
};

}  // namespace loopgauge::harness
