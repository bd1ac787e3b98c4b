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

// Every line is compared with those before it, whatever their number.
TEST(SetFile, ManyLinesAreReadAtOnce) {
  const test::Folder folder;
  std::string text;
  for (int i = 0; i < 200000; ++i) text += "trace t" + std::to_string(i) + "\ncase serial/t0s0q0/t" + std::to_string(i) + "\n";
  std::ofstream(folder / "many.txt") << text;
  EXPECT_EQ(read_set(folder / "many.txt").cases.size(), 200000u);
  std::ofstream(folder / "twice.txt") << text + "case serial/t0s0q0/t7\n";
  EXPECT_TRUE(contains(error_of([&] { read_set(folder / "twice.txt"); }), "twice.txt:400001: case serial/t0s0q0/t7 is listed twice"));
}

TEST(SetFile, ReadsNamesInOrder) {
  const test::Folder folder;
  std::ofstream(folder / "set.txt") << "# a set\n\n  trace needle-1k  # long\r\ntrace one\n";
  const TraceSet set = read_set(folder / "set.txt");
  EXPECT_EQ(set.traces, (std::vector<SetTrace>{{"needle-1k", 0, {}, 3}, {"one", 0, {}, 4}}));
  EXPECT_TRUE(set.cases.empty());
}

TEST(SetFile, ReadsWindowsModesAndCases) {
  const test::Folder folder;
  std::ofstream(folder / "set.txt") << "case graph/t0s0q0/a\ntrace a window 64 modes serial wcpb+async # both\ntrace b modes split\ntrace c window 128\n";
  const TraceSet set = read_set(folder / "set.txt");
  EXPECT_EQ(set.traces, (std::vector<SetTrace>{{"a", 64, {"serial", "wcpb+async"}, 2}, {"b", 0, {"split"}, 3}, {"c", 128, {}, 4}}));
  EXPECT_EQ(set.cases, (std::vector<SetCase>{{"graph/t0s0q0/a", 1}}));
}

TEST(SetFile, EachRefusalNamesFileAndLine) {
  EXPECT_TRUE(contains(refusal("trace one\ntrcae two\n"), "set.txt:2: begins with \"trcae\""));
  EXPECT_TRUE(contains(refusal("trace\n"), "set.txt:1: `trace` without a name"));
  EXPECT_TRUE(contains(refusal("trace one two\n"), "set.txt:1: \"two\" follows"));
  EXPECT_TRUE(contains(refusal("trace ../secret\n"), "set.txt:1: \"../secret\" is not a trace name"));
  EXPECT_TRUE(contains(refusal("trace one\n\ntrace one\n"), "set.txt:3: trace one is listed twice"));
  EXPECT_TRUE(contains(refusal("# nothing\n"), "lists neither traces nor cases"));
  EXPECT_TRUE(contains(refusal("case\n"), "set.txt:1: `case` without an id"));
  EXPECT_TRUE(contains(refusal("case a/b/c d\n"), "set.txt:1: \"d\" follows the case id"));
  EXPECT_TRUE(contains(refusal("case a/b/c\ncase a/b/c\n"), "set.txt:2: case a/b/c is listed twice"));
  EXPECT_TRUE(contains(refusal("trace one window\n"), "set.txt:1: `window` without"));
  EXPECT_TRUE(contains(refusal("trace one window 100\n"), "set.txt:1: window \"100\" is not a positive multiple of 64"));
  EXPECT_TRUE(contains(refusal("trace one modes\n"), "set.txt:1: `modes` without a mode"));
  EXPECT_TRUE(contains(refusal("trace one window 64 two\n"), "set.txt:1: \"two\" follows"));
  EXPECT_TRUE(contains(error_of([] { read_set("no/such/set.txt"); }), "no/such/set.txt: no such set file"));
}

}  // namespace
}  // namespace loopgauge::harness
