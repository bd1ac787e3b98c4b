// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <set>

#include "harness/case.hpp"
#include "models/error.hpp"

namespace loopgauge::harness {
namespace {

std::string verdict(std::string_view id) {
  const auto refusal = case_refusal(parse_case_id(id));
  return refusal ? std::string(to_string(refusal->kind)) : "runs";
}

TEST(CaseRules, EveryExampleIsRefusedByItsOwnRule) {
  std::set<std::string> reasons;
  for (const IllegalCombination& combination : illegal_combinations("a")) {
    const auto refusal = case_refusal(parse_case_id(combination.id));
    ASSERT_TRUE(refusal.has_value()) << combination.id;
    EXPECT_EQ(refusal->kind, combination.refusal.kind) << combination.id;
    EXPECT_EQ(refusal->reason, combination.refusal.reason) << combination.id;
    EXPECT_TRUE(reasons.insert(refusal->reason).second) << "two rules give the same reason: " << refusal->reason;
  }
}

TEST(CaseRules, SerialAndSplitRunUnderEverySetting) {
  for (const Case& value : enumerate_cases(std::vector<CaseTrace>{{"exit-a", true}}, default_modes())) {
    EXPECT_FALSE(case_refusal(value).has_value()) << case_id(value);
  }
}

TEST(CaseRules, EveryOtherModeOfTheSpecificationIsNotAvailable) {
  for (std::string_view name : mode_names()) {
    Case value;
    value.mode.name = name;
    value.trace = "a";
    const bool planned = name == "serial" || name == "split";
    ASSERT_EQ(case_refusal(value).has_value(), !planned) << name;
    if (!planned) {
      EXPECT_EQ(case_refusal(value)->kind, RefusalKind::not_available) << name;
    }
  }
}

TEST(CaseRules, BoundariesOfTheTailRules) {
  EXPECT_EQ(verdict("block_spec.d2.k4/t0s0q1:rolling:serial_aligned:tail4/a"), "illegal");
  EXPECT_EQ(verdict("block_spec.d2.k4/t0s0q1:rolling:serial_aligned:tail5/a"), "not available in this version");
  EXPECT_EQ(verdict("block_spec.d2.k4/t0s0q1:rolling:execution_dependent:tail4/a"), "not available in this version");
  EXPECT_EQ(verdict("pipeline_spec.d2/t0s0q1:rolling:serial_aligned:tail1/a"), "illegal");
  EXPECT_EQ(verdict("pipeline_spec.d2/t0s0q1:rolling:serial_aligned:tail2/a"), "not available in this version");
  EXPECT_EQ(verdict("pipeline_spec.d3/t0s0q1:rolling:serial_aligned:tail1/a"), "illegal");
}

TEST(CaseRules, ExitsAndAsynchronousExecution) {
  EXPECT_EQ(verdict("async/t0s0q0:exit=threshold0.9/a"), "illegal");
  EXPECT_EQ(verdict("async/t0s0q0:exit=delayed0.9/a"), "not available in this version");
  EXPECT_EQ(verdict("async/t0s0q0:exit=trace/a"), "not available in this version");
  EXPECT_EQ(verdict("serial/t0s0q0:exit=threshold0.9/a"), "runs");
  EXPECT_EQ(verdict("split/t1s1q1:rolling:serial_aligned:exit=trace/a"), "runs");
}

TEST(CaseRules, EncodedPrefixOnlyUnderStreaming) {
  EXPECT_EQ(verdict("prefix.encoded/t0s0q0/a"), "illegal");
  EXPECT_EQ(verdict("prefix.encoded/t0s0q1:fixed_prompt:serial_aligned/a"), "illegal");
  EXPECT_EQ(verdict("prefix.encoded/t0s0q1:streaming:serial_aligned/a"), "not available in this version");
  EXPECT_EQ(verdict("prefix/t0s0q1:rolling:serial_aligned/a"), "not available in this version");
}

TEST(CaseRules, RefusalsBecomeTheRightKindOfError) {
  EXPECT_THROW(require_runnable(parse_case_id("async/t0s0q0:exit=threshold0.9/a")), ConfigError);
  EXPECT_THROW(require_runnable(parse_case_id("wcpb/t0s0q0/a")), UnsupportedError);
  EXPECT_NO_THROW(require_runnable(parse_case_id("serial/t0s0q0/a")));
}

}  // namespace
}  // namespace loopgauge::harness
