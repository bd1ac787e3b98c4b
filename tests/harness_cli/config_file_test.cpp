// SPDX-License-Identifier: Apache-2.0
#include "harness/commands/config_file.hpp"

#include <gtest/gtest.h>

#include "models/error.hpp"
#include "tests/harness_cli/process.hpp"

namespace loopgauge::harness {
namespace {

std::vector<ConfigEntry> read(const std::string& content) {
  const test::TemporaryFolder folder;
  test::write_file(folder / "a.toml", content);
  return read_config_file(folder / "a.toml");
}

std::string error_of(const std::string& content) {
  try {
    read(content);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "no error";
}

TEST(ConfigFile, ReadsSectionsValuesAndComments) {
  const auto entries = read(
      "# comment\n"
      "window = 128   # tokens\n"
      "mode = \"split\" # quoted\n"
      "checkpoint = 'a # b\\c'\n"
      "\r\n"
      "[token_sparse_prefill]  # section\n"
      "enabled=true\n"
      "\tretention_bp = [10000, 10000 ,2500,1000] # array\n");
  ASSERT_EQ(entries.size(), 5u);
  EXPECT_EQ(entries[0].key, "window");
  EXPECT_EQ(entries[0].value, "128");
  EXPECT_EQ(entries[0].line, 2);
  EXPECT_EQ(entries[1].value, "split");
  EXPECT_EQ(entries[2].value, "a # b\\c");
  EXPECT_EQ(entries[3].key, "token_sparse_prefill.enabled");
  EXPECT_EQ(entries[3].value, "true");
  EXPECT_EQ(entries[4].value, "10000,10000,2500,1000");
  EXPECT_EQ(entries[4].line, 8);
}

TEST(ConfigFile, AnEmptyFileHasNoEntries) { EXPECT_TRUE(read("").empty()); }

TEST(ConfigFile, EveryFaultNamesItsLine) {
  const std::pair<const char*, const char*> faults[] = {
      {"\nwindow\n", ":2: 'window' is not of the form key = value"},
      {"window =\n", ":1: a key has no value"},
      {"window = # 64\n", ":1: a value is empty"},
      {"window = 64 128\n", ":1: value '64 128' needs quotes"},
      {"mode = \"split\n", ":1: a quoted value has no closing quote"},
      {"mode = \"split\" x\n", ":1: text follows a quoted value"},
      {"mode = \"a\\n\"\n", ":1: escapes are not supported"},
      {"a = [1, 2\n", ":1: an array is not closed"},
      {"a = [1, , 2]\n", ":1: a value is empty"},
      {"a = [1] 2\n", ":1: text follows an array"},
      {"[a\n", ":1: '[a' is not a section header"},
      {"[a.b]\n", ":1: '[a.b]' is not a section header"},
      {"[]\n", ":1: '[]' is not a section header"},
      {"a = 1\nb = 2\na = 3\n", ":3: key 'a' was already given in line 1"},
      {"Window = 1\n", ":1: 'Window = 1' is not of the form key = value"},
  };
  for (const auto& [content, message] : faults)
    EXPECT_NE(error_of(content).find(message), std::string::npos) << content << error_of(content);
}

TEST(ConfigFile, ABinaryFileIsRefusedWithoutQuotingIt) {
  const std::string error = error_of("window = 64\n\x1b]0;title\x07 = 1\n");
  EXPECT_NE(error.find(":2: holds a control character"), std::string::npos) << error;
  EXPECT_EQ(error.find('\x1b'), std::string::npos);
}

TEST(ConfigFile, AMissingFileIsAnInputError) {
  EXPECT_THROW(read_config_file("does/not/exist.toml"), FileError);
  const test::TemporaryFolder folder;
  EXPECT_THROW(read_config_file(folder.path()), FileError);
}

}  // namespace
}  // namespace loopgauge::harness
