// SPDX-License-Identifier: Apache-2.0
// Every audit rule finds its violation, and nothing else does: one value of a consistent record is changed at a time.
#include "harness/compare/audit.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <set>

#include "tests/compare/hand_made_record.hpp"

namespace loopgauge::harness {
namespace {

AuditResult audit_of(const HandMade& made) { return audit(made.record, made.trace, made.config, made.checkpoint); }

std::set<std::string> rules_of(const AuditResult& result) {
  std::set<std::string> rules;
  for (const AuditFinding& finding : result.findings) rules.emplace(finding.rule);
  return rules;
}

std::string texts(const AuditResult& result) {
  std::string all;
  for (const AuditFinding& finding : result.findings) all += finding.text + "\n";
  return all;
}

TEST(Audit, ConsistentRecordHasNoFindings) {
  const AuditResult result = audit_of(make_hand_made_record());
  EXPECT_TRUE(result.clean()) << texts(result);
}

TEST(Audit, ConsistentFreeRunHasNoFindings) {
  const AuditResult result = audit_of(make_hand_made_free_run());
  EXPECT_TRUE(result.clean()) << texts(result);
}

// So cold that the largest logit has all the mass.
HandMade make_sampled_run() {
  HandMade made = make_hand_made_free_run();
  made.trace.requests[0].temperature = kLeastTemperature;
  return made;
}

TEST(Audit, ConsistentSampledRunHasNoFindings) {
  const AuditResult result = audit_of(make_sampled_run());
  EXPECT_TRUE(result.clean()) << texts(result);
}

TEST(Audit, EveryRuleIsAppliedToOneOfTheThreeRecords) {
  const AuditResult on = audit_of(make_hand_made_record());
  const AuditResult off = audit_of(make_hand_made_free_run());
  const AuditResult sampled = audit_of(make_sampled_run());
  ASSERT_EQ(on.coverage.size(), audit_rules().size());
  for (std::size_t i = 0; i < on.coverage.size(); ++i) {
    EXPECT_GT(on.coverage[i].checks + off.coverage[i].checks + sampled.coverage[i].checks, 0) << on.coverage[i].rule;
  }
}

TEST(Audit, RulesHaveDistinctNamesClausesAndStatements) {
  std::set<std::string_view> names;
  for (const AuditRule& rule : audit_rules()) {
    EXPECT_TRUE(names.insert(rule.name).second) << rule.name;
    EXPECT_EQ(rule.clause.substr(0, 2), "S-") << rule.name;
    EXPECT_FALSE(rule.statement.empty()) << rule.name;
  }
}

struct Violation {
  const char* rule;  // the rule that must find it
  std::function<void(HandMade&)> plant;
  std::set<std::string> consequences = {};  // other rules that the same change breaks by necessity
};

RequestRecord& request(HandMade& m) { return m.record.requests[0]; }
CodecLayer& codec(HandMade& m, int loop) { return request(m).blocks[0].streams[static_cast<std::size_t>(loop - 1)].layers[0]; }

bool contains(const std::vector<std::int32_t>& list, int p) { return std::find(list.begin(), list.end(), p) != list.end(); }

// The first position that is active at loop 3 and not at loop 4.
int only_at_loop3(HandMade& m) {
  int p = 0;
  while (!contains(request(m).active[0], p) || contains(request(m).active[1], p)) ++p;
  return p;
}
// The first position from `from` on that is active at neither.
int inactive(HandMade& m, int from = 0) {
  int p = from;
  while (contains(request(m).active[0], p)) ++p;
  return p;
}

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// What a row loses that is no longer listed as active, although it executed.
const std::set<std::string> kUnlisted{"inherited_hidden", "inherited_gate", "inherited_kv", "active_top", "active_budget", "layer0_kv"};

const std::vector<Violation>& forced_violations() {
  static const std::vector<Violation> list{
      {"record_shape", [](HandMade& m) { request(m).encoded_frontier.pop_back(); }},
      {"record_shape", [](HandMade& m) { request(m).kv.pop_back(); }},
      {"record_shape", [](HandMade& m) { request(m).logits.shape[1] = 2; }},
      {"forced_tokens", [](HandMade& m) { m.trace.requests[0].forced[1] = 1; }},
      {"finite_logits", [](HandMade& m) { request(m).logits.row(1)[2] = kNan; }, {"logits_head"}},
      {"logits_head", [](HandMade& m) { request(m).logits.row(0)[1] += 1e-3f; }},
      {"gate_value", [](HandMade& m) { request(m).gate.row(71)[1] += 1e-3f; }},
      {"hidden_bfloat16", [](HandMade& m) { request(m).hidden[0].row(71)[5] *= 1.0001f; }, {"gate_value", "layer0_kv"}},
      {"final_norm_magnitude",
       [](HandMade& m) {
         for (float& x : request(m).hidden[3].row(72)) x *= 2.0f;
       },
       {"gate_value", "logits_head"}},
      {"inherited_hidden", [](HandMade& m) { request(m).hidden[3].row(only_at_loop3(m))[0] *= -1.0f; }},
      {"inherited_gate",
       [](HandMade& m) {
         auto gates = request(m).gate.row(inactive(m));
         gates[2] = gates[3] = std::nextafter(gates[1], kInfinity);
       }},
      {"inherited_kv",
       [](HandMade& m) { request(m).kv[3].v.data[static_cast<std::size_t>(only_at_loop3(m)) * 2] += 0.25f; },
       {"decode_chain"}},
      {"score_eligible", [](HandMade& m) { request(m).scores[1][static_cast<std::size_t>(inactive(m))] = 0.0f; }},
      {"score_eligible", [](HandMade& m) { request(m).scores[0][2] = kInfinity; }, {"score_value"}},
      {"score_aliased",
       [](HandMade& m) {
         for (float& score : request(m).scores[1]) score = std::isnan(score) ? score : 0.0f;
       },
       {"active_top"}},
      {"score_value", [](HandMade& m) { request(m).scores[0][static_cast<std::size_t>(request(m).active[0][0])] *= 1.0001f; }},
      {"active_order", [](HandMade& m) { std::swap(request(m).active[0][0], request(m).active[0][1]); }},
      {"active_nested", [](HandMade& m) { request(m).active[1].back() = inactive(m, 64); }, kUnlisted},
      {"active_budget", [](HandMade& m) { request(m).active[1].pop_back(); }, kUnlisted},
      {"active_top",
       [](HandMade& m) {
         std::swap(request(m).scores[0][static_cast<std::size_t>(inactive(m))],
                   request(m).scores[0][static_cast<std::size_t>(request(m).active[0][0])]);
       },
       {"score_value"}},
      {"keys_present", [](HandMade& m) { request(m).keys[1].layers.clear(); }},
      {"keys_budget",
       [](HandMade& m) {
         request(m).keys[0].layers[0].shape = {1, 7};
         request(m).keys[0].layers[0].data.pop_back();
       }},
      {"keys_order", [](HandMade& m) { request(m).keys[2].layers[0].data[4] = request(m).keys[2].layers[0].data[3]; }},
      {"keys_order", [](HandMade& m) { request(m).keys[0].layers[0].data[7] = 71; }},  // the query at position 70 sees 0..70
      {"mass_range", [](HandMade& m) { request(m).keys[0].mass.data[0] = 1.001f; }},
      {"mass_range", [](HandMade& m) { request(m).keys[0].mass.data[0] = 0.1f; }},  // below 8 / 71
      {"exit_depth", [](HandMade& m) { request(m).exit_depths[1] = 3; }, {"inherited_hidden", "inherited_gate", "inherited_kv"}},
      {"frontier", [](HandMade& m) { request(m).encoded_frontier[1] = 0; }},
      {"block_cuts", [](HandMade& m) { request(m).blocks[0].positions.end = 32; }, {"stream_rows"}},
      {"block_cuts", [](HandMade& m) { request(m).blocks.push_back(request(m).blocks[0]); }},
      {"stream_rows", [](HandMade& m) { request(m).blocks[0].streams[2].rows[0] = inactive(m); }, {"decode_chain"}},
      {"codec_parameters", [](HandMade& m) { codec(m, 1).k_min.data[1] *= 1.0001f; }, {"decode_chain"}},
      {"codec_parameters", [](HandMade& m) { codec(m, 2).v_codes.data[0] = 16; }, {"codec_extremes", "decode_chain"}},
      {"codec_extremes",
       [](HandMade& m) {
         for (std::size_t i = 0; i < 128; i += 2) codec(m, 1).k_codes.data[i] = std::min<std::uint8_t>(codec(m, 1).k_codes.data[i], 14);
       },
       {"decode_chain"}},
      {"decode_chain", [](HandMade& m) { request(m).kv[0].k.data[10] = std::nextafter(request(m).kv[0].k.data[10], kInfinity); }},
      {"kv_bfloat16", [](HandMade& m) { request(m).kv[2].v.data[71 * 2] = 1.0f + 0x1p-10f; }, {"layer0_kv"}},
      {"layer0_kv", [](HandMade& m) { request(m).kv[1].k.data[72 * 2 + 1] += 0.0625f; }},
      {"codec_error",
       [](HandMade& m) {
         for (float& x : request(m).hidden[0].row(20)) x *= -1.0f;
       },
       {"gate_value", "score_value"}},
  };
  return list;
}

const std::vector<Violation>& free_violations() {
  static const std::vector<Violation> list{
      {"greedy_token", [](HandMade& m) { request(m).tokens[2] = (request(m).tokens[2] + 1) % 4; }},
      {"sampled_token",
       [](HandMade& m) {
         m.trace.requests[0].temperature = kLeastTemperature;  // so that the largest logit has all the mass
         request(m).tokens[2] = (request(m).tokens[2] + 1) % 4;
       }},
      {"run_end", [](HandMade& m) { m.trace.requests[0].eos_token_id = request(m).tokens[0]; }},
      {"run_end", [](HandMade& m) { m.trace.requests[0].max_new_tokens = 5; }},
      {"exit_depth", [](HandMade& m) { request(m).exit_depths[2] = 4; }},
      {"active_budget", [](HandMade& m) { request(m).active[0] = {1}; }},
      {"keys_present",
       [](HandMade& m) {
         request(m).keys.resize(1);
         request(m).keys[0].layers.emplace_back(std::vector<std::int64_t>{1, 1});
       }},
      {"frontier", [](HandMade& m) { request(m).encoded_frontier[2] = 64; }},
      {"logits_head", [](HandMade& m) { request(m).logits.row(0)[0] -= 1e-3f; }},
  };
  return list;
}

void expect_found(const Violation& violation, HandMade made, int number) {
  ASSERT_TRUE(audit_of(made).clean());
  violation.plant(made);
  const AuditResult result = audit_of(made);
  const std::set<std::string> found = rules_of(result);
  EXPECT_TRUE(found.contains(violation.rule)) << number << ": " << violation.rule << " not found; found:\n" << texts(result);
  for (const std::string& rule : found) {
    EXPECT_TRUE(rule == violation.rule || violation.consequences.contains(rule)) << number << ": " << violation.rule << " also gave\n"
                                                                                 << texts(result);
  }
}

TEST(Audit, FindsEachViolationOfAForcedRun) {
  int number = 0;
  for (const Violation& violation : forced_violations()) expect_found(violation, make_hand_made_record(), number++);
}

TEST(Audit, FindsEachViolationOfAFreeRun) {
  int number = 0;
  for (const Violation& violation : free_violations()) expect_found(violation, make_hand_made_free_run(), number++);
}

TEST(Audit, EveryRuleHasAPlantedViolation) {
  std::set<std::string_view> planted;
  for (const Violation& violation : forced_violations()) planted.insert(violation.rule);
  for (const Violation& violation : free_violations()) planted.insert(violation.rule);
  for (const AuditRule& rule : audit_rules()) EXPECT_TRUE(planted.contains(rule.name)) << rule.name;
}

TEST(Audit, FindingNamesPlaceValuesAndCount) {
  HandMade made = make_hand_made_record();
  request(made).gate.row(70)[0] += 1.0f;
  request(made).gate.row(72)[0] += 1.0f;
  const AuditResult result = audit_of(made);
  ASSERT_EQ(result.findings.size(), 1u) << texts(result);
  const AuditFinding& finding = result.findings[0];
  EXPECT_EQ(finding.rule, "gate_value");
  EXPECT_EQ(finding.clause, "S-GATE-1");
  EXPECT_EQ(finding.loop, 1);
  EXPECT_EQ(finding.position, 70);
  EXPECT_EQ(finding.count, 2);
  EXPECT_DOUBLE_EQ(finding.actual, finding.expected + 1.0);
  EXPECT_NE(finding.text.find("gate_value (S-GATE-1): request 0 loop 1 position 70"), std::string::npos) << finding.text;
}

// Hazard by hand: gates -2, -2, 10 give s = .881, .776, .00004, so 1 - s crosses .9 after loop 3.
TEST(Audit, ThresholdAndDelayedExitsFollowTheGates) {
  for (const auto& [text, depth] : {std::pair{"threshold:0.9", 3}, std::pair{"delayed:0.9", 4}, std::pair{"threshold:0.1", 1},
                                    std::pair{"delayed:0.1", 2}, std::pair{"threshold:1", 4}}) {
    HandMade made = make_hand_made_free_run();
    AlgorithmConfig requested;
    requested.exit = parse_exit_rule(text);
    made.config = EffectiveConfig::resolve(requested, made.checkpoint.config);
    for (int recorded = 1; recorded <= kLoops; ++recorded) {
      for (int j = 0; j < 2; ++j) {
        auto gates = request(made).gate.row(kHandPrompt + j);
        gates[0] = gates[1] = -2.0f;
        gates[2] = gates[3] = 10.0f;
        request(made).exit_depths[static_cast<std::size_t>(j)] = static_cast<std::uint8_t>(recorded);
      }
      EXPECT_EQ(rules_of(audit_of(made)).contains("exit_depth"), recorded != depth) << text << " depth " << recorded;
    }
  }
}

// Dense models may have fewer loops (S-CFG-8): the last one is then where logits come from and where rows end.
TEST(Audit, ADenseModelOfTwoLoopsEndsThere) {
  HandMade made = make_hand_made_free_run();
  made.checkpoint.config.loops = 2;
  made.config = EffectiveConfig::resolve(AlgorithmConfig{}, made.checkpoint.config);
  RequestRecord& record = request(made);
  record.hidden[1] = record.hidden[3];  // the logits stay the head on the last loop
  record.hidden[2] = record.hidden[3] = {};
  for (int p = 0; p < record.prompt_length + record.fed; ++p) {
    auto gates = record.gate.row(p);
    gates[1] = gates[3];
    gates[2] = gates[3] = kNan;
  }
  record.kv[2] = record.kv[3] = {};
  for (int j = 0; j < record.fed; ++j) record.exit_depths[static_cast<std::size_t>(j)] = 2;
  EXPECT_TRUE(audit_of(made).clean()) << texts(audit_of(made));
  HandMade wrong = made;
  request(wrong).exit_depths[0] = 4;
  EXPECT_TRUE(rules_of(audit_of(wrong)).contains("exit_depth"));
  wrong = made;
  request(wrong).logits.row(0)[1] += 1e-3f;
  EXPECT_TRUE(rules_of(audit_of(wrong)).contains("logits_head"));
}

// S-KVQ-6: what FP16 makes of -1e-9 is -0.
TEST(Audit, AStoredMinimumMayBeNegativeZero) {
  HandMade made = make_hand_made_record();
  int zeros = 0;
  for (int loop = 1; loop <= kLoops; ++loop) {
    for (float& minimum : codec(made, loop).v_min.data) {
      if (minimum != 0.0f) continue;
      minimum = -0.0f;
      ++zeros;
    }
  }
  ASSERT_GT(zeros, 0);
  EXPECT_TRUE(audit_of(made).clean()) << texts(audit_of(made));
}

TEST(Audit, ExitDecisionWithinRoundingOfTheThresholdMayGoEitherWay) {
  HandMade made = make_hand_made_free_run();
  AlgorithmConfig requested;
  requested.exit = parse_exit_rule("threshold:0.5");
  made.config = EffectiveConfig::resolve(requested, made.checkpoint.config);
  for (const int recorded : {1, 2}) {
    for (int j = 0; j < 2; ++j) {
      auto gates = request(made).gate.row(kHandPrompt + j);
      gates[0] = 0.0f;  // 1 - s is exactly the threshold
      gates[1] = gates[2] = gates[3] = 10.0f;
      request(made).exit_depths[static_cast<std::size_t>(j)] = static_cast<std::uint8_t>(recorded);
    }
    EXPECT_FALSE(rules_of(audit_of(made)).contains("exit_depth")) << recorded;
  }
}

}  // namespace
}  // namespace loopgauge::harness
