// SPDX-License-Identifier: Apache-2.0
#include "harness/report/report_file.hpp"

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <system_error>
#include <thread>
#include <type_traits>

#include "harness/io/atomic_output.hpp"
#include "harness/io/hdf5.hpp"
#include "harness/io/hdf5_probe.hpp"
#include "harness/report/report_bytes.hpp"
#include "harness/report/schema.hpp"
#include "harness/report/table_file.hpp"
#include "models/error.hpp"

namespace loopgauge::harness {

namespace {

void write_meta(const h5::Group& meta, const Report& report) {
  meta.set_attribute("schema_version", std::to_string(kReportMajor) + "." + std::to_string(kReportMinor));
  meta.set_attribute("status", is_complete(report) ? "complete" : "incomplete");
  meta.set_attribute("verdict", to_string(verdict(report)));
  write_attributes(meta, report.meta);
}

// The file's minor version. Throws for another format or major version.
std::int64_t check_version(const h5::Group& root) { return file_minor_version(root, kReportFormat, kReportMajor, "report"); }

}  // namespace

bool is_complete(const Report& report) {
  std::vector<std::int64_t> ordinals;
  for (const CaseResult& row : report.cases) {
    if (row.status == CaseStatus::not_run && row.reason == kNotReached) return false;
    ordinals.push_back(row.ordinal);
  }
  if (!report.meta.shard.empty()) return true;
  std::sort(ordinals.begin(), ordinals.end());
  return std::unique(ordinals.begin(), ordinals.end()) - ordinals.begin() == report.meta.case_count;
}

void write_report(const std::filesystem::path& path, const Report& report) {
  AtomicOutput output(path);
  h5::File file = h5::File::create(output, h5::FileFormat::compact);
  {
    const h5::Group root = file.root();
    write_format(root, kReportFormat, kReportMajor, kReportMinor);
    root.set_attribute("title", report.meta.title);
    write_meta(root.create_group("meta"), report);
    write_table(root.create_group("cases"), "case", "Number n of the group /case/<n>", report.cases);
    const h5::Group case_groups = root.create_group("case");
    for (std::size_t n = 0; n < report.cases.size(); ++n) {
      const CaseResult& result = report.cases[n];
      const h5::Group group = case_groups.create_group(std::to_string(n));
      group.set_attribute("id", result.id);
      group.set_attribute("executor", result.executor);
      visit_tables([&](const char* name, const char* description, auto table) {
        if ((result.*table).empty()) return;
        const h5::Group table_group = group.create_group(name);
        table_group.set_attribute("description", description);
        write_table(table_group, "entry", "Row number", result.*table);
      });
    }
  }
  file.close();
  output.commit();
}

namespace {

// One of `count` parts of the rows; every part reads /meta and /cases and checks the whole file's form.
struct Part {
  std::size_t index = 0, count = 1;
  std::size_t begin(std::size_t rows) const { return rows * index / count; }
  std::size_t end(std::size_t rows) const { return rows * (index + 1) / count; }
};

// The report with the tables of the part's rows.
Report read_part(const std::filesystem::path& path, const Part& part) {
  const h5::File file = h5::File::open_readonly(path, h5::Trust::probed);
  const h5::Group root = file.root();
  const std::int64_t minor = check_version(root);
  RowBudget budget(path);
  Report report;
  report.meta = read_attributes<ReportMeta>(root.open_group("meta"));
  report.cases = read_table<CaseResult>(root.open_group("cases"), "case", minor, kReportMinor, budget);
  const h5::Group case_groups = root.open_group("case");
  if (case_groups.members().size() != report.cases.size()) {
    case_groups.fail(std::to_string(case_groups.members().size()) + " groups for " + std::to_string(report.cases.size()) +
                     " rows of /cases");
  }
  for (std::size_t n = part.begin(report.cases.size()); n < part.end(report.cases.size()); ++n) {
    CaseResult& result = report.cases[n];
    const h5::Group group = case_groups.open_group(std::to_string(n));
    if (group.string_attribute("id") != result.id || group.string_attribute("executor") != result.executor) {
      group.fail("belongs to another row than /cases says");
    }
    std::size_t known = 0;
    visit_tables([&](const char* name, const char*, auto table) {
      if (!group.has_group(name)) return;
      ++known;
      using Rows = std::remove_reference_t<decltype(result.*table)>;
      result.*table = read_table<typename Rows::value_type>(group.open_group(name), "entry", minor, kReportMinor, budget);
    });
    if (minor <= kReportMinor && known != group.members().size()) group.fail("has a table that this version of the schema does not know");
  }
  return report;
}

// /meta and /cases are sent by the first part only.
std::string part_bytes(const std::filesystem::path& path, const Part& part) {
  const Report report = read_part(path, part);
  std::string bytes;
  if (part.index == 0) {
    put_rows(bytes, std::vector{report.meta});
    put_rows(bytes, report.cases);
  }
  for (std::size_t n = part.begin(report.cases.size()); n < part.end(report.cases.size()); ++n)
    visit_tables([&](const char*, const char*, auto table) { put_rows(bytes, report.cases[n].*table); });
  return bytes;
}

}  // namespace

Report read_report(const std::filesystem::path& path) {
  constexpr unsigned kBaseSeconds = 30;
  constexpr std::uintmax_t kBytesPerSecond = std::uintmax_t{1} << 20;
  constexpr std::uintmax_t kBytesPerPart = std::uintmax_t{2} << 20;  // below, starting another process costs more than it saves
  constexpr std::uintmax_t kMostParts = 16;
  std::error_code error;
  std::uintmax_t size = std::filesystem::file_size(path, error);
  if (error) size = 0;
  const auto seconds = kBaseSeconds + static_cast<unsigned>(size / kBytesPerSecond);
  const std::size_t parts = std::clamp<std::uintmax_t>(
      size / kBytesPerPart, 1, std::min<std::uintmax_t>(kMostParts, std::max(1u, std::thread::hardware_concurrency())));
  std::vector<std::function<std::string()>> reads;
  for (std::size_t i = 0; i < parts; ++i) reads.push_back([&path, part = Part{i, parts}] { return part_bytes(path, part); });
  const std::vector<std::string> results = h5::read_in_children(path, reads, seconds);

  Report report;
  for (std::size_t i = 0; i < parts; ++i) {
    std::string_view bytes = results[i];
    if (i == 0) {
      std::vector<ReportMeta> meta;
      take_rows(bytes, meta);
      report.meta = meta.at(0);
      take_rows(bytes, report.cases);
    }
    const Part part{i, parts};
    for (std::size_t n = part.begin(report.cases.size()); n < part.end(report.cases.size()); ++n)
      visit_tables([&](const char*, const char*, auto table) { take_rows(bytes, report.cases[n].*table); });
  }
  return report;
}

}  // namespace loopgauge::harness
