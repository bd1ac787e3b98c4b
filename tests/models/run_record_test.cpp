// SPDX-License-Identifier: Apache-2.0
// Names of counters, what is held in words.
#include "models/run_record.hpp"

#include <gtest/gtest.h>

#include <set>

namespace loopgauge {
namespace {

TEST(RunCounters, EachHasOneNameAndOneDescription) {
  std::set<std::string_view> names, descriptions;
  RunCounters counters;
  std::int64_t value = 0;
  for (const RunCounterField& field : run_counter_fields()) {
    EXPECT_FALSE(field.name.empty());
    EXPECT_TRUE(names.insert(field.name).second) << field.name;
    EXPECT_TRUE(descriptions.insert(field.description).second) << field.name;
    EXPECT_EQ(counters.*field.member, 0) << field.name << " names a member that another name has";
    counters.*field.member = ++value;
  }
  EXPECT_EQ(sizeof(RunCounters), names.size() * sizeof(std::int64_t)) << "a counter without a name";
}

TEST(HeldResources, AreDescribedWhereThereAreAny) {
  EXPECT_EQ(describe(HeldResources{}), "");
  EXPECT_EQ(describe(HeldResources{.pages = 3}), "3 pages");
  EXPECT_EQ(describe(HeldResources{.requests = 1,
                                   .pages = 2,
                                   .blocks = 3,
                                   .references = 4,
                                   .hidden_windows = 5,
                                   .snapshots = 6,
                                   .published_windows = 7,
                                   .tickets = 8,
                                   .transfers = 9}),
            "1 request slot, 2 pages, 3 sealed blocks, 4 attention references, 5 windows of hidden rows, 6 snapshots, 7 published windows, "
            "8 unread submissions, 9 handoff regions");
  EXPECT_EQ(describe(HeldResources{.published_windows = 1, .transfers = 1}), "1 published window, 1 handoff region");
}

TEST(RequestOutcome, HasWords) {
  EXPECT_EQ(to_string(RequestOutcome::completed), "completed");
  EXPECT_EQ(to_string(RequestOutcome::cancelled), "cancelled");
}

}  // namespace
}  // namespace loopgauge
