// SPDX-License-Identifier: Apache-2.0
// Small reports made up for tests, and temporary files.
#pragma once

#include <filesystem>
#include <string>

#include "harness/report/report.hpp"

namespace loopgauge::harness {

// Two cases on both columns; every table has rows somewhere; all status words occur.
Report sample_report();

// A row with nothing but an identity and a status.
CaseResult sample_row(std::int64_t ordinal, const std::string& executor, CaseStatus status, const std::string& reason = "");

// A directory of this test, empty at construction and gone at destruction.
class TemporaryDirectory {
 public:
  TemporaryDirectory();
  ~TemporaryDirectory();
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;
  std::filesystem::path operator/(const std::string& name) const { return path_ / name; }
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

}  // namespace loopgauge::harness
