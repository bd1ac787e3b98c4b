// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include <hdf5.h>

#include <cmath>
#include <fstream>
#include <functional>
#include <iterator>
#include <random>

#include "harness/io/hdf5.hpp"
#include "harness/report/report_file.hpp"
#include "harness/report/schema.hpp"
#include "models/error.hpp"
#include "tests/report/large_report.hpp"
#include "tests/report/sample_report.hpp"

namespace loopgauge::harness {
namespace {

template <class Row>
std::vector<std::string> texts(const std::vector<Row>& rows) {
  std::vector<std::string> cells;
  for (const Row& row : rows) {
    for (const Column<Row>& column : columns<Row>()) cells.push_back(std::string(column.name) + "=" + cell_text(row, column));
  }
  return cells;
}

void expect_equal(const Report& a, const Report& b) {
  EXPECT_EQ(texts(std::vector{a.meta}), texts(std::vector{b.meta}));
  EXPECT_EQ(texts(a.cases), texts(b.cases));
  ASSERT_EQ(a.cases.size(), b.cases.size());
  for (std::size_t n = 0; n < a.cases.size(); ++n) {
    visit_tables([&](const char* name, const char*, auto table) {
      EXPECT_EQ(texts(a.cases[n].*table), texts(b.cases[n].*table)) << name << " of case " << n;
    });
  }
}

std::string message_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const FileError& error) {
    return error.what();
  }
  ADD_FAILURE() << "no FileError";
  return "";
}

TEST(ReportFile, RoundTripKeepsEveryCell) {
  TemporaryDirectory directory;
  const Report report = sample_report();
  write_report(directory / "report.h5", report);
  expect_equal(report, read_report(directory / "report.h5"));
}

// Large enough to be read in parts, by as many processes as the machine has processors.
TEST(ReportFile, PartsOfALargeReportComeTogether) {
  TemporaryDirectory directory;
  const Report report = large_report({.cases = 80, .speculation = true});
  write_report(directory / "report.h5", report);
  EXPECT_GT(std::filesystem::file_size(directory / "report.h5"), std::uintmax_t{4} << 20);
  expect_equal(report, read_report(directory / "report.h5"));
}

TEST(ReportFile, WritesTheSameBytesForTheSameReport) {
  TemporaryDirectory directory;
  write_report(directory / "a.h5", sample_report());
  write_report(directory / "b.h5", sample_report());
  const auto bytes = [](const std::filesystem::path& path) {
    std::ifstream in(path, std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(in), {});
  };
  EXPECT_GT(bytes(directory / "a.h5").size(), 1000u);
  EXPECT_EQ(bytes(directory / "a.h5"), bytes(directory / "b.h5"));
}

TEST(ReportFile, EveryColumnHasUnitDescriptionAndScale) {
  TemporaryDirectory directory;
  write_report(directory / "report.h5", sample_report());
  const h5::File file = h5::File::open_readonly(directory / "report.h5");
  const h5::Group root = file.root();
  EXPECT_EQ(root.string_attribute("format"), "loopgauge-report");
  EXPECT_EQ(root.int_attribute("version"), kReportMajor);
  EXPECT_EQ(root.open_group("meta").string_attribute("status"), "complete");
  EXPECT_EQ(root.open_group("meta").string_attribute("verdict"), "failed");

  int datasets = 0;
  const auto check_table = [&](const h5::Group& group, const std::string& axis) {
    for (const std::string& name : group.members()) {
      const h5::Dataset dataset = group.open_dataset(name);
      EXPECT_TRUE(dataset.has_attribute("units")) << dataset.where();
      EXPECT_FALSE(dataset.string_attribute("description").empty()) << dataset.where();
      if (name == axis) {
        EXPECT_EQ(dataset.string_attribute("CLASS"), "DIMENSION_SCALE") << dataset.where();
        EXPECT_EQ(dataset.string_attribute("NAME"), axis);
      } else {
        EXPECT_TRUE(dataset.has_attribute("DIMENSION_LIST")) << dataset.where();
      }
      ++datasets;
    }
  };
  check_table(root.open_group("cases"), "case");
  const h5::Group cases = root.open_group("case");
  for (const std::string& n : cases.members()) {
    const h5::Group one = cases.open_group(n);
    for (const std::string& table : one.members()) check_table(one.open_group(table), "entry");
  }
  EXPECT_GT(datasets, 60);
}

TEST(ReportFile, UnreachedCasesMakeItIncomplete) {
  Report report = sample_report();
  EXPECT_TRUE(is_complete(report));
  report.cases[0].status = CaseStatus::not_run;
  report.cases[0].reason = kNotReached;
  EXPECT_FALSE(is_complete(report));
  report = sample_report();
  report.meta.case_count = 3;
  EXPECT_FALSE(is_complete(report));
}

