// SPDX-License-Identifier: Apache-2.0
#include "harness/bench/bench_file.hpp"

#include <algorithm>
#include <cmath>
#include <functional>
#include <type_traits>
#include <utility>

#include "harness/io/atomic_output.hpp"
#include "harness/io/hdf5.hpp"
#include "harness/io/hdf5_probe.hpp"
#include "harness/report/report_bytes.hpp"
#include "harness/report/table_file.hpp"
#include "models/error.hpp"

namespace loopgauge::harness {

namespace {

constexpr unsigned kSeconds = 30;  // of processor time for reading a file

// Every index of a row that belongs to another one points to one.
void check_references(const h5::Group& root, const BenchReport& report) {
  const auto check = [&](const char* table, std::size_t row, const char* column, std::int64_t value, std::size_t count) {
    if (value < 0 || value >= static_cast<std::int64_t>(count))
      root.open_group(table).fail("row " + std::to_string(row) + ": " + column + " " + std::to_string(value) + ", but there are " + std::to_string(count));
  };
  for (std::size_t i = 0; i < report.rows.size(); ++i) check("rows", i, "run", report.rows[i].run, report.runs.size());
  for (std::size_t i = 0; i < report.samples.size(); ++i) check("samples", i, "row", report.samples[i].row, report.rows.size());
  for (std::size_t i = 0; i < report.memory.size(); ++i) check("memory", i, "row", report.memory[i].row, report.rows.size());
  for (std::size_t i = 0; i < report.end_to_end.size(); ++i) check("end_to_end", i, "run", report.end_to_end[i].run, report.runs.size());
  for (std::size_t i = 0; i < report.left_out.size(); ++i) check("left_out", i, "run", report.left_out[i].run, report.runs.size());
}

BenchReport read_whole(const std::filesystem::path& path) {
  const h5::Group root = h5::File::open_readonly(path, h5::Trust::probed).root();
  const std::int64_t minor = file_minor_version(root, kBenchFormat, kBenchMajor, "bench report");
  RowBudget budget(path);
  BenchReport report;
  report.meta = read_attributes<BenchMeta>(root.open_group("meta"));
  std::size_t known = 1;
  visit_bench_tables([&](const char* name, const char* scale, const char*, auto table) {
    if (!root.has_group(name)) return;
    ++known;
    using Rows = std::remove_reference_t<decltype(report.*table)>;
    report.*table = read_table<typename Rows::value_type>(root.open_group(name), scale, minor, kBenchMinor, budget);
  });
  if (minor <= kBenchMinor && known != root.members().size()) root.fail("has a table that this version of the schema does not know");
  check_references(root, report);
  return report;
}

}  // namespace

void set_floor(BenchRow& row, const BenchRun& run) {
  const double by_bytes = row.bytes > 0 && run.read_gb_per_s > 0 ? row.bytes / run.read_gb_per_s / 1e3 : 0;
  const double by_flops = row.flops > 0 && run.bf16_tflop_per_s > 0 ? row.flops / run.bf16_tflop_per_s / 1e6 : 0;
  const double floor = std::max(by_bytes, by_flops);
  if (floor <= 0) return;
  row.floor_us = floor;
  row.ratio_to_floor = row.median_us / floor;
}

void write_bench(const std::filesystem::path& path, const BenchReport& report) {
  AtomicOutput output(path);
  h5::File file = h5::File::create(output, h5::FileFormat::compact);
  {
    const h5::Group root = file.root();
    write_format(root, kBenchFormat, kBenchMajor, kBenchMinor);
    write_attributes(root.create_group("meta"), report.meta);
    visit_bench_tables([&](const char* name, const char* scale, const char* description, auto table) {
      if ((report.*table).empty()) return;
      const h5::Group group = root.create_group(name);
      group.set_attribute("description", description);
      write_table(group, scale, "Row number", report.*table);
    });
  }
  file.close();
  output.commit();
}

BenchReport read_bench(const std::filesystem::path& path) {
  const std::string bytes = h5::read_in_children(path, {[&path] {
                                                   const BenchReport report = read_whole(path);
                                                   std::string out;
                                                   put_rows(out, std::vector{report.meta});
                                                   visit_bench_tables([&](const char*, const char*, const char*, auto table) { put_rows(out, report.*table); });
                                                   return out;
                                                 }},
                                                 kSeconds)
                                .front();
  std::string_view rest = bytes;
  BenchReport report;
  std::vector<BenchMeta> meta;
  take_rows(rest, meta);
  report.meta = meta.at(0);
  visit_bench_tables([&](const char*, const char*, const char*, auto table) { take_rows(rest, report.*table); });
  return report;
}

}  // namespace loopgauge::harness
