// SPDX-License-Identifier: Apache-2.0
// Rows described by Column lists as HDF5: tables as groups of columns, single rows as attributes, and the version of the file that holds them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <numeric>
#include <string>
#include <string_view>
#include <system_error>
#include <type_traits>
#include <variant>
#include <vector>

#include "harness/io/hdf5.hpp"
#include "harness/report/schema.hpp"
#include "models/error.hpp"

namespace loopgauge::harness {

// How a member type is stored: booleans as uint8 0 or 1, a status as its word.
template <class T>
struct Stored {
  using type = T;
};
template <>
struct Stored<bool> {
  using type = std::uint8_t;
};
template <>
struct Stored<CaseStatus> {
  using type = std::string;
};

template <class T>
typename Stored<T>::type to_stored(const T& value) {
  if constexpr (std::is_same_v<T, CaseStatus>)
    return std::string(to_string(value));
  else
    return static_cast<typename Stored<T>::type>(value);
}

template <class T>
T from_stored(const typename Stored<T>::type& value) {
  if constexpr (std::is_same_v<T, CaseStatus>)
    return parse_case_status(value);
  else
    return static_cast<T>(value);
}

template <class Member>
struct MemberType;
template <class Row, class T>
struct MemberType<T Row::*> {
  using type = T;
};

// Compressing a few hundred bytes costs more, in time and in bytes, than it saves.
inline constexpr std::size_t kCompressedFrom = 64;

// A group that is a table: a dimension scale named `axis` (0, 1, ...), and one dataset per column on that scale, so that the group opens
// in xarray by itself.
template <class Row>
void write_table(const h5::Group& group, const std::string& axis, std::string_view axis_description, const std::vector<Row>& rows) {
  const h5::Storage& storage = rows.size() < kCompressedFrom ? h5::kContiguous : h5::kCompressed;
  std::vector<std::int64_t> index(rows.size());
  std::iota(index.begin(), index.end(), std::int64_t{0});
  const h5::Dataset scale = group.write(axis, index, storage);
  scale.make_scale(axis);
  scale.set_attribute("units", "1");
  scale.set_attribute("description", axis_description);
  std::vector<h5::Dataset> datasets;
  for (const Column<Row>& column : columns<Row>()) {
    std::visit(
        [&](auto member) {
          using T = typename MemberType<decltype(member)>::type;
          std::vector<typename Stored<T>::type> values;
          values.reserve(rows.size());
          for (const Row& row : rows) values.push_back(to_stored<T>(row.*member));
          const h5::Dataset dataset = group.write(std::string(column.name), values, storage);
          dataset.set_attribute("units", column.units);
          dataset.set_attribute("description", column.description);
          dataset.take_scale(scale);
          datasets.push_back(dataset);
        },
        column.member);
  }
  scale.list_users(datasets);
}

// How many rows all tables of a file may have together, so that a small file of compressed zeros does not become gigabytes of rows: written rows take a
// byte and more each, little ones are allowed for.
class RowBudget {
 public:
  explicit RowBudget(const std::filesystem::path& file) {
    std::error_code unknown;
    const std::uintmax_t bytes = std::filesystem::file_size(file, unknown);
    left_ = (std::int64_t{1} << 20) + (unknown ? 0 : 4 * static_cast<std::int64_t>(bytes));
  }
  // Throws FileError naming the dataset where there is no room for so many.
  void take(const h5::Dataset& scale, std::int64_t rows) {
    if (rows > left_) scale.fail("declares " + std::to_string(rows) + " rows, more than a report of this size holds");
    left_ -= rows;
  }

