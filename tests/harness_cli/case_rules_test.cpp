// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <set>

#include "harness/case.hpp"
#include "models/error.hpp"

namespace loopgauge::harness {
namespace {

std::string verdict(std::string_view id) {
  return case_refusal(parse_case_id(id)) ? "illegal" : "runs";
}

TEST(CaseRules, EveryExampleIsRefusedByItsOwnRule) {
  std::set<std::string> reasons;
  for (const IllegalCombination& combination : illegal_combinations("a")) {
    const auto refusal = case_refusal(parse_case_id(combination.id));
    ASSERT_TRUE(refusal.has_value()) << combination.id;
    EXPECT_EQ(*refusal, combination.reason) << combination.id;
    EXPECT_TRUE(reasons.insert(*refusal).second) << "two rules give the same reason: " << *refusal;
  }
}

TEST(CaseRules, SerialAndSplitRunUnderEverySetting) {
  for (const Case& value : enumerate_cases(std::vector<CaseTrace>{{"exit-a", true}}, default_modes())) {
    EXPECT_FALSE(case_refusal(value).has_value()) << case_id(value);
  }
}

TEST(CaseRules, SchedulesCombineWithEveryModifier) {
  for (std::string_view schedule : schedule_names()) {
    for (int bits = 0; bits < 32; ++bits) {
      if ((bits & 18) == 18) continue;  // a request in a handoff stays where it is
      Case value;
      value.trace = "a";
      value.mode.schedule = schedule;
      value.mode.prefix = (bits & 1) != 0;
      value.mode.preempt = (bits & 2) != 0;
      value.mode.async = (bits & 4) != 0;
      value.mode.graph = (bits & 8) != 0;
      value.mode.pd = (bits & 16) != 0;
      EXPECT_EQ(case_refusal(value), std::nullopt) << mode_text(value.mode);
    }
  }
}

TEST(CaseRules, RangesOfModeParameters) {
  EXPECT_EQ(verdict("mixed.b1/t0s0q0/a"), "illegal");
  EXPECT_EQ(verdict("mixed.b2/t0s0q0/a"), "runs");
  EXPECT_EQ(verdict("wcpb.c0/t0s0q0/a"), "illegal");
  EXPECT_EQ(verdict("wcpb.c2/t0s0q0/a"), "runs");
  EXPECT_EQ(verdict("split+preempt.p0/t0s0q0/a"), "illegal");
  EXPECT_EQ(verdict("split+preempt.p1/t0s0q0/a"), "runs");
  EXPECT_EQ(verdict("prefix.k1/t0s0q0/a"), "runs");
  EXPECT_EQ(verdict("block_spec.d3.k4/t0s0q0/a"), "illegal");
  EXPECT_EQ(verdict("block_spec.d2.k0/t0s0q0/a"), "illegal");
  EXPECT_EQ(verdict("block_spec.d2.k64/t0s0q0/a"), "runs");
  EXPECT_EQ(verdict("block_spec.d2.k65/t0s0q0/a"), "illegal");
  EXPECT_EQ(verdict("block_spec.d2.k2147483647/t0s0q1:rolling:serial_aligned/a"), "illegal");
  EXPECT_EQ(verdict("pipeline_spec.d3/t0s0q0/a"), "runs");
  EXPECT_EQ(verdict("pipeline_spec.d4/t0s0q0/a"), "illegal");
  EXPECT_EQ(verdict("pd/t0s0q0/a"), "runs");
  EXPECT_EQ(verdict("wcpb+prefix+pd+async/t0s0q0/a"), "runs");
  EXPECT_EQ(verdict("pd+preempt/t0s0q0/a"), "illegal");
  EXPECT_EQ(verdict("block_spec.d2.k4+pd/t0s0q0/a"), "runs");
  EXPECT_EQ(verdict("pipeline_spec.d1+prefix+pd+async/t0s0q0/a"), "runs");
  EXPECT_EQ(verdict("block_spec.d2.k4+pd+preempt/t0s0q0/a"), "illegal");
}

TEST(CaseRules, BoundariesOfTheTailRules) {
  EXPECT_EQ(verdict("block_spec.d2.k4/t0s0q1:rolling:serial_aligned:tail4/a"), "illegal");
  EXPECT_EQ(verdict("block_spec.d2.k4/t0s0q1:rolling:serial_aligned:tail5/a"), "runs");
  EXPECT_EQ(verdict("block_spec.d2.k4/t0s0q1:rolling:execution_dependent:tail4/a"), "runs");
  EXPECT_EQ(verdict("pipeline_spec.d2/t0s0q1:rolling:serial_aligned:tail1/a"), "illegal");
  EXPECT_EQ(verdict("pipeline_spec.d2/t0s0q1:rolling:serial_aligned:tail2/a"), "runs");
  EXPECT_EQ(verdict("pipeline_spec.d3/t0s0q1:rolling:serial_aligned:tail1/a"), "illegal");
}

TEST(CaseRules, ExitsAndAsynchronousExecution) {
  EXPECT_EQ(verdict("async/t0s0q0:exit=threshold0.9/a"), "illegal");
  EXPECT_EQ(verdict("wcpb+prefix+async/t0s0q0:exit=threshold0.9/a"), "illegal");
  EXPECT_EQ(verdict("async/t0s0q0:exit=delayed0.9/a"), "runs");
  EXPECT_EQ(verdict("async/t0s0q0:exit=trace/a"), "runs");
  EXPECT_EQ(verdict("graph/t0s0q0:exit=threshold0.9/a"), "runs");
  EXPECT_EQ(verdict("serial/t0s0q0:exit=threshold0.9/a"), "runs");
  EXPECT_EQ(verdict("split/t1s1q1:rolling:serial_aligned:exit=trace/a"), "runs");
}

TEST(CaseRules, PrefixesAreEncodedExactlyUnderStreaming) {
  EXPECT_EQ(verdict("prefix.encoded/t0s0q0/a"), "illegal");
  EXPECT_EQ(verdict("prefix.encoded/t0s0q1:fixed_prompt:serial_aligned/a"), "illegal");
  EXPECT_EQ(verdict("prefix.encoded/t0s0q1:streaming:serial_aligned/a"), "runs");
  EXPECT_EQ(verdict("prefix/t0s0q1:rolling:serial_aligned/a"), "runs");
  EXPECT_EQ(verdict("prefix/t0s0q0/a"), "runs");
  EXPECT_EQ(verdict("prefix/t0s0q1:streaming:serial_aligned/a"), "illegal");
  EXPECT_EQ(verdict("wcpb+prefix+async/t0s0q1:streaming:execution_dependent/a"), "illegal");
}

TEST(CaseRules, ARefusalNamesTheCaseAndTheReason) {
  EXPECT_NO_THROW(require_runnable(parse_case_id("serial/t0s0q0/a")));
  try {
    require_runnable(parse_case_id("async/t0s0q0:exit=threshold0.9/a"));
    FAIL() << "nothing was refused";
  } catch (const ConfigError& error) {
    EXPECT_STREQ(error.what(),
                 "case async/t0s0q0:exit=threshold0.9/a is illegal: asynchronous execution issues the next loop before the gate is read: it needs exit full, "
                 "trace or delayed");
  }
}

}  // namespace
}  // namespace loopgauge::harness
