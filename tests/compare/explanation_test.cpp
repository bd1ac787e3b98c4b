// SPDX-License-Identifier: Apache-2.0
#include "harness/compare/explanation.hpp"

#include <gtest/gtest.h>

#include <cmath>

#include "tests/compare/hand_made_record.hpp"

namespace loopgauge::harness {
namespace {

TEST(Explanation, EveryOperationThatTheReferenceShowsHasItsClauses) {
  EXPECT_NE(operation_clauses("rms_norm.norm").find("S-RMS-1"), std::string::npos);
  EXPECT_NE(operation_clauses("linear.q_proj").find("S-LIN-1"), std::string::npos);
  EXPECT_NE(operation_clauses("attention.output").find("S-ATT-4"), std::string::npos);
  EXPECT_NE(operation_clauses("attention.output").find("S-SDA-4"), std::string::npos);  // a corrected loop has the same output
  EXPECT_EQ(operation_clauses("no.such.operation"), "");
}

TEST(Explanation, RowsLaidOutByHeadsNameTheHead) {
  ModelConfig model;
  model.heads = 3;
  model.head_dim = 4;
  std::vector<float> expected(12, 1.0f), actual(12, 1.0f);
  actual[9] = 1.0078125f;
  actual[11] = 3.0f;
  const RowDifference d = row_difference("rope.k", expected, actual, 12, model);
  EXPECT_EQ(d.element, 9);
  EXPECT_EQ(d.head, 2);
  EXPECT_EQ(d.element_in_head, 1);
  EXPECT_EQ(d.different, 2u);
  EXPECT_EQ(d.ulps, 1u);
  EXPECT_EQ(d.format, UlpFormat::bfloat16);
  EXPECT_EQ(d.max_abs, 2.0);
  EXPECT_EQ(row_difference("linear.v_proj", expected, actual, 12, model).head, 2);
  EXPECT_EQ(row_difference("rms_norm.norm", expected, actual, 12, model).head, -1);
}

TEST(Explanation, MarginOfATokenIsTheGapOfTheTwoLargestLogits) {
  HandMade made = make_hand_made_free_run();
  auto row = made.record.requests[0].logits.row(1);
  row[0] = 3.0f, row[1] = 5.0f, row[2] = 4.75f, row[3] = -1.0f;
  Divergence d;
  d.group = RecordGroup::tokens;
  d.position = kHandPrompt;  // logits row 1
  EXPECT_EQ(decision_margin(d, made.record, made.config.values()), "the two largest logits of row 1 are 0.25 apart");
}

TEST(Explanation, MarginOfASelectionIsTheDistanceToTheBoundary) {
  HandMade made = make_hand_made_record();
  RequestRecord& record = made.record.requests[0];
  // Window [64, 70): two rows selected at loop 3.
  record.active[0].erase(std::remove_if(record.active[0].begin(), record.active[0].end(), [](int p) { return p >= 64; }),
                         record.active[0].end());
  record.active[0].push_back(65);
  record.active[0].push_back(68);
  for (const auto& [p, score] :
       {std::pair{64, 0.1f}, std::pair{65, 1.0f}, std::pair{66, 0.2f}, std::pair{67, 0.5f}, std::pair{68, 0.75f}, std::pair{69, 0.3f}}) {
    record.scores[0][static_cast<std::size_t>(p)] = score;
  }
  Divergence d;
  d.group = RecordGroup::active;
  d.loop = 3;
  d.position = 65;  // selected: the best unselected has .5
  EXPECT_EQ(decision_margin(d, made.record, made.config.values()), "its score 1 is 1 (relative) from the boundary score 0.5 of its window");
  d.position = 69;  // not selected: the worst selected has .75
  EXPECT_EQ(decision_margin(d, made.record, made.config.values()),
            "its score 0.3 is 0.6 (relative) from the boundary score 0.75 of its window");
}

TEST(Explanation, MarginOfAnExitIsTheDistanceToTheThreshold) {
  HandMade made = make_hand_made_free_run();
  auto gates = made.record.requests[0].gate.row(kHandPrompt);
  gates[0] = 0.0f;  // exit probability 1/2 after loop 1
  AlgorithmConfig config;
  config.exit = parse_exit_rule("threshold:0.75");
  Divergence d;
  d.group = RecordGroup::exit_depths;
  d.position = kHandPrompt;
  d.expected = 2;
  d.actual = 1;
  EXPECT_EQ(decision_margin(d, made.record, config), "the exit probability after loop 1 is 0.5, 0.25 from the threshold");
}

TEST(Explanation, TheFirstDecisionIsFoundAcrossGroups) {
  HandMade made = make_hand_made_record();
  RunRecord actual = made.record;
  EXPECT_FALSE(first_decision(compare_records(made.record, actual, 64)));
  actual.requests[0].hidden[0].row(0)[0] += 1.0f;  // not a decision
  actual.requests[0].tokens[2] += 1;
  actual.requests[0].keys[0].layers[0].data[0] += 1;
  const auto decision = first_decision(compare_records(made.record, actual, 64));
  ASSERT_TRUE(decision);
  EXPECT_EQ(decision->group, RecordGroup::keys);
}

TEST(Explanation, ResultsAndOperationRowsHaveOneOrder) {
  HandMade made = make_hand_made_record();
  const RequestRecord& record = made.record.requests[0];
  const auto first_of = [&](const auto& change) {
    RunRecord actual = made.record;
    change(actual.requests[0]);
    return *compare_records(made.record, actual, 64).first;
  };
  const Divergence scores = first_of([](RequestRecord& r) { r.scores[0][3] += 1.0f; });
  EXPECT_TRUE(happens_before(scores, {0, 3, 3, 0, "rms_norm.input_layernorm", 0}, record, 64));
  EXPECT_FALSE(happens_before(scores, {0, 3, 2, 0, "linear.down_proj", 0}, record, 64));
  const Divergence hidden = first_of([](RequestRecord& r) { r.hidden[1].row(2)[0] += 1.0f; });
  EXPECT_TRUE(happens_before(hidden, {0, 2, 3, -1, "update_score", 0}, record, 64));
  EXPECT_FALSE(happens_before(hidden, {0, 2, 2, -1, "rms_norm.norm", 0}, record, 64));  // the same value: the operation says more
  const Divergence codec = first_of([](RequestRecord& r) { r.blocks[0].streams[0].layers[0].k_codes.data[0] ^= 1; });
  EXPECT_TRUE(happens_before(codec, {0, kHandPrompt, 1, 0, "linear.q_proj", 0}, record, 64));
  EXPECT_FALSE(happens_before(codec, {0, 10, 4, 0, "linear.q_proj", 0}, record, 64));
}

}  // namespace
}  // namespace loopgauge::harness
