// SPDX-License-Identifier: Apache-2.0
#include "harness/io/set_file.hpp"

#include "tests/io/io_test_support.hpp"

namespace loopgauge::harness {
namespace {

using test::contains;
using test::error_of;

std::string refusal(const std::string& text) {
  const test::Folder folder;
  std::ofstream(folder / "set.txt") << text;
  return error_of([&] { read_set(folder / "set.txt"); });
}

TEST(SetFile, ReadsNamesInOrder) {
  const test::Folder folder;
  std::ofstream(folder / "set.txt") << "# a set\n\n  trace needle-1k  # long\r\ntrace one\n";
  EXPECT_EQ(read_set(folder / "set.txt"), (std::vector<std::string>{"needle-1k", "one"}));
}

TEST(SetFile, EachRefusalNamesFileAndLine) {
  EXPECT_TRUE(contains(refusal("trace one\ntrcae two\n"), "set.txt:2: begins with \"trcae\""));
  EXPECT_TRUE(contains(refusal("trace\n"), "set.txt:1: `trace` without a name"));
  EXPECT_TRUE(contains(refusal("trace one two\n"), "set.txt:1: \"two\" follows"));
  EXPECT_TRUE(contains(refusal("trace ../secret\n"), "set.txt:1: \"../secret\" is not a trace name"));
  EXPECT_TRUE(contains(refusal("trace one\n\ntrace one\n"), "set.txt:3: trace one is listed twice"));
  EXPECT_TRUE(contains(refusal("# nothing\n"), "lists no traces"));
  EXPECT_TRUE(contains(error_of([] { read_set("no/such/set.txt"); }), "missing or not readable"));
}

}  // namespace
}  // namespace loopgauge::harness