 private:
  std::int64_t left_ = 0;
};

// The rows of such a group. `minor`: the file's minor version, up to whose additions columns may be missing; what is not known is refused unless the file is
// newer than `known_minor`, the version of this program.
template <class Row>
std::vector<Row> read_table(const h5::Group& group, const std::string& axis, std::int64_t minor, std::int64_t known_minor, RowBudget& budget) {
  if (const h5::Dataset scale = group.open_dataset(axis); scale.shape().size() == 1) budget.take(scale, scale.shape().front());
  const std::vector<std::int64_t> index = group.read_vector<std::int64_t>(axis);
  const auto length = static_cast<std::int64_t>(index.size());
  for (std::int64_t i = 0; i < length; ++i) {
    if (index[static_cast<std::size_t>(i)] != i) group.open_dataset(axis).fail("expected the row numbers 0, 1, ...");
  }
  if (minor <= known_minor) {
    std::vector<std::string_view> names{axis};
    for (const Column<Row>& column : columns<Row>()) names.push_back(column.name);
    for (const std::string& member : group.members()) {
      if (std::find(names.begin(), names.end(), member) == names.end()) group.fail("unknown column '" + member + "'");
    }
  }
  std::vector<Row> rows(index.size());
  for (const Column<Row>& column : columns<Row>()) {
    std::visit(
        [&](auto member) {
          using T = typename MemberType<decltype(member)>::type;
          if (minor < column.since_minor) return;
          const h5::Dataset dataset = group.open_dataset(std::string(column.name));
          const auto values = dataset.template read<typename Stored<T>::type>({length});
          for (std::size_t i = 0; i < rows.size(); ++i) {
            if constexpr (std::is_same_v<T, bool>) {
              if (values.data[i] > 1) dataset.fail("row " + std::to_string(i) + " is neither 0 nor 1");
            }
            try {
              rows[i].*member = from_stored<T>(values.data[i]);
            } catch (const FileError& error) {
              dataset.fail("row " + std::to_string(i) + ": " + error.what());
            }
          }
        },
        column.member);
  }
  return rows;
}

// One row as attributes.
template <class Row>
void write_attributes(const h5::Group& group, const Row& row) {
  for (const Column<Row>& column : columns<Row>()) {
    std::visit(
        [&](auto member) {
          using T = typename MemberType<decltype(member)>::type;
          const std::string name(column.name);
          if constexpr (std::is_same_v<T, bool>)
            group.set_attribute(name, row.*member ? 1 : 0);
          else if constexpr (std::is_same_v<T, CaseStatus>)
            group.set_attribute(name, to_string(row.*member));
          else
            group.set_attribute(name, row.*member);
        },
        column.member);
  }
}

template <class Row>
Row read_attributes(const h5::Group& group) {
  Row row;
  for (const Column<Row>& column : columns<Row>()) {
    std::visit(
        [&](auto member) {
          using T = typename MemberType<decltype(member)>::type;
          const std::string name(column.name);
          if constexpr (std::is_same_v<T, bool>)
            row.*member = group.int_attribute(name) != 0;
          else if constexpr (std::is_same_v<T, std::int64_t>)
            row.*member = group.int_attribute(name);
          else if constexpr (std::is_same_v<T, double>)
            row.*member = group.double_attribute(name);
          else if constexpr (std::is_same_v<T, CaseStatus>)
            row.*member = parse_case_status(group.string_attribute(name));
          else
            row.*member = group.string_attribute(name);
        },
        column.member);
  }
  return row;
}

// What file_minor_version() reads.
inline void write_format(const h5::Group& root, std::string_view format, std::int64_t major, std::int64_t minor) {
  root.set_attribute("format", format);
  root.set_attribute("version", major);
  root.set_attribute("minor_version", minor);
}

// The minor version of the file with this root. Throws FileError for another `format` or major version; `noun`: "report".
inline std::int64_t file_minor_version(const h5::Group& root, std::string_view format, std::int64_t major, const std::string& noun) {
  const std::string found_format = root.has_attribute("format") ? root.string_attribute("format") : "";
  if (found_format != format) root.fail("not a loopgauge " + noun + (found_format.empty() ? "" : " but a " + found_format));
  const std::int64_t found = root.int_attribute("version");
  if (found != major) {
    root.fail("schema version " + std::to_string(found) + ", this program reads version " + std::to_string(major) +
              (found < major ? ": write the " + noun + " again, or read it with the loopgauge that wrote it" : ": read it with a newer loopgauge"));
  }
  return root.int_attribute("minor_version");
}

}  // namespace loopgauge::harness
