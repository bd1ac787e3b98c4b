// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "harness/case.hpp"
#include "models/error.hpp"

namespace loopgauge::harness {
namespace {

std::vector<std::string> ids(const std::vector<CaseTrace>& traces, const std::vector<ModeSpec>& modes = default_modes()) {
  std::vector<std::string> result;
  for (const Case& value : enumerate_cases(traces, modes)) result.push_back(case_id(value));
  return result;
}

TEST(CaseEnumeration, EightSettingsThreePoliciesTwoModes) {
  const std::vector<std::string> list = ids({{"a", false}});
  // Four settings without Q, four with Q under three policies, each serial and split.
  EXPECT_EQ(list.size(), (4 + 4 * 3) * 2u);
  EXPECT_EQ(std::set<std::string>(list.begin(), list.end()).size(), list.size());
  EXPECT_EQ(list[0], "serial/t0s0q0/a");
  EXPECT_EQ(list[1], "split/t0s0q0/a");
  for (const char* switches : {"t0s0q0", "t0s0q1", "t0s1q0", "t0s1q1", "t1s0q0", "t1s0q1", "t1s1q0", "t1s1q1"}) {
    const auto count =
        std::count_if(list.begin(), list.end(), [&](const std::string& id) { return id.find(switches) != std::string::npos; });
    EXPECT_EQ(count, std::string(switches).ends_with("q1") ? 6 : 2) << switches;
  }
}

TEST(CaseEnumeration, ExitVariants) {
  const auto count = [](const std::vector<std::string>& list, const std::string& part) {
    return std::count_if(list.begin(), list.end(), [&](const std::string& id) { return id.find(part) != std::string::npos; });
  };
  const auto plain = ids({{"text", false}});
  EXPECT_EQ(count(plain, "exit="), 0);
  const auto named = ids({{"exit-threshold", false}});
  EXPECT_EQ(named.size(), plain.size() * 2);
  EXPECT_EQ(count(named, ":exit=threshold0.5/"), static_cast<long>(plain.size()));
  const auto carrying = ids({{"depths", true}});
  EXPECT_EQ(carrying.size(), plain.size() * 2);
  EXPECT_EQ(count(carrying, ":exit=trace/"), static_cast<long>(plain.size()));
  EXPECT_EQ(ids({{"exit-depths", true}}).size(), plain.size() * 3);
}

TEST(CaseEnumeration, ATraceMayBringItsWindowAndModes) {
  const std::vector<CaseTrace> traces{{"a", false, {parse_mode("serial"), parse_mode("wcpb+async")}, 64}, {"b"}};
  const auto own = ids(traces, {});
  EXPECT_EQ(own.size(), 2 * 16 * 2u);
  EXPECT_EQ(own[1], "wcpb+async/t0s0q0:w64/a");
  EXPECT_EQ(own[33], "split/t0s0q0/b");
  // The user's modes come before those of the traces.
  const auto chosen = ids(traces, {parse_mode("mixed")});
  EXPECT_EQ(chosen.size(), 2 * 16u);
  EXPECT_EQ(chosen[0], "mixed/t0s0q0:w64/a");
}

TEST(CaseEnumeration, IllegalCombinationsAreNoCases) {
  // Of sixteen settings four are streaming.
  EXPECT_EQ(ids(std::vector<CaseTrace>{{"a"}}, {parse_mode("prefix")}).size(), 12u);
  EXPECT_EQ(ids(std::vector<CaseTrace>{{"a"}}, {parse_mode("prefix.encoded")}).size(), 4u);
  EXPECT_EQ(ids(std::vector<CaseTrace>{{"exit-a"}}, {parse_mode("async")}).size(), 16u);
  EXPECT_THROW(ids(std::vector<CaseTrace>{{"a"}}, {parse_mode("serial"), parse_mode("wcpb.c0")}), ConfigError);
}

TEST(Glob, MatchesWholeIds) {
  EXPECT_TRUE(glob_match("*", ""));
  EXPECT_TRUE(glob_match("", ""));
  EXPECT_FALSE(glob_match("", "a"));
  EXPECT_FALSE(glob_match("?", ""));
  EXPECT_TRUE(glob_match("serial/*", "serial/t0s0q0/a"));
  EXPECT_FALSE(glob_match("serial", "serial/t0s0q0/a"));
  EXPECT_TRUE(glob_match("*/t?s1q?*/needle-1k", "split/t0s1q1:rolling:serial_aligned/needle-1k"));
  EXPECT_FALSE(glob_match("*/t?s1q?*/needle-1k", "split/t0s0q1:rolling:serial_aligned/needle-1k"));
  EXPECT_TRUE(glob_match("*a*b*c", "xxaxxbxbxc"));
  EXPECT_FALSE(glob_match("*a*b*c", "xxaxxbxbx"));
  EXPECT_TRUE(glob_match("**", "anything"));
  EXPECT_FALSE(glob_match("a.c", "abc"));  // '.' is itself
  EXPECT_FALSE(glob_match("[a]", "a"));    // so are brackets
}

TEST(Glob, LongRunsOfStarsEnd) { EXPECT_FALSE(glob_match(std::string(200, '*') + "b", std::string(5000, 'a'))); }

TEST(Shard, ReadsAndRefuses) {
  EXPECT_EQ(parse_shard("1/1").count, 1);
  EXPECT_EQ(parse_shard("3/4").index, 3);
  for (const char* text : {"", "1", "0/4", "5/4", "-1/4", "1/0", "1/4x", "a/b", "1 /4", "/4", "1/"})
    EXPECT_THROW(parse_shard(text), ConfigError) << text;
}

TEST(Shard, ShardsPartitionTheCasesAndAreBalanced) {
  const auto list = ids({{"a", false}, {"b", false}, {"c", false}, {"exit-d", true}});
  for (int count : {1, 2, 3, 8}) {
    std::vector<int> sizes(static_cast<std::size_t>(count));
    for (const std::string& id : list) {
      int owners = 0;
      for (int index = 1; index <= count; ++index) {
        if (!in_shard(id, {index, count})) continue;
        ++owners;
        ++sizes[static_cast<std::size_t>(index - 1)];
      }
      EXPECT_EQ(owners, 1) << id;
    }
    // Six standard deviations of a fair assignment.
    const double mean = static_cast<double>(list.size()) / count;
    for (int size : sizes) EXPECT_NEAR(size, mean, 6 * std::sqrt(mean) + 1);
  }
}

TEST(Shard, MembershipIsPublished) {
  // A change of the hash moves cases between the shards of running job arrays; these three pin it.
  EXPECT_TRUE(in_shard("serial/t0s0q0/text-512", {2, 4}));
  EXPECT_TRUE(in_shard("split/t1s1q1:streaming:serial_aligned/needle-1k", {4, 4}));
  EXPECT_TRUE(in_shard("serial/t0s0q0:exit=trace/exit-depths", {4, 4}));
}

}  // namespace
}  // namespace loopgauge::harness
