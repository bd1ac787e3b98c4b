// SPDX-License-Identifier: Apache-2.0
// Speculation of the CUDA executor: what is committed has the bits of its own serial run, whatever was drafted; what is drawn follows from
// its own logits.
#include <algorithm>
#include <set>

#include "harness/compare/audit.hpp"
#include "harness/compare/conformance.hpp"
#include "models/error.hpp"
#include "reference/reference_executor.hpp"
#include "reference/run/token_choice.hpp"
#include "tests/equivalence/executor_fixture.hpp"

namespace loopgauge::test {
namespace {

const RunOptions kEverything{.record = RecordGroups::all()};

class SpeculationTest : public ExecutorTest {
 protected:
  // Returns the speculative run.
  RunRecord expect_serial_bits(const Trace& trace, const EffectiveConfig& config, const std::string& mode, const std::string& what) {
    const RunRecord& serial = serial_run(trace, config);
    const RunRecord actual = run(*executor_, trace, config, kEverything, mode);
    expect_identical(serial, actual, config.window(), what);
    for (std::size_t i = 0; i < serial.requests.size(); ++i) {
      EXPECT_EQ(serial.requests[i].tokens, actual.requests[i].tokens) << what;
      EXPECT_EQ(serial.requests[i].executions, actual.requests[i].executions) << what << ", request " << i;
    }
    expect_rounds(actual, what);
    EXPECT_EQ(actual.counters.executed_rows - actual.counters.rejected_rows, serial.counters.executed_rows) << what;
    return actual;
  }
  RunRecord expect_serial_bits(const Trace& trace, const Setting& setting, const std::string& mode) {
    return expect_serial_bits(trace, config_of(setting), mode, trace.name + ", " + mode + ", " + text(setting));
  }

  // The last one is kept: modes of one setting are compared with the same.
  const RunRecord& serial_run(const Trace& trace, const EffectiveConfig& config) {
    if (const std::string key = trace.name + config.canonical_json(); serial_key_ != key) {
      serial_ = run(*executor_, trace, config);
      serial_key_ = key;
    }
    return serial_;
  }

  // A failed submission starts rows over: the bits are the same, the executions more.
  void expect_rewound_bits(const Trace& trace, const EffectiveConfig& config, const std::string& mode, const harness::PlanOptions& options,
                           const std::string& what) {
    const RunRecord actual = replay(*executor_, harness::make_plan(harness::parse_mode(mode), trace, config, options), trace, config, kEverything);
    expect_identical(serial_run(trace, config), actual, config.window(), what);
    EXPECT_LE(actual.counters.failures, 1) << what;
    EXPECT_EQ(describe(actual.held_at_drain), "") << what;
  }

  static void expect_rounds(const RunRecord& record, const std::string& what) {
    std::int64_t rounds = 0, decode_rows = 0;
    for (const RequestRecord& request : record.requests) {
      for (const SpeculationRound& round : request.rounds) decode_rows += round.emitted;
      rounds += static_cast<std::int64_t>(request.rounds.size());
    }
    EXPECT_EQ(rounds, record.counters.speculation_rounds) << what;
    EXPECT_GT(rounds, 0) << what;
    EXPECT_EQ(record.counters.draft_rows + record.counters.verify_rows - record.counters.rejected_rows, kLoops * decode_rows) << what;
    EXPECT_EQ(describe(record.held_at_drain), "") << what;
  }

  // Given drafts: the tokens of `record`, each `period`-th wrong (0: none).
  static Trace with_drafts(Trace trace, const RunRecord& record, int period) {
    for (std::size_t i = 0; i < trace.requests.size(); ++i) {
      TraceRequest& request = trace.requests[i];
      const auto& tokens = record.requests[i].tokens;
      request.draft_tokens.assign(static_cast<std::size_t>(request.max_new_tokens), 0);
      for (std::size_t j = 0; j < std::min(tokens.size(), request.draft_tokens.size()); ++j) {
        const bool wrong = period > 0 && static_cast<int>(j) % period == period - 1;
        request.draft_tokens[j] = wrong ? (tokens[j] + 1) % trace.vocab_size : tokens[j];
      }
    }
    return trace;
  }

