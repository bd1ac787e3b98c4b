// SPDX-License-Identifier: Apache-2.0
// reports/SCHEMA.md says what the writer writes, column by column.
#include <gtest/gtest.h>

#include <fstream>
#include <iterator>
#include <string>
#include <type_traits>
#include <utility>

#include "harness/report/schema.hpp"

namespace loopgauge::harness {
namespace {

template <class Row>
std::string document_table() {
  std::string text;
  for (const Column<Row>& column : columns<Row>()) {
    const std::string units = column.units.empty() ? "text" : std::string(column.units);
    text += "| `" + std::string(column.name) + "` | " + units + " | " + std::string(column.description) + " |\n";
  }
  return text;
}

TEST(SchemaDocument, ListsEveryColumnAsItIsWritten) {
  std::ifstream in(std::string(LOOPGAUGE_SOURCE_DIR) + "/reports/SCHEMA.md");
  const std::string document(std::istreambuf_iterator<char>(in), {});
  ASSERT_FALSE(document.empty());
  const std::string version = std::to_string(kReportMajor) + "." + std::to_string(kReportMinor);
  EXPECT_NE(document.find("Schema version " + version), std::string::npos);
  EXPECT_NE(document.find("| " + version + " |"), std::string::npos) << "the version history lacks the current version";
  const auto expect_table = [&](const std::string& heading, const std::string& table) {
    const std::size_t section = document.find("\n## " + heading + "\n");
    ASSERT_NE(section, std::string::npos) << heading;
    const std::size_t end = document.find("\n## ", section + 1);
    EXPECT_NE(document.substr(section, end - section).find(table), std::string::npos) << "section " << heading << " should hold\n" << table;
  };
  expect_table("/meta", document_table<ReportMeta>());
  expect_table("/cases", document_table<CaseResult>());
  visit_tables([&](const char* name, const char*, auto table) {
    using Rows = std::remove_cvref_t<decltype(std::declval<CaseResult>().*table)>;
    expect_table("/case/&lt;n&gt;/" + std::string(name), document_table<typename Rows::value_type>());
  });
}

}  // namespace
}  // namespace loopgauge::harness
