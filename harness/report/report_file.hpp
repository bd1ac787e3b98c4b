// SPDX-License-Identifier: Apache-2.0
// Reports in HDF5 (reports/SCHEMA.md).
#pragma once

#include <filesystem>

#include "harness/report/report.hpp"

namespace loopgauge::harness {

// Atomic: the destination holds the previous report or this one, whole. Throws FileError when it cannot be written.
void write_report(const std::filesystem::path& path, const Report& report);

// Throws FileError naming the object when the file is missing, not a report, of another major version of the schema, or inconsistent.
// Columns and tables of a newer minor version are left out.
Report read_report(const std::filesystem::path& path);

// True when every case of the report was reached and, for an unsharded report, every case of the request is there.
bool is_complete(const Report& report);

}  // namespace loopgauge::harness