TEST(ReportFile, FailedWriteLeavesTheLastGoodReport) {
  TemporaryDirectory directory;
  write_report(directory / "report.h5", sample_report());
  Report broken = sample_report();
  broken.cases[0].status = static_cast<CaseStatus>(99);
  EXPECT_THROW(write_report(directory / "report.h5", broken), Error);
  expect_equal(sample_report(), read_report(directory / "report.h5"));
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(directory.path()), {}), 1) << "a temporary file is left behind";
  EXPECT_THROW(write_report(directory / "missing/report.h5", sample_report()), FileError);
}

TEST(ReportFile, RefusesWhatIsNotAReportOfThisVersion) {
  TemporaryDirectory directory;
  EXPECT_THROW(read_report(directory / "absent.h5"), FileError);
  std::ofstream(directory / "text.h5") << "not HDF5";
  EXPECT_THROW(read_report(directory / "text.h5"), FileError);
  {
    h5::File file = h5::File::create(directory / "other.h5");
    file.root().set_attribute("format", "loopgauge-trace");
    file.close();
  }
  EXPECT_NE(message_of([&] { read_report(directory / "other.h5"); }).find("not a loopgauge report"), std::string::npos);
  {
    h5::File file = h5::File::create(directory / "future.h5");
    file.root().set_attribute("format", kReportFormat);
    file.root().set_attribute("version", kReportMajor + 1);
    file.close();
  }
  EXPECT_NE(message_of([&] { read_report(directory / "future.h5"); }).find("schema version 2"), std::string::npos);
}

TEST(ReportFile, ColumnsNewerThanTheFileKeepTheirDefault) {
  TemporaryDirectory directory;
  Report report = sample_report();
  report.cases[0].timings[0].floor_seconds = 0.125;
  write_report(directory / "report.h5", report);
  EXPECT_EQ(read_report(directory / "report.h5").cases[0].timings[0].floor_seconds, 0.125);
  const auto change = [&](bool version_too) {
    const hid_t file = H5Fopen((directory / "report.h5").c_str(), H5F_ACC_RDWR, H5P_DEFAULT);
    ASSERT_GE(file, 0);
    if (H5Lexists(file, "/case/0/timing/floor_seconds", H5P_DEFAULT) > 0) {
      EXPECT_GE(H5Ldelete(file, "/case/0/timing/floor_seconds", H5P_DEFAULT), 0);
    }
    if (version_too) {
      const hid_t attribute = H5Aopen(file, "minor_version", H5P_DEFAULT);
      const int minor = 0;
      EXPECT_GE(H5Awrite(attribute, H5T_NATIVE_INT, &minor), 0);
      H5Aclose(attribute);
    }
    H5Fclose(file);
  };
  change(false);
  EXPECT_NE(message_of([&] { read_report(directory / "report.h5"); }).find("floor_seconds"), std::string::npos) << "a hole is no default";
  change(true);
  const Report old = read_report(directory / "report.h5");
  EXPECT_TRUE(std::isnan(old.cases[0].timings[0].floor_seconds));
  EXPECT_EQ(old.cases[0].timings[0].seconds, 0.25);
}

// A megabyte of compressed zeros is no report of gigabytes.
TEST(ReportFile, MoreRowsThanTheFileCanHoldAreRefused) {
  TemporaryDirectory directory;
  Report report = sample_report();
  report.cases[0].divergence.assign(std::size_t{3} << 20, DivergenceRow{});
  write_report(directory / "many.h5", report);
  ASSERT_LT(std::filesystem::file_size(directory / "many.h5"), std::uintmax_t{1} << 19) << "a larger file may have that many";
  try {
    read_report(directory / "many.h5");
    ADD_FAILURE() << "accepted";
  } catch (const FileError& error) {
    EXPECT_NE(std::string(error.what()).find("divergence/entry: declares 3145728 rows, more than a report of this size holds"), std::string::npos) << error.what();
  }
}

TEST(ReportFile, CorruptBytesAreRefusedOrHarmlessButNeverFatal) {
  TemporaryDirectory directory;
  write_report(directory / "good.h5", sample_report());
  std::ifstream in(directory / "good.h5", std::ios::binary);
  const std::string good(std::istreambuf_iterator<char>(in), {});
  std::minstd_rand random(1);
  int refused = 0;
  for (int round = 0; round < 60; ++round) {
    std::string bytes = good;
    for (int flips = round % 3 == 0 ? 32 : 2; flips > 0; --flips) bytes[random() % bytes.size()] ^= static_cast<char>(1u << random() % 8);
    if (round % 5 == 4) bytes.resize(random() % bytes.size());
    std::ofstream(directory / "bad.h5", std::ios::binary) << bytes;
    try {
      read_report(directory / "bad.h5");
    } catch (const FileError&) {
      ++refused;
    }
  }
  EXPECT_GE(refused, 20) << "the flips should have hit something";
}

}  // namespace
}  // namespace loopgauge::harness
