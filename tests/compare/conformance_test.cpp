// SPDX-License-Identifier: Apache-2.0
// The comparison of a candidate with the reference, on stand-ins that need no device: other legitimate orders of additions pass, planted
// faults and altered records fail, and every flip is told from a wrong decision.
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <set>

#include "harness/compare/conformance.hpp"
#include "harness/sweep/conformance_checks.hpp"
#include "models/spec/end_to_end.hpp"
#include "tests/compare/stand_in.hpp"
#include "tests/report/sweep_fixture.hpp"

namespace loopgauge::harness {
namespace {

std::string detail_of(const CaseResult& row, std::string_view name) {
  const CheckRow* check = find_check(row, name);
  return check == nullptr ? "" : check->detail;
}

// A sweep with the stand-in as the optimized column; its rows.
struct CandidateSweep : SmallSweep {
  explicit CandidateSweep(const std::vector<std::string>& globs, std::vector<Trace> traces = small_traces())
      : SmallSweep(std::move(traces), globs) {
    request.executors = ExecutorChoice::both;
    request.runner.drift.resamples = 10;
  }

  std::vector<CaseResult> run(Executor& candidate) {
    executors.optimized = {&candidate};
    std::vector<CaseResult> rows;
    for (CaseResult& row : SmallSweep::run().cases) {
      if (row.executor == "optimized") {
        rows.push_back(std::move(row));
      } else {
        EXPECT_EQ(row.status, CaseStatus::passed) << row.id << ": " << row.reason;
      }
    }
    EXPECT_FALSE(rows.empty());
    return rows;
  }
};

TEST(Conformance, TheReorderedReferencePassesInEverySettingAndMode) {
  CandidateSweep sweep({"*"});
  test::StandIn candidate(sweep.checkpoint, Profile::reordered);
  std::set<std::string> metrics, operations;
  for (const CaseResult& row : sweep.run(candidate)) {
    EXPECT_EQ(row.status, CaseStatus::passed) << row.id << ": " << row.reason;
    EXPECT_EQ(status_of(row, kDecisionForcedCheck), "passed") << row.id;
    EXPECT_EQ(status_of(row, kTeacherForcedCheck), "passed") << row.id;
    EXPECT_EQ(status_of(row, kFreeRunCheck), "skipped") << row.id;
    EXPECT_EQ(status_of(row, kOperationsCheck), "passed") << row.id;
    for (const ToleranceRow& entry : row.tolerance) (entry.level == "operation" ? operations : metrics).insert(entry.operation);
    for (const DecisionRow& entry : row.decisions) EXPECT_TRUE(entry.explained) << row.id << ": " << entry.detail;
  }
  EXPECT_EQ(metrics, (std::set<std::string>{"hidden", "inherited", "k", "v", "gate", "score", "mass", "codes", "logits", "kl", "top1",
                                            "key_logits"}));
}

// Sums over channels in three orders that are neither profile's.
TEST(Conformance, ThirdOrdersOfAdditionPass) {
  std::int64_t key_flips = 0;
  for (const std::uint32_t seed : {1u, 2u, 3u}) {
    CandidateSweep sweep({"serial/*/several"});
    test::StandIn candidate(test::permuted_model(sweep.checkpoint, seed), seed == 1 ? Profile::declared : Profile::reordered);
    for (const CaseResult& row : sweep.run(candidate)) {
      EXPECT_EQ(row.status, CaseStatus::passed) << "order " << seed << ", " << row.id << ": " << row.reason;
      for (const DecisionRow& entry : row.decisions) key_flips += entry.kind == "key";
    }
  }
  EXPECT_GT(key_flips, 0) << "orders that never flip a key prove little";
}

const std::set<Fault> kRoundingFaults{
    Fault::correction_in_bfloat16,  Fault::codes_from_stored_parameters, Fault::scale_by_reciprocal,    Fault::reconstruction_in_bfloat16,
    Fault::one_ulp_in_residual_add, Fault::rope_frequency_in_bfloat16,   Fault::keys_ranked_in_bfloat16};

TEST(Conformance, EveryPlantedFaultFails) {
  for (const FaultInfo& info : planted_faults()) {
    if (!info.in_reference || !info.mode.empty()) continue;
    CandidateSweep sweep({"serial/t1s1q1:rolling:*/several"});
    test::StandIn candidate(sweep.checkpoint, Profile::reordered);
    candidate.fault = info.fault;
    for (const CaseResult& row : sweep.run(candidate)) {
      EXPECT_EQ(row.status, CaseStatus::failed) << info.name;
      // Faults of single roundings drown in the distances of whole runs; the operations by themselves or the audit show them.
      const bool rounding = kRoundingFaults.contains(info.fault);
      const bool compared = status_of(row, kDecisionForcedCheck) == "failed" || status_of(row, kTeacherForcedCheck) == "failed";
      EXPECT_TRUE(compared || rounding) << info.name << " is seen by the audit alone: " << row.reason;
    }
  }
}

// One setting with everything on; the candidate computes as the reference does, and its record is altered afterwards.
struct Alteration {
  const char* name;
  std::string_view check;  // that must fail
  const char* says;        // and what it must say
  std::function<void(RunRecord&)> alter;
  int from_run = 1;  // 1: the candidate's own run, 3: the one with the reference's decisions
};

TEST(Conformance, AlteredRecordsFailWhereTheyDiffer) {
  const Alteration alterations[] = {
      {"one hidden row of loop 3 is twice as large", kDecisionForcedCheck, "hidden loop 3",
       [](RunRecord& r) {
         for (float& x : r.requests[0].hidden[2].row(150)) x *= 2.0f;
       }},
      {"K of one layer and loop is that of the position before", kDecisionForcedCheck, "k loop 2",
       [](RunRecord& r) {
         Tensor<float>& k = r.requests[0].kv[kLoops + 1].k;
         for (std::int64_t head = 0; head < k.extent(0); ++head) {
           const auto row = k.row(head);
           std::copy_backward(row.begin(), row.end() - 16, row.end());
         }
       }},
      {"logits are shifted by a half", kDecisionForcedCheck, "logits",
       [](RunRecord& r) {
         for (float& x : r.requests[0].logits.data) x += 0.5f;
       }},
      {"a NaN in V", kDecisionForcedCheck, "not finite",
       [](RunRecord& r) { r.requests[1].kv.front().v.data[7] = std::numeric_limits<float>::quiet_NaN(); }},
      {"a key far below the boundary is taken", kTeacherForcedCheck, "unexplained: key",
       [](RunRecord& r) {
         const auto keys = r.requests[0].keys[20].layers[1].row(0);
         std::int32_t free = 0;
         while (std::binary_search(keys.begin(), keys.end(), free)) ++free;
         keys[0] = free;
         std::sort(keys.begin(), keys.end());
       }},
      {"a row of low score is selected", kTeacherForcedCheck, "unexplained: token",
       [](RunRecord& r) {
         RequestRecord& request = r.requests[0];
         const auto& scores = request.scores[0];
         auto& active = request.active[0];
         std::int32_t lowest = 0;
         for (std::int32_t p = 0; p < 128; ++p)
           lowest = scores[static_cast<std::size_t>(p)] < scores[static_cast<std::size_t>(lowest)] ? p : lowest;
         active.front() = lowest;
         std::sort(active.begin(), active.end());
       }},
      {"no hidden rows of loop 3", kDecisionForcedCheck, "hidden loop 3: ",
       [](RunRecord& r) {
         for (RequestRecord& q : r.requests) q.hidden[2] = {};
       }},
      {"no K/V of one request", kDecisionForcedCheck, "values are missing", [](RunRecord& r) { r.requests[1].kv.clear(); }},
      {"no logits", kDecisionForcedCheck, "values are missing",
       [](RunRecord& r) {
         for (RequestRecord& q : r.requests) q.logits = {};
       },
       3},
      {"nothing but decisions", kDecisionForcedCheck, "values are missing",
       [](RunRecord& r) {
         for (RequestRecord& q : r.requests) {
           q.logits = q.gate = {};
           q.hidden = {};
           q.kv.clear();
           for (auto& scores : q.scores) scores.clear();
         }
       },
       3},
      {"one plane is missing", kDecisionForcedCheck, "number of K/V planes", [](RunRecord& r) { r.requests[0].kv.pop_back(); }},
      {"one token more is forwarded", kDecisionForcedCheck, "forwarded", [](RunRecord& r) { ++r.requests[0].fed; }},
      {"a sealed block covers less", kDecisionForcedCheck, "block", [](RunRecord& r) { --r.requests[0].blocks[0].positions.end; }},
  };
  for (const Alteration& alteration : alterations) {
    CandidateSweep sweep({"serial/t1s1q1:rolling:serial_aligned/several"});
    test::StandIn candidate(sweep.checkpoint);
    int runs = 0;
    candidate.alter = [&](RunRecord& record) {
      if (++runs >= alteration.from_run) alteration.alter(record);
    };
    const CaseResult row = sweep.run(candidate).front();
    EXPECT_EQ(row.status, CaseStatus::failed) << alteration.name;
    EXPECT_EQ(status_of(row, alteration.check), "failed") << alteration.name << ": " << row.reason;
    EXPECT_NE(detail_of(row, alteration.check).find(alteration.says), std::string::npos)
        << alteration.name << ": " << detail_of(row, alteration.check);
  }
}

TEST(Operations, OfTheReferenceHaveItsBits) {
  CandidateSweep sweep({"serial/t1s1q1:streaming:*/several", "serial/t0s1q0/several"});
  test::StandIn candidate(sweep.checkpoint);
  for (const CaseResult& row : sweep.run(candidate)) {
    EXPECT_EQ(status_of(row, kOperationsCheck), "passed") << detail_of(row, kOperationsCheck);
    for (const ToleranceRow& entry : row.tolerance) {
      if (entry.level != "operation") continue;
      EXPECT_GT(entry.elements, 0) << entry.operation;
      EXPECT_EQ(entry.max_ulp, 0.0) << row.id << ": " << entry.operation << " loop " << entry.loop << ", " << entry.max_index;
    }
  }
}

// One element of one observed row, moved by little: far below anything that a whole run shows.
TEST(Operations, OneElementBeyondItsBoundIsFound) {
  struct Move {
    std::string_view tap;
    const char* operation;
    float factor;
    bool found;
  };
  for (const Move& move : {Move{"linear.o_proj", "linear", 1.05f, true}, Move{"rope.k", "rope", 1.008f, true},
                           Move{"residual_add.mlp", "residual_add", 1.008f, true}, Move{"rms_norm.norm", "rms_norm", 1.008f, true},
                           Move{"swiglu", "swiglu", 1.008f, true}, Move{"attention.output", "attention_dense", 1.05f, true},
                           Move{"sparse_decode.mass", "reference_statistics", 1.01f, true}, Move{"linear.o_proj", "linear", 1.0f, false}}) {
    CandidateSweep sweep({"serial/t0s1q0/several"});
    test::StandIn candidate(sweep.checkpoint);
    candidate.alter_row = [&](const TapPoint& point, std::vector<float>& row) {
      if (point.operation != move.tap || point.loop != 2 || point.layer > 0 || point.request != 0) return;
      const auto largest = std::max_element(row.begin(), row.end(), [](float a, float b) { return std::abs(a) < std::abs(b); });
      *largest *= move.factor;
    };
    const CaseResult row = sweep.run(candidate).front();
    const std::string detail = detail_of(row, kOperationsCheck);
    EXPECT_EQ(status_of(row, kOperationsCheck), move.found ? "failed" : "passed") << move.tap << ": " << detail;
    if (!move.found) continue;
    const bool named = std::any_of(row.tolerance.begin(), row.tolerance.end(), [&](const ToleranceRow& entry) {
      return entry.level == "operation" && entry.operation == move.operation && entry.loop == 2 && entry.verdict == "failed";
    });
    EXPECT_TRUE(named) << move.tap << ": " << detail;
  }
}

// Codes and parameters are promised bit for bit, and a fault of their rounding hides in every distance.
TEST(Operations, EncodingIsCheckedBitForBit) {
  for (const Fault fault :
       {Fault::scale_by_reciprocal, Fault::codes_from_stored_parameters, Fault::unreconstructed_predecessor, Fault::none}) {
    for (const char* policy : {"rolling", "fixed_prompt", "streaming"}) {
      CandidateSweep sweep({std::string("serial/t1s0q1:") + policy + ":*/several"});
      test::StandIn candidate(sweep.checkpoint);
      candidate.fault = fault;
      const CaseResult row = sweep.run(candidate).front();
      EXPECT_EQ(status_of(row, kOperationsCheck), fault == Fault::none ? "passed" : "failed") << policy << ": " << to_string(fault);
      const auto encoded = std::find_if(row.tolerance.begin(), row.tolerance.end(), [](const ToleranceRow& entry) {
        return entry.level == "operation" && entry.operation == "residual_encode" && entry.loop == 1;
      });
      ASSERT_NE(encoded, row.tolerance.end()) << policy;
      EXPECT_GT(encoded->elements, 2 * 2 * 16 * 64) << policy << ": a whole K group of every layer, head and channel";
    }
  }
}

TEST(Operations, SampleCoversPromptActiveAndDecodeRows) {
  CandidateSweep sweep({"serial/t1s1q0/several"});
  const Case& value = sweep.request.cases.front().value;
  const ObservedRun run = run_observed(*sweep.reference, value, sweep.request.traces[1], sweep.checkpoint, Profile::declared, nullptr);
  const auto sample = sampled_positions(run.record, sweep.checkpoint.config);
  ASSERT_EQ(sample.size(), 2u);
  for (std::size_t i = 0; i < sample.size(); ++i) {
    const RequestRecord& request = run.record.requests[i];
    const auto executed = executed_loops(request);
    EXPECT_TRUE(std::any_of(sample[i].begin(), sample[i].end(),
                            [&](int p) { return p < request.prompt_length && executed[3][static_cast<std::size_t>(p)] != 0; }));
    EXPECT_TRUE(std::any_of(sample[i].begin(), sample[i].end(),
                            [&](int p) { return p < request.prompt_length && executed[3][static_cast<std::size_t>(p)] == 0; }));
    EXPECT_EQ(sample[i].back(), request.prompt_length + request.fed - 1);
  }
}

Trace free_trace() {
  TraceRequest free = test::request(0, 40, 0);
  free.max_new_tokens = 30;
  Trace trace = test::trace_of({free, test::request(1, 20, 6)});
  trace.name = "free";
  return trace;
}

TEST(Conformance, FreeRunsAreComparedUpToTheirFirstDivergence) {
  for (const char* switches : {"t0s0q0", "t1s1q0", "t0s0q1:rolling:serial_aligned"}) {
    CandidateSweep sweep({std::string("*/") + switches + "/free"}, {free_trace()});
    test::StandIn candidate(test::permuted_model(sweep.checkpoint, 4), Profile::reordered);
    for (const CaseResult& row : sweep.run(candidate)) {
      EXPECT_EQ(row.status, CaseStatus::passed) << row.id << ": " << row.reason;
      EXPECT_EQ(status_of(row, kFreeRunCheck), "passed") << row.id;
      EXPECT_EQ(status_of(row, kTeacherForcedCheck), "passed") << row.id;
    }
    // Another token than its own logits ask for.
    test::StandIn wrong(sweep.checkpoint);
    wrong.alter = [](RunRecord& record) {
      RequestRecord& request = record.requests[0];
      if (request.tokens.size() == 30) request.tokens[12] = (request.tokens[12] + 1) % 37;
    };
    for (const CaseResult& row : sweep.run(wrong)) {
      EXPECT_EQ(status_of(row, kFreeRunCheck), "failed") << row.id << ": " << detail_of(row, kFreeRunCheck);
      EXPECT_NE(detail_of(row, kFreeRunCheck).find("request 0 leaves the reference at token 12"), std::string::npos)
          << detail_of(row, kFreeRunCheck);
    }
  }
}

// Exits are decisions too: forced in level 3, explained in level 4.
TEST(Conformance, ExitsAreForcedAndExplained) {
  const Checkpoint checkpoint = test::tiny_checkpoint();
  const auto reference = reference::make_reference_executor(checkpoint);
  const Trace trace = test::trace_of({test::request(0, 40, 120)});
  std::int64_t decided = 0;
  for (const char* rule : {"threshold:0.7", "delayed:0.7"}) {
    Case value;
    value.trace = trace.name;
    apply_switches(value.config, "t0s1q0");
    value.config.exit = parse_exit_rule(rule);
    const EffectiveConfig config = EffectiveConfig::resolve(value.config, checkpoint.config);
    const ConformanceBaseline base = make_conformance_baseline(*reference, checkpoint, value, trace, {});
    std::set<int> depths(base.reference.record.requests[0].exit_depths.begin(), base.reference.record.requests[0].exit_depths.end());
    EXPECT_GT(depths.size(), 1u) << "the rule must leave after different loops";

    test::StandIn candidate(test::permuted_model(checkpoint, 2), Profile::reordered);
    CaseResult row;
    judge_conformance(candidate, checkpoint, OperationReference(checkpoint), value, trace,
                      run_observed(candidate, value, trace, checkpoint, Profile::declared, nullptr).record, base, row);
    for (const CheckRow& check : row.checks) EXPECT_NE(check.status, "failed") << rule << ", " << check.name << ": " << check.detail;

    test::StandIn hasty(checkpoint);
    hasty.alter = [](RunRecord& record) {
      auto& exits = record.requests[0].exit_depths;
      const auto deep = std::find(exits.begin(), exits.end(), 4);
      if (deep != exits.end()) *deep = 1;
    };
    CaseResult wrong;
    judge_conformance(hasty, checkpoint, OperationReference(checkpoint), value, trace,
                      run_observed(hasty, value, trace, checkpoint, Profile::declared, nullptr).record, base, wrong);
    EXPECT_EQ(status_of(wrong, kDecisionForcedCheck), "failed");
    EXPECT_EQ(status_of(wrong, kTeacherForcedCheck), "failed") << detail_of(wrong, kTeacherForcedCheck);
    const Decisions none = find_flips(base.reference.record, base.reference.record, config, checkpoint.config,
                                      {base.reference.keys.get(), base.reference.keys.get()});
    EXPECT_TRUE(none.flips.empty());
    decided += none.decided[static_cast<int>(DecisionKind::exit)];
  }
  EXPECT_EQ(decided, 240);
}

Flip flip(DecisionKind kind, int position, int loop, double margin, double move) {
  Flip result;
  result.kind = kind;
  result.position = position;
  result.loop = loop;
  result.window = position / 64;
  result.margin = margin;
  result.difference = 2 * move;
  result.largest_move = move;
  return result;
}

TEST(Flips, AreExplainedByTheirOwnNoiseOrByAnExplainedFlipInTheirPast) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const FlipLimits limits{.score = {0.01, 0.01}, .key_logit = 0.1, .logit = 0.5, .exit_probability = 0.02};
  Decisions decisions;
  decisions.flips = {
      flip(DecisionKind::token, 10, 3, 0.005, 0.005),  // 0: explained root
      flip(DecisionKind::token, 20, 4, nan, nan),      // 1: only its past explains it
      flip(DecisionKind::token, 70, 3, 0.05, 0.04),    // 2: moved too much, and loop 3 has no past
      flip(DecisionKind::token, 80, 4, 0.03, 0.02),    // 3: moved too much, but flip 0 acts on it
      flip(DecisionKind::key, 130, 2, 0.05, 0.05),     // 4: explained root
      flip(DecisionKind::key, 131, 2, 0.3, 0.2),       // 5: moved too much; nothing acts on loop 2
      flip(DecisionKind::argmax, 131, -1, 1.5, 0.9),   // 6: its past explains the move
      flip(DecisionKind::argmax, 132, -1, 3.0, 0.9),   // 7: ranks its own values wrongly: nothing explains that
  };
  {
    Decisions tied;
    tied.flips = {flip(DecisionKind::token, 10, 3, 0.005, 0.005), flip(DecisionKind::token, 90, 4, 0.0, 0.0),
                  flip(DecisionKind::key, 140, 2, 0.0, 0.0)};
    explain_flips(tied, limits);
    EXPECT_TRUE(tied.flips[0].explained);
    EXPECT_FALSE(tied.flips[1].explained) << "equal values in both runs rank by position";
    EXPECT_FALSE(tied.flips[2].explained);
    tied.flips[2].slack = 1e-7;  // FP32 logits may differ where the recomputed ones tie
    explain_flips(tied, limits);
    EXPECT_TRUE(tied.flips[2].explained);
  }
  explain_flips(decisions, limits);
  const std::vector<std::pair<bool, bool>> expected{{true, true}, {false, true}, {true, false}, {false, true},
                                                    {true, true}, {true, false}, {false, true}, {false, false}};  // root, explained
  for (std::size_t i = 0; i < expected.size(); ++i) {
    EXPECT_EQ(decisions.flips[i].root, expected[i].first) << i;
    EXPECT_EQ(decisions.flips[i].explained, expected[i].second) << i;
  }
  decisions.decided[0] = 30, decisions.decided[1] = 500, decisions.decided[2] = 200;
  const std::vector<FlipVerdict> verdicts = judge_flips(decisions, {}, {});
  ASSERT_EQ(verdicts.size(), 3u);
  EXPECT_EQ(verdicts[0].flipped, 4);
  EXPECT_EQ(verdicts[0].roots, 2);
  EXPECT_EQ(verdicts[0].unexplained, 1);
  EXPECT_FALSE(verdicts[0].passed);
  EXPECT_DOUBLE_EQ(verdicts[1].largest_margin, 0.05);
}

RunRecord record_with_keys(std::vector<std::uint8_t> exit_depths, const std::vector<bool>& selects) {
  RunRecord record;
  record.requests.resize(1);
  RequestRecord& request = record.requests[0];
  request.prompt_length = 4;
  request.fed = static_cast<int>(exit_depths.size());
  request.exit_depths = std::move(exit_depths);
  request.keys.resize(selects.size());
  for (std::size_t step = 0; step < selects.size(); ++step) {
    if (selects[step]) request.keys[step].layers = {Tensor<std::int32_t>({1, 2}, 0)};
  }
  return record;
}

TEST(Flips, AStepWithKeysInOneRunOnlyNeedsAnExitThatExplainsIt) {
  const ModelConfig model = test::tiny_checkpoint().config;
  AlgorithmConfig requested;
  apply_switches(requested, "t0s1q0");
  requested.exit = parse_exit_rule("threshold:0.5");
  const EffectiveConfig config = EffectiveConfig::resolve(requested, model);
  const FlipLimits limits{.score = {}, .key_logit = 1.0, .logit = 1.0, .exit_probability = 1.0};
  const auto flips = [&](const RunRecord& expected, const RunRecord& actual) {
    Decisions decisions = find_flips(expected, actual, config, model, {});
    for (Flip& flip : decisions.flips) {
      if (flip.kind == DecisionKind::exit) flip.margin = flip.difference = flip.largest_move = 0.01;
    }
    explain_flips(decisions, limits);
    return decisions;
  };
  const RunRecord expected = record_with_keys({4, 4}, {true, true});
  EXPECT_TRUE(flips(expected, expected).flips.empty());
  for (const std::vector<bool>& selects : {std::vector<bool>{true, false}, std::vector<bool>{true}}) {
    const Decisions lost = flips(expected, record_with_keys({4, 4}, selects));
    ASSERT_EQ(lost.flips.size(), 1u);
    EXPECT_EQ(lost.flips[0].kind, DecisionKind::key);
    EXPECT_EQ(lost.flips[0].position, 5);
    EXPECT_FALSE(lost.flips[0].explained);
    EXPECT_EQ(lost.decided[static_cast<int>(DecisionKind::key)], 4) << "keys of the missing step were decided too";
    EXPECT_EQ(flips(record_with_keys({4, 4}, selects), expected).flips.size(), 1u) << "in either direction";
  }
  // The row leaves after loop 1: it has no loop that selects.
  const Decisions left = flips(expected, record_with_keys({4, 1}, {true, false}));
  ASSERT_EQ(left.flips.size(), 2u);
  EXPECT_TRUE(left.flips[0].kind == DecisionKind::exit && left.flips[0].explained && left.flips[0].root);
  EXPECT_TRUE(left.flips[1].kind == DecisionKind::key && left.flips[1].explained && !left.flips[1].root);
  // An exit after loop 2 still selects.
  for (const Flip& each : flips(expected, record_with_keys({4, 2}, {true, false})).flips) {
    EXPECT_EQ(each.explained, each.kind == DecisionKind::exit);
  }
}

TEST(Flips, ThoseThatFollowFromAnotherCountAgainstTheRate) {
  const FlipLimits limits{.score = {0.01, 0.01}, .key_logit = 0.0, .logit = 0.1, .exit_probability = 0.0};
  Decisions candidate;
  candidate.decided[0] = 100, candidate.decided[2] = 50;
  candidate.flips.push_back(flip(DecisionKind::token, 10, 3, 0.001, 0.001));
  for (int i = 0; i < 40; ++i) candidate.flips.push_back(flip(DecisionKind::argmax, 130 + i, -1, 1.0, 5.0));
  explain_flips(candidate, limits);
  for (const Flip& each : candidate.flips) EXPECT_TRUE(each.explained);
  const std::vector<FlipVerdict> verdicts = judge_flips(candidate, {}, {});
  ASSERT_EQ(verdicts.size(), 2u);
  EXPECT_TRUE(verdicts[0].passed);
  EXPECT_EQ(verdicts[1].unexplained, 0);
  EXPECT_DOUBLE_EQ(verdicts[1].rate(), 0.8);
  EXPECT_DOUBLE_EQ(verdicts[1].rate_limit(), 0.06);
  EXPECT_FALSE(verdicts[1].passed) << "one explained root does not excuse any number of flips";
}

// Requests of one prompt token that emit four tokens of three; all logits 0 but the emitted token's 1.
RunRecord free_record(std::size_t requests) {
  RunRecord record;
  for (std::size_t i = 0; i < requests; ++i) {
    RequestRecord request;
    request.prompt_length = 1, request.fed = 3;
    request.tokens = {0, 0, 0, 0};
    request.logits = Tensor<float>({4, 3}, 0.0f);
    for (std::int64_t row = 0; row < 4; ++row) request.logits.row(row)[0] = 1.0f;
    record.requests.push_back(std::move(request));
  }
  return record;
}

// Emits token 1 at `row`: its logit rises and that of token 0 falls.
void leave(RequestRecord& request, std::size_t row) {
  request.tokens[row] = 1;
  request.logits.row(static_cast<std::int64_t>(row))[0] = 0.45f;
  request.logits.row(static_cast<std::int64_t>(row))[1] = 0.55f;
}

TEST(FreeRun, OnlyTheFirstDivergenceIsJudgedAndOnlyItsPastExplainsIt) {
  Trace trace;
  trace.requests.resize(1);
  const RunRecord expected = free_record(1);
  RunRecord actual = expected;
  leave(actual.requests[0], 1);
  actual.requests[0].tokens[2] = actual.requests[0].tokens[3] = 2;  // whatever follows
  const auto judge = [&](double limit, const Decisions& candidate) {
    return judge_free_run(trace, expected, actual, limit, candidate, {}, {});
  };
  EXPECT_TRUE(judge(0.6, {}).passed());
  EXPECT_EQ(judge(0.6, {}).tokens, 1);
  EXPECT_FALSE(judge(0.5, {}).passed()) << "the logits moved by more than noise";
  for (const auto& [position, passes] : {std::pair{1, true}, std::pair{2, false}}) {
    Decisions earlier;
    earlier.flips = {flip(DecisionKind::key, position, 2, 0.0, 0.0)};
    earlier.flips[0].explained = true;
    EXPECT_EQ(judge(0.5, earlier).passed(), passes) << "a key flip at position " << position << ", the divergence is read from position 1";
  }
  actual.requests[0].logits.row(1)[0] = 0.9f;
  EXPECT_FALSE(judge(10.0, {}).passed()) << "its own logits ask for another token";
}

TEST(FreeRun, ADrawnTokenIsJudgedByEveryLogitOfItsRow) {
  Trace trace;
  trace.requests.resize(1);
  trace.requests[0].temperature = 1.0f;
  const RunRecord expected = free_record(1);
  RunRecord actual = expected;
  actual.requests[0].tokens[1] = 2;  // no logit says so, but a number may
  const auto judge = [&](double limit) { return judge_free_run(trace, expected, actual, limit, {}, {}, {}); };
  EXPECT_TRUE(judge(0.1).passed());
  EXPECT_EQ(judge(0.1).diverged, 1);
  actual.requests[0].logits.row(1)[0] += 0.25f;
  EXPECT_FALSE(judge(0.1).passed());
  EXPECT_TRUE(judge(0.3).passed());
  EXPECT_NE(judge(0.3).text.find("drawn instead of"), std::string::npos) << judge(0.3).text;
}

TEST(FreeRun, TheShareOfRequestsThatDivergeHasALimit) {
  Trace trace;
  trace.requests.resize(10);
  const RunRecord expected = free_record(10);
  const auto judge = [&](std::size_t diverging, const Decisions& reordered) {
    RunRecord actual = expected;
    for (std::size_t i = 0; i < diverging; ++i) leave(actual.requests[i], 3);
    return judge_free_run(trace, expected, actual, 1.0, {}, reordered, {});
  };
  EXPECT_TRUE(judge(3, {}).passed());
  EXPECT_EQ(judge(4, {}).unexplained, 0);
  EXPECT_FALSE(judge(4, {}).passed()) << "the reordered reference leaves none";
  Decisions reordered;
  for (const int request : {0, 0, 3}) {
    reordered.flips.push_back(flip(DecisionKind::argmax, 2, -1, 0.1, 0.1));
    reordered.flips.back().request = request;
  }
  EXPECT_EQ(judge(4, reordered).reordered, 2);
  EXPECT_TRUE(judge(9, reordered).passed());  // 3 + 3 sqrt(3) + 3
  EXPECT_TRUE(judge(10, reordered).diverged == 10 && judge(10, reordered).passed());
}

TEST(Flips, MoreThanTheReorderedReferenceAllowsFail) {
  Decisions candidate, reordered;
  candidate.decided[1] = reordered.decided[1] = 10000;
  for (int i = 0; i < 100; ++i) reordered.flips.push_back(flip(DecisionKind::key, 100 + i, 2, 0.01, 0.01));
  const auto verdict = [&](int flips) {
    candidate.flips.assign(static_cast<std::size_t>(flips), flip(DecisionKind::key, 100, 2, 0.01, 0.01));
    explain_flips(candidate, {.score = {}, .key_logit = 1.0, .logit = 0.0, .exit_probability = 0.0});
    return judge_flips(candidate, reordered, {}).front();
  };
  EXPECT_TRUE(verdict(150).passed);
  EXPECT_TRUE(verdict(189).passed);  // 150 + 3 sqrt(150) + 3
  EXPECT_FALSE(verdict(190).passed);
}

TEST(Distances, LimitsWidenWithTheSamplingErrorAndNeverFallBelowTheFloor) {
  EXPECT_DOUBLE_EQ(spec::distance_limit(10, 1.0, 0.1, 0.0, false), 0.45);    // a maximum
  EXPECT_NEAR(spec::distance_limit(1e6, 0.5, 0.1, 0.0, false), 0.15, 1e-3);  // a median of many
  EXPECT_DOUBLE_EQ(spec::distance_limit(10, 1.0, 0.0, 0.2, false), 0.6);     // the floor
  EXPECT_DOUBLE_EQ(spec::distance_limit(10, 1.0, 0.1, 0.0, true), 4.5 * 4.5 * 0.1);
  EXPECT_DOUBLE_EQ(spec::flip_count_limit(0, 0), 3.0);
}

// `requests`: 0: as many as values.
PooledDistance pool(std::string_view metric, std::vector<double> values, int requests = 0) {
  PooledDistance distance;
  distance.metric = metric;
  distance.ascending = std::move(values);
  std::sort(distance.ascending.begin(), distance.ascending.end());
  distance.requests = requests > 0 ? requests : static_cast<int>(distance.ascending.size());
  return distance;
}

TEST(Distances, OneOutlierAmongManyIsSeenAndNamed) {
  std::vector<double> noise(1000, 0.01);
  const Yardstick yardstick{{pool("logits", noise)}, {pool("logits", noise)}};
  std::vector<PooledDistance> candidate{pool("logits", noise)};
  EXPECT_TRUE(judge_distances(candidate, yardstick).front().passed);
  candidate.front().ascending.back() = 0.05;
  const DistanceVerdict verdict = judge_distances(candidate, yardstick).front();
  EXPECT_FALSE(verdict.passed);
  EXPECT_NEAR(verdict.worst_ratio, 0.05 / 0.045, 1e-9);
  EXPECT_NE(verdict.text().find("maximum 0.05 of 1000 values, limit 0.045"), std::string::npos) << verdict.text();
}

TEST(Distances, AMetricThatTheCandidateLacksFailsAndIsNamed) {
  const std::vector<double> noise(100, 0.01);
  const Yardstick yardstick{{pool("hidden", noise), pool("logits", noise)}, {}};
  for (const std::size_t kept : {0u, 99u}) {
    std::vector<PooledDistance> candidate{pool("logits", noise)};
    if (kept > 0) candidate.push_back(pool("hidden", std::vector<double>(kept, 0.0)));
    const std::vector<DistanceVerdict> verdicts = judge_distances(candidate, yardstick);
    ASSERT_EQ(verdicts.size(), 2u);
    EXPECT_TRUE(verdicts[0].passed);
    EXPECT_FALSE(verdicts[1].passed);
    EXPECT_EQ(verdicts[1].text(), "hidden: " + std::to_string(100 - kept) + " of 100 values are missing");
  }
  // With own decisions other rows may be compared, but logits are never absent.
  const auto teacher_forced = [&](std::vector<PooledDistance> candidate) { return judge_teacher_forced_distances(candidate, yardstick); };
  EXPECT_TRUE(teacher_forced({pool("logits", std::vector<double>(99, 0.01))}).front().passed);
  const std::vector<DistanceVerdict> none = teacher_forced({});
  ASSERT_EQ(none.size(), 2u);
  EXPECT_TRUE(none[0].passed) << "hidden rows are judged with the reference's decisions";
  EXPECT_FALSE(none[1].passed);
}

TEST(Distances, KlIsJudgedFromAHundredRowsAndWhereMoreThanOneDecides) {
  const auto judge = [](std::vector<double> ascending, const std::vector<double>& noise) {
    return judge_distances({pool("kl", std::move(ascending))}, {{pool("kl", noise)}, {}}).front();
  };
  const std::vector<double> noise(120, 1e-5);
  std::vector<double> values = noise;
  values.back() = 1e-3;
  EXPECT_TRUE(judge(values, noise).passed) << "the maximum, and what the 99.9th percentile is of so few";
  std::fill(values.begin() + 105, values.end(), 1e-3);
  EXPECT_FALSE(judge(values, noise).passed) << "the 90th percentile";
  // Two correct orders of additions were seen 5.7 times apart at the median of 28 rows of two requests.
  const std::vector<double> few(99, 1e-5), apart(99, 1e-3);
  EXPECT_TRUE(judge(apart, few).passed);
  EXPECT_FALSE(judge(apart, few).judged) << "stated, not counted among the distances that pass";
  EXPECT_TRUE(judge(noise, noise).judged);
  EXPECT_FALSE(judge(std::vector<double>(98, 1e-5), few).passed) << "of few rows none may be missing either";
}

TEST(Distances, GatesAreJudgedFromAHundredValuesAndWhereMoreThanOneDecides) {
  const auto judge = [](std::string_view metric, std::vector<double> ascending, const std::vector<double>& noise) {
    return judge_distances({pool(metric, std::move(ascending))}, {{pool(metric, noise)}, {}}).front();
  };
  const std::vector<double> noise(243, 0.03);
  std::vector<double> values = noise;
  values.back() = 0.16;
  EXPECT_TRUE(judge("gate", values, noise).passed) << "the maximum, and what the 99.9th percentile is of so few";
  EXPECT_FALSE(judge("hidden", values, noise).passed) << "the length of one row's difference decides";
  std::fill(values.begin() + 238, values.end(), 0.16);
  EXPECT_FALSE(judge("gate", values, noise).passed) << "the 99th percentile";
  const std::vector<double> few(99, 0.03), apart(99, 0.3);
  EXPECT_FALSE(judge("gate", apart, few).judged);
  EXPECT_FALSE(judge("hidden", apart, few).passed);
  EXPECT_FALSE(judge("logits", apart, few).passed);
}

// The rows of a request share the direction of their difference: medians of 160 gates of five requests were seen 2.3 times apart between two
// correct orders of additions, those of the hidden rows 1.2 times.
TEST(Distances, ScatteredMetricsAreDrawnOncePerRequest) {
  const auto passes = [](std::string_view metric, double candidate, int requests) {
    const std::vector<double> values(160, candidate), reordered(160, 0.00216), exact(160, 0.00384);
    return judge_distances({pool(metric, values, requests)}, {{pool(metric, reordered)}, {pool(metric, exact)}}).front().passed;
  };
  EXPECT_TRUE(passes("gate", 0.00496, 5));
  EXPECT_FALSE(passes("gate", 0.00496, 160));
  EXPECT_FALSE(passes("gate", 0.0088, 5)) << "1 + 2 / sqrt(2.5) times 0.00384";
  EXPECT_FALSE(passes("hidden", 0.00496, 5)) << "a length is judged by its rows";
  RunRecord expected;
  expected.requests.resize(3);
  for (RequestRecord& request : expected.requests) {
    request.prompt_length = 1, request.fed = 1;
    request.tokens = {0};
    request.exit_depths = {4};
    request.logits = Tensor<float>({2, 2}, 1.0f);
  }
  expected.requests[1].logits = {};
  for (const PooledDistance& distance : pooled_distances(expected, expected)) EXPECT_EQ(distance.requests, 2) << distance.metric;
}

TEST(Distances, LogitsOfAnotherLoopAreNoDistance) {
  RunRecord expected;
  expected.requests.resize(1);
  RequestRecord& request = expected.requests[0];
  request.prompt_length = 1, request.fed = 2;
  request.tokens = {0, 1};
  request.exit_depths = {4, 4};
  request.logits = Tensor<float>({3, 2}, 1.0f);
  RunRecord actual = expected;
  actual.requests[0].exit_depths = {4, 2};
  actual.requests[0].logits.row(2)[0] = 9.0f;
  for (const PooledDistance& distance : pooled_distances(expected, actual)) {
    if (distance.metric != "logits") continue;
    EXPECT_EQ(distance.ascending, (std::vector<double>{0.0, 0.0}));
  }
}

TEST(Distances, TeacherForcedRunsAreJudgedByLogitsFromAHundredRowsOn) {
  const Yardstick yardstick{{pool("logits", std::vector<double>(99, 0.01)), pool("hidden", std::vector<double>(500, 0.01))}, {}};
  for (const auto& [rows, judged] : {std::pair{99u, false}, std::pair{100u, true}}) {
    const std::vector<PooledDistance> candidate{pool("logits", std::vector<double>(rows, 1.0)),
                                                pool("hidden", std::vector<double>(500, 1.0))};
    const std::vector<DistanceVerdict> verdicts = judge_teacher_forced_distances(candidate, yardstick);
    EXPECT_EQ(verdicts[0].judged, judged);
    EXPECT_EQ(verdicts[0].passed, !judged);
    EXPECT_FALSE(verdicts[1].judged);
  }
}

}  // namespace
}  // namespace loopgauge::harness
