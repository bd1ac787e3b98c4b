// SPDX-License-Identifier: Apache-2.0
#include "harness/report_lock.hpp"

#include <string>

#include "harness/io/atomic_output.hpp"
#include "harness/provenance.hpp"

namespace loopgauge::harness {
namespace {

// One name for one file, whatever links lead to it.
std::filesystem::path writable(const std::filesystem::path& report) {
  const AtomicOutput output(report);
  return output.destination();
}

}  // namespace

ReportLock::ReportLock(const std::filesystem::path& report, std::string_view flag)
    : lock_(writable(report), process_text(), report.string(), "another process is writing it: wait for its end or choose another " + std::string(flag)) {}

}  // namespace loopgauge::harness