  static EffectiveConfig execution_dependent(const char* switches, int tail, FlushRule flush) {
    AlgorithmConfig config;
    apply_switches(config, switches);
    config.window = 64;
    config.kv_residual_quantization.timing = EncodingTiming::execution_dependent;
    config.kv_residual_quantization.tail = tail;
    config.kv_residual_quantization.flush = flush;
    return EffectiveConfig::resolve(config, tiny().config);
  }

  static EffectiveConfig all_on(int tail, EncodingPolicy policy = EncodingPolicy::rolling, int window = 64) {
    AlgorithmConfig config;
    apply_switches(config, "t1s1q1");
    config.window = window;
    config.kv_residual_quantization.policy = policy;
    config.kv_residual_quantization.tail = tail;
    return EffectiveConfig::resolve(config, tiny().config);
  }

 private:
  std::string serial_key_;
  RunRecord serial_;
};

// One trace each. Drafts are given in all but `greedy`: a rejection at every index, a flush at every offset, an end inside a round.
class SpeculationOfTrace : public SpeculationTest, public testing::WithParamInterface<const char*> {
 protected:
  bool flushes() const { return std::string(GetParam()) == "spec-flush"; }
};
INSTANTIATE_TEST_SUITE_P(Speculation, SpeculationOfTrace, testing::Values("spec-reject", "spec-flush", "spec-end", "greedy"), [](const auto& test) {
  std::string name = test.param;
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
});

TEST_P(SpeculationOfTrace, RoundsCommitTheBitsOfTheSerialRun) {
  const Trace trace = shipped(GetParam());
  const std::vector<const char*> given{"block_spec.d1.k1", "block_spec.d1.k4", "block_spec.d2.k3", "block_spec.d2.k8"},
      own{"block_spec.d1.k8", "block_spec.d2.k1", "block_spec.d2.k4"};
  std::int64_t doubled_bytes = 0;
  for (const Setting& setting : kSettings) {
    for (const char* mode : trace.requests.front().draft_tokens.empty() ? own : given)
      doubled_bytes += expect_serial_bits(trace, setting, mode).counters.most_doubled_bytes;
  }
  if (flushes()) {
    EXPECT_GT(doubled_bytes, 0) << "no round held a block in both representations";
  }
}

TEST_P(SpeculationOfTrace, ATokenPipelineCommitsTheBitsOfTheSerialRun) {
  const Trace trace = shipped(GetParam());
  std::set<std::int32_t> accepted;
  std::int64_t doubled_bytes = 0, rejected_rows = 0;
  for (const Setting& setting : kSettings) {
    for (const char* mode : {"pipeline_spec.d1", "pipeline_spec.d2", "pipeline_spec.d3"}) {
      const RunRecord record = expect_serial_bits(trace, setting, mode);
      doubled_bytes += record.counters.most_doubled_bytes;
      rejected_rows += record.counters.rejected_rows;
      for (const RequestRecord& request : record.requests) {
        for (const SpeculationRound& round : request.rounds) accepted.insert(round.accepted);
      }
    }
  }
  EXPECT_TRUE(accepted.contains(1)) << "a pipeline that never shifts shows half of it";
  if (std::string(GetParam()) == "spec-reject") {  // elsewhere it is for the model's own drafts to be rejected or not
    EXPECT_TRUE(accepted.contains(0)) << "a pipeline that never starts over shows half of it";
    EXPECT_GT(rejected_rows, 0);
  }
  if (flushes()) {
    EXPECT_GT(doubled_bytes, 0) << "no live token saw a block encoded that the oldest did not";
  }
}

// With rounds or cycles in flight: nothing is read to prepare a submission, and the same rounds are decided.
TEST_P(SpeculationOfTrace, WhatRunsAheadCommitsTheBitsOfTheSerialRun) {
  const Trace trace = shipped(GetParam());
  for (const Setting& setting : kSettings) {
    for (const std::string mode : {"block_spec.d2.k4", "block_spec.d1.k8", "pipeline_spec.d1", "pipeline_spec.d2"}) {
      const RunRecord ahead = expect_serial_bits(trace, setting, mode + "+async");
      const std::string what = mode + "+async, " + text(setting);
      EXPECT_EQ(ahead.counters.host_reads, 0) << what;
      EXPECT_GE(ahead.counters.most_in_flight, 2) << what;
      if (setting.switches != "t1s1q1") continue;
      const RunRecord each = run(*executor_, trace, config_of(setting), kEverything, mode);
      for (std::size_t i = 0; i < trace.requests.size(); ++i) EXPECT_EQ(ahead.requests[i].rounds, each.requests[i].rounds) << what << ", request " << i;
      EXPECT_EQ(ahead.counters.rejected_rows, each.counters.rejected_rows) << what;
      EXPECT_EQ(ahead.counters.draft_rows, each.counters.draft_rows) << what;
    }
  }
}

// Tails as short as serial_aligned allows them: blocks are sealed right behind the oldest row.
TEST_F(SpeculationTest, TheShortestTailCommitsTheBitsOfTheSerialRun) {
  const Trace trace = shipped("spec-flush");
  const std::pair<const char*, int> shortest[] = {{"block_spec.d2.k4", 5}, {"block_spec.d1.k8", 9}, {"pipeline_spec.d1", 4}, {"pipeline_spec.d2", 2}};
  for (const auto& [mode, tail] : shortest) {
    expect_serial_bits(trace, all_on(tail), mode, std::string(mode) + ", tail " + std::to_string(tail));
  }
}

// Blocks are sealed by what the device has decided, so that a tail covers the rows of a round as it does with one round in flight.
TEST_F(SpeculationTest, AheadTheShortestTailCommitsTheBitsOfTheSerialRun) {
  const std::pair<const char*, int> shortest[] = {
      {"block_spec.d2.k4+async", 5}, {"block_spec.d1.k8+async", 9}, {"pipeline_spec.d1+async", 4}, {"pipeline_spec.d2+async", 2}};
  for (const char* name : {"spec-flush", "greedy"}) {
    const Trace trace = shipped(name);
    for (const auto& [mode, tail] : shortest) {
      for (const EncodingPolicy policy : {EncodingPolicy::rolling, EncodingPolicy::streaming})
        expect_serial_bits(trace, all_on(tail, policy), mode, std::string(name) + ", " + mode + ", tail " + std::to_string(tail));
    }
  }
}

// Under `streaming` the first row after a prompt sees its full windows encoded and no more, however far the tail lets E go behind it.
TEST_F(SpeculationTest, AheadTheFirstRowSeesWhatThePromptHasEncoded) {
  const Trace trace = shipped("spec-flush");  // prompts of 124 to 128 tokens: no window of 256 is full
  for (const char* mode : {"block_spec.d2.k4", "block_spec.d2.k4+async", "pipeline_spec.d1", "pipeline_spec.d1+async"})
    expect_serial_bits(trace, all_on(5, EncodingPolicy::streaming, 256), mode, std::string(mode) + ", streaming, w256");
}

// What is sealed when is decided as it is with one submission in flight, before a decision too, whatever is preempted.
TEST_F(SpeculationTest, AheadBlocksAreSealedAndEncodedAgainAsTheyAreOneByOne) {
  const Trace flushes = shipped("spec-flush");
  std::int64_t rewritten = 0;
  for (const auto& [switches, tail] : {std::pair("t1s1q1", 0), std::pair("t0s0q1", 3)}) {
    for (const FlushRule flush : {FlushRule::committed, FlushRule::eager}) {
      const EffectiveConfig config = execution_dependent(switches, tail, flush);
      const Trace wrong = with_drafts(flushes, run(*executor_, flushes, config), 3);
      std::vector<std::string> modes{"block_spec.d1.k4", "block_spec.d2.k8", "pipeline_spec.d1"};
      if (tail == 0) modes.push_back("block_spec.d2.k4+preempt");
      for (const std::string& mode : modes) {
        const std::string what = mode + ", " + switches + ", tail " + std::to_string(tail) + ", " + std::string(to_string(flush));
        const RunRecord each = run(*executor_, wrong, config, kEverything, mode), ahead = run(*executor_, wrong, config, kEverything, mode + "+async");
        expect_rounds(ahead, what);
        expect_identical(each, ahead, config.window(), what);
        EXPECT_EQ(ahead.counters.host_reads, 0) << what;
        EXPECT_EQ(ahead.counters.rewritten_rows, each.counters.rewritten_rows) << what;
        rewritten += ahead.counters.rewritten_rows;
      }
    }
  }
  EXPECT_GT(rewritten, 0);
}

// Actions wait for what is in flight; a failed submission is one of many.
TEST_F(SpeculationTest, AheadInterruptionsChangeNoBit) {
  for (const Setting& setting : {Setting{"t0s0q0"}, Setting{"t1s1q1", EncodingPolicy::rolling, 64}, Setting{"t1s1q1", EncodingPolicy::streaming, 64}}) {
    const EffectiveConfig config = config_of(setting);
    for (const char* name : {"spec-flush", "spec-end"}) {
      const Trace trace = shipped(name);
      for (const std::string mode : {"block_spec.d2.k4+preempt+async", "pipeline_spec.d1+preempt+async", "block_spec.d2.k4+async+graph",
                                     "pipeline_spec.d1+async+graph"})
        EXPECT_EQ(expect_serial_bits(trace, setting, mode).counters.host_reads, 0) << mode;
      for (const std::string mode : {"block_spec.d2.k4+async", "pipeline_spec.d2+async"}) {
        const std::size_t submissions = harness::make_plan(harness::parse_mode(mode), trace, config).submissions.size();
        for (std::size_t at = 3; at < submissions; at += submissions / 6 + 1) {
          harness::PlanOptions options;
          options.failure = harness::PlanFailure{static_cast<int>(at), at % 2 == 0 ? PlannedFailure::launch : PlannedFailure::allocation};
          expect_rewound_bits(trace, config, mode, options, std::string(name) + ", " + mode + ", " + text(setting) + ", failure at " + std::to_string(at));
        }
      }
    }
    const Trace interrupted = shipped("interrupted");
    for (const std::string mode : {"block_spec.d2.k4+async", "pipeline_spec.d1+async"}) expect_serial_bits(interrupted, setting, mode);
  }
}

// What had been read when a request was cancelled is cut from what it would have been.
TEST_F(SpeculationTest, AheadACancelledRequestKeepsWhatHadBeenRead) {
  const Trace trace = shipped("cancelled");
  Trace whole = trace;
  whole.events.clear();
  for (std::size_t i = 0; i < whole.requests.size(); ++i) whole.requests[i].id = static_cast<int>(i);
  const Setting setting{"t1s1q1", EncodingPolicy::rolling, 64};
  const RunRecord serial = run(*executor_, whole, config_of(setting));
  for (const char* mode : {"block_spec.d2.k3+async", "pipeline_spec.d1+async"}) {
    const RunRecord actual = run(*executor_, trace, config_of(setting), kEverything, mode);
    EXPECT_EQ(describe(actual.held_at_drain), "") << mode;
    for (std::size_t i = 0; i < trace.requests.size(); ++i) {
      const RequestRecord &expected = serial.requests[i], &kept = actual.requests[i];
      ASSERT_LE(kept.fed, expected.fed) << mode;
      const bool begins_alike = std::equal(kept.logits.data.begin(), kept.logits.data.end(), expected.logits.data.begin());
      EXPECT_TRUE(begins_alike) << mode << ", request " << i;
      EXPECT_TRUE(kept.outcome == RequestOutcome::cancelled || kept.logits.data.size() == expected.logits.data.size()) << mode << ", request " << i;
    }
    EXPECT_EQ(actual.counters.host_reads, 0) << mode;
  }
}

// Draws go by position, so that what runs ahead draws what is read at each step.
TEST_F(SpeculationTest, AheadTheSameTokensAreDrawn) {
  const Trace plain = shipped("spec-sampled");
  for (const Setting& setting : {Setting{"t0s0q0"}, Setting{"t1s1q1", EncodingPolicy::rolling, 64}}) {
    const EffectiveConfig config = config_of(setting);
    const Trace given = with_drafts(plain, run(*executor_, plain, config), 3);
    for (const Trace& trace : {plain, given}) {
      for (const std::string mode : {"block_spec.d1.k4", "block_spec.d2.k4", "pipeline_spec.d1", "pipeline_spec.d3"}) {
        const std::string what = mode + ", " + text(setting);
        const RunRecord each = run(*executor_, trace, config, kEverything, mode), ahead = run(*executor_, trace, config, kEverything, mode + "+async");
        expect_rounds(ahead, what);
        expect_identical(each, ahead, config.window(), what);
        for (std::size_t i = 0; i < trace.requests.size(); ++i) {
          EXPECT_EQ(each.requests[i].tokens, ahead.requests[i].tokens) << what;
          EXPECT_EQ(each.requests[i].rounds, ahead.requests[i].rounds) << what;
        }
        EXPECT_EQ(ahead.counters.host_reads, 0) << what;
      }
    }
  }
}

TEST_F(SpeculationTest, PreemptionGivesUpTheRoundAndChangesNoBit) {
  const Trace trace = shipped("spec-flush");
  for (const Setting& setting : kSettings) {
    for (const char* mode : {"block_spec.d2.k4+preempt", "pipeline_spec.d1+preempt"}) expect_serial_bits(trace, setting, mode);
  }
}

TEST_F(SpeculationTest, ReplayedStepsCommitTheBitsOfTheSerialRun) {
  for (const char* name : {"spec-flush", "spec-end"}) {
    const Trace trace = shipped(name);
    for (const Setting& setting : kSettings) {
      for (const char* mode : {"block_spec.d2.k4+graph", "pipeline_spec.d1+graph"}) {
        const RunRecord record = expect_serial_bits(trace, setting, mode);
        EXPECT_GT(record.counters.graph_replays, 0) << name << " " << mode << ", " << text(setting);
        if (std::string(name) == "spec-flush") {
          EXPECT_GT(record.counters.graph_replays, record.counters.graph_fallbacks) << mode << ", " << text(setting);
        }
      }
    }
  }
}

TEST_F(SpeculationTest, SerialSamplingDrawsFromItsOwnLogitsInEveryPlan) {
  const Trace trace = shipped("spec-sampled");
  for (const Setting& setting : {Setting{"t0s0q0"}, Setting{"t1s1q1", EncodingPolicy::rolling, 64}}) {
    const EffectiveConfig config = config_of(setting);
    const RunRecord serial = run(*executor_, trace, config);
    int drawn = 0;
    for (std::size_t i = 0; i < trace.requests.size(); ++i) {
      const TraceRequest& request = trace.requests[i];
      const RequestRecord& record = serial.requests[i];
      for (std::size_t j = 0; j < record.tokens.size(); ++j) {
        const auto logits = record.logits.row(static_cast<std::int64_t>(j));
        const int position = request.prompt_length() + static_cast<int>(j);
        EXPECT_EQ(record.tokens[j], reference::choose_token<reference::Declared>(request, position, logits).token) << "request " << i << ", token " << j;
        drawn += record.tokens[j] != reference::argmax(std::span<const float>(logits));
      }
    }
    EXPECT_GT(drawn, 0) << "every draw was the greedy token";
    for (const char* mode : {"mixed", "async", "graph", "mixed+async+graph"})
      expect_identical(serial, run(*executor_, trace, config, kEverything, mode), config.window(), mode + (", " + text(setting)));
  }
}

// With given drafts the record holds all that decides: which candidate a row judged, and with what logits.
TEST_F(SpeculationTest, SampledTokensFollowFromTheLogitsAndTheCandidates) {
  const EffectiveConfig config = config_of({"t1s1q1", EncodingPolicy::rolling, 64});
  Trace plain = shipped("spec-sampled");
  for (TraceRequest& request : plain.requests) request.draft_tokens.clear();
  const Trace trace = with_drafts(plain, run(*executor_, plain, config), 3);
  int accepted = 0, rejected = 0, replaced = 0;
  for (const char* mode : {"block_spec.d1.k4", "block_spec.d2.k4", "pipeline_spec.d1", "pipeline_spec.d2"}) {
    const RunRecord record = run(*executor_, trace, config, kEverything, mode);
    expect_rounds(record, mode);
    expect_identical(record, run(*executor_, trace, config, kEverything, mode), config.window(), std::string(mode) + " again");
    for (std::size_t i = 0; i < trace.requests.size(); ++i) {
      const TraceRequest& request = trace.requests[i];
      for (const SpeculationRound& round : record.requests[i].rounds) {
        for (int k = 0; k < round.emitted; ++k) {
          const int position = round.position + k + 1;  // of the token that is decided
          const int row = position - request.prompt_length();
          if (row >= static_cast<int>(record.requests[i].tokens.size())) continue;
          const auto logits = record.requests[i].logits.row(row);
          const std::int32_t token = record.requests[i].tokens[static_cast<std::size_t>(row)];
          const std::string what = std::string(mode) + ", request " + std::to_string(i) + ", token " + std::to_string(row);
          if (k >= round.proposed) {
            EXPECT_EQ(token, reference::choose_token<reference::Declared>(request, position, logits).token) << what;
            continue;
          }
          const std::int32_t candidate = request.draft_tokens[static_cast<std::size_t>(row)];
          const auto verdict = reference::judge_candidate<reference::Declared>(request, position, logits, candidate, {});
          EXPECT_EQ(token, verdict.token) << what;
          EXPECT_EQ(k < round.accepted, verdict.confirmed) << what;
          (verdict.confirmed ? accepted : rejected) += 1;
          replaced += !verdict.confirmed && verdict.token != reference::argmax(std::span<const float>(logits));
        }
      }
    }
  }
  EXPECT_GT(accepted, 10);
  EXPECT_GT(rejected, 10);
  EXPECT_GT(replaced, 0);
}

// Own drafts: the reference draws from nearly the same logits, so that most decisions fall alike; one that does not changes the text after it.
TEST_F(SpeculationTest, OwnSampledDraftsAreJudgedByTheirOwnDistributions) {
  const Trace trace = shipped("spec-sampled");
  const auto reference = reference::make_reference_executor(tiny());
  for (const char* mode : {"block_spec.d1.k4", "block_spec.d2.k4", "pipeline_spec.d1", "pipeline_spec.d3"}) {
    const EffectiveConfig config = config_of({"t0s1q0"});
    const RunRecord expected = run(*reference, trace, config, kEverything, mode);
    const RunRecord actual = run(*executor_, trace, config, kEverything, mode);
    expect_rounds(actual, mode);
    expect_identical(actual, run(*executor_, trace, config, kEverything, mode), config.window(), std::string(mode) + " again");
    std::size_t tokens = 0, equal = 0;
    for (std::size_t i = 0; i < trace.requests.size(); ++i) {
      const auto &e = expected.requests[i].tokens, &a = actual.requests[i].tokens;
      equal += static_cast<std::size_t>(std::mismatch(e.begin(), e.end(), a.begin(), a.end()).first - e.begin());
      tokens += e.size();
    }
    EXPECT_GE(2 * equal, tokens) << mode << ": " << equal << " of " << tokens << " tokens before the first that differs";
  }
}

// Forced tokens and given drafts: acceptance is that of the reference, and so are rounds, frontiers and what is encoded again.
TEST_F(SpeculationTest, BlocksSealedBeforeTheirRoundIsDecidedKeepTheirParameters) {
  Trace plain = shipped("spec-flush");
  for (TraceRequest& request : plain.requests) request.draft_tokens.clear();
  const auto reference = reference::make_reference_executor(tiny());
  struct Runs {
    const char* switches;
    int tail;
    std::vector<int> periods;
    std::vector<const char*> modes;
  };
  const Runs runs[] = {{"t1s1q1", 0, {0, 2, 3}, {"block_spec.d1.k4", "block_spec.d2.k8", "block_spec.d2.k4+preempt"}},
                        {"t0s0q1", 3, {2}, {"block_spec.d2.k4+graph", "block_spec.d2.k4+async", "pipeline_spec.d1"}}};
  std::int64_t rewritten = 0;
  for (const auto& [switches, tail, periods, modes] : runs) {
    const RunRecord serial = run(*executor_, plain, execution_dependent(switches, tail, FlushRule::committed));
    const Trace forced = harness::forced_trace(plain, serial);
    for (const int period : periods) {
      const Trace trace = with_drafts(forced, serial, period);
      const EffectiveConfig config = execution_dependent(switches, tail, FlushRule::eager);
      for (const char* mode : modes) {
        const std::string what = std::string(mode) + ", " + switches + ", tail " + std::to_string(tail) + ", every " + std::to_string(period) + ". draft wrong";
        const RunRecord expected = run(*reference, trace, config, kEverything, mode), actual = run(*executor_, trace, config, kEverything, mode);
        expect_rounds(actual, what);
        EXPECT_EQ(actual.counters.rewritten_rows, expected.counters.rewritten_rows) << what;
        rewritten += actual.counters.rewritten_rows;
        EXPECT_EQ(actual.counters.rejected_rows, expected.counters.rejected_rows) << what;
        for (std::size_t i = 0; i < trace.requests.size(); ++i) {
          EXPECT_EQ(actual.requests[i].rounds, expected.requests[i].rounds) << what;
          EXPECT_EQ(actual.requests[i].encoded_frontier, expected.requests[i].encoded_frontier) << what;
          ASSERT_EQ(actual.requests[i].blocks.size(), expected.requests[i].blocks.size()) << what;
          for (std::size_t b = 0; b < actual.requests[i].blocks.size(); ++b)
            EXPECT_EQ(actual.requests[i].blocks[b].positions, expected.requests[i].blocks[b].positions) << what;
        }
        const harness::AuditResult audit = harness::audit(actual, trace, config, tiny());
        EXPECT_TRUE(audit.clean()) << what << ": " << audit.findings.front().text;
        if (period == 0) {
          EXPECT_EQ(actual.counters.rewritten_rows, 0) << what;
        }
      }
    }
  }
  EXPECT_GT(rewritten, 0);
}

// A planted fault commits other bits, or meets memory that nobody wrote, which is poisoned here.
TEST_F(SpeculationTest, PlantedFaultsChangeWhatIsCommitted) {
  struct Planted {
    Fault fault;
    const char *trace, *switches;
    std::vector<const char*> modes;
  };
  const Planted planted[] = {
      {Fault::stale_reference_at_position, "spec-reject", "t0s1q0", {"block_spec.d1.k4", "block_spec.d2.k4", "pipeline_spec.d1"}},
      {Fault::plane_not_truncated, "spec-reject", "t0s0q0", {"block_spec.d1.k4", "block_spec.d2.k4", "pipeline_spec.d1"}},
      {Fault::candidate_sealed, "spec-flush", "t0s0q1", {"block_spec.d1.k4", "block_spec.d2.k4"}},
      {Fault::draft_hidden_shared, "spec-reject", "t0s0q0", {"block_spec.d1.k4", "block_spec.d2.k4"}},
      {Fault::acceptance_off_by_one, "spec-reject", "t0s0q0", {"block_spec.d1.k4", "block_spec.d2.k4", "pipeline_spec.d1"}},
  };
  for (const Planted& p : planted) {
    const Trace trace = shipped(p.trace);
    const EffectiveConfig config = config_of({p.switches, EncodingPolicy::rolling, 64});
    for (const char* mode : p.modes) {
      const std::string what = std::string(to_string(p.fault)) + ", " + mode;
      const RunRecord clean = run(*executor_, trace, config, kEverything, mode);
      RunOptions options = kEverything;
      options.fault = p.fault;
      try {
        const RunRecord faulty = run(*executor_, trace, config, options, mode);
        EXPECT_FALSE(harness::compare_records(clean, faulty, config.window()).identical()) << what;
        EXPECT_EQ(describe(faulty.held_at_drain), "") << what;
      } catch (const NumericError&) {
      }
      expect_identical(clean, run(*executor_, trace, config, kEverything, mode), config.window(), what + ", and clean again");
    }
  }
}

TEST_F(SpeculationTest, WhatIsNotThereIsRefused) {
  const Trace trace = shipped("spec-reject");
  RunOptions options = kEverything;
  options.fault = Fault::acceptance_off_by_one;
  EXPECT_THROW(static_cast<void>(run(*executor_, trace, config_of({"t0s0q0"}), options, "pipeline_spec.d1+async")), UnsupportedError);
}

}  // namespace
}  // namespace loopgauge::test
