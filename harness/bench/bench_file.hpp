// SPDX-License-Identifier: Apache-2.0
// Bench reports in HDF5 (reports/BENCH_SCHEMA.md). Names, units and descriptions of all columns stand once, in bench_schema.cpp.
#pragma once

#include <filesystem>
#include <span>
#include <string_view>
#include <vector>

#include "harness/bench/bench_report.hpp"
#include "harness/report/schema.hpp"

namespace loopgauge::harness {

inline constexpr std::string_view kBenchFormat = "loopgauge-bench";
inline constexpr int kBenchMajor = 1;  // changes of meaning
inline constexpr int kBenchMinor = 0;  // additions

template <>
std::span<const Column<BenchMeta>> columns();  // attributes of /meta
template <>
std::span<const Column<BenchRun>> columns();
template <>
std::span<const Column<BenchRow>> columns();
template <>
std::span<const Column<BenchSample>> columns();
template <>
std::span<const Column<BenchMemory>> columns();
template <>
std::span<const Column<EndToEndRow>> columns();
template <>
std::span<const Column<LeftOut>> columns();

// Calls visit(name, scale, description, pointer to the vector member of BenchReport) for every table of the file.
template <class Visit>
void visit_bench_tables(Visit&& visit) {
  visit("runs", "run", "Calls of loopgauge bench, a row per call", &BenchReport::runs);
  visit("rows", "row", "Times, a row per thing that was timed", &BenchReport::rows);
  visit("samples", "entry", "Single times of the rows", &BenchReport::samples);
  visit("memory", "entry", "Device memory by category while a row was measured", &BenchReport::memory);
  visit("end_to_end", "entry", "Requests served from arrival to last token, a row per setting and load", &BenchReport::end_to_end);
  visit("left_out", "entry", "What did not run, and why", &BenchReport::left_out);
}

// Atomic: the destination holds the previous file or this one, whole. Throws FileError when it cannot be written.
void write_bench(const std::filesystem::path& path, const BenchReport& report);

// Throws FileError naming the object when the file is missing, no bench report, of another major version, or inconsistent. Columns and tables
// of a newer minor version are left out.
BenchReport read_bench(const std::filesystem::path& path);

}  // namespace loopgauge::harness
