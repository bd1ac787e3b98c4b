// SPDX-License-Identifier: Apache-2.0
// Speculation gives the bits of serial execution (S-SPEC, S-PIPE), whatever is accepted.
#include <gtest/gtest.h>

#include "tests/reference/executor/speculation.hpp"

namespace loopgauge::test {
namespace {

constexpr Speculation kBlock{SpeculationKind::block, 2, 4};

TraceRequest free_request(int id, int prompt, int tokens, int eos = -1) {
  TraceRequest r = request(id, prompt, 0);
  r.max_new_tokens = tokens;
  r.eos_token_id = eos;
  return r;
}

AlgorithmConfig encoded(const char* switches_text, EncodingPolicy policy, int tail, EncodingTiming timing = EncodingTiming::serial_aligned,
                        FlushRule flush = FlushRule::committed) {
  AlgorithmConfig config = switches(switches_text);
  config.kv_residual_quantization.policy = policy;
  config.kv_residual_quantization.tail = tail;
  config.kv_residual_quantization.timing = timing;
  config.kv_residual_quantization.flush = flush;
  return config;
}

class Speculating : public testing::Test {
 protected:
  RunRecord speculate(const Trace& trace, const AlgorithmConfig& requested, const Speculation& speculation, RunOptions options = {}) const {
    const Plan plan = speculative_plan(trace, EffectiveConfig::resolve(requested, checkpoint_.config), speculation);
    return run(checkpoint_, trace, requested, options, &plan);
  }
  // Returns the speculative run.
  RunRecord expect_serial(const Trace& trace, const AlgorithmConfig& requested, const Speculation& speculation) const {
    const RunRecord serial = run(checkpoint_, trace, requested);
    RunRecord record = speculate(trace, requested, speculation);
    for (std::size_t i = 0; i < trace.requests.size(); ++i) {
      EXPECT_EQ(differing_groups(serial.requests[i], record.requests[i]), kNone) << "request " << i;
      EXPECT_EQ(serial.requests[i].executions, record.requests[i].executions) << "request " << i;
    }
    EXPECT_EQ(describe(record.held_at_drain), "");
    std::int64_t kept = 0;
    for (const RequestRecord& r : record.requests) {
      for (const std::uint8_t count : r.executions) kept += count;
    }
    EXPECT_EQ(record.counters.executed_rows, kept + record.counters.rejected_rows);
    return record;
  }

  const Checkpoint checkpoint_ = tiny_checkpoint();
};

TEST_F(Speculating, EverySettingDepthAndLengthGivesTheBitsOfSerial) {
  const Trace trace = trace_of({free_request(0, 70, 24), free_request(1, 5, 9)});
  for (const AlgorithmConfig& config :
       {switches("t0s0q0"), switches("t1s1q0"), encoded("t0s0q1", EncodingPolicy::rolling, 9),
        encoded("t1s1q1", EncodingPolicy::streaming, 10), encoded("t0s1q1", EncodingPolicy::fixed_prompt, 9)}) {
    for (const int depth : {1, 2}) {
      for (const int length : {1, 3, 8}) expect_serial(trace, config, {SpeculationKind::block, depth, length});
      expect_serial(trace, config, {SpeculationKind::pipeline, depth, 0});
    }
    expect_serial(trace, config, {SpeculationKind::pipeline, 3, 0});
  }
}

TEST_F(Speculating, ARejectionAtEveryIndexAndNoneGiveTheBitsOfSerial) {
  const Trace plain = trace_of({free_request(0, 60, 40)});
  for (const AlgorithmConfig& config : {switches("t0s1q0"), encoded("t1s1q1", EncodingPolicy::rolling, 5)}) {
    const RunRecord serial = run(checkpoint_, plain, config);
    for (int index = 0; index <= 4; ++index) {  // 4: never
      // A round emits the accepted drafts and one more token, so that wrong drafts at this distance come at the same index every time.
      const auto wrong = [&](int, int j) { return index < 4 && (j - 1) % (index + 1) == index; };
      const Trace trace = with_drafts(plain, serial, wrong);
      for (const int depth : {1, 2}) {
        const RunRecord record = expect_serial(trace, config, {SpeculationKind::block, depth, 4});
        const auto& rounds = record.requests[0].rounds;
        ASSERT_FALSE(rounds.empty());
        for (std::size_t i = 0; i + 2 < rounds.size(); ++i) {
          EXPECT_EQ(rounds[i].accepted, index) << "round " << i;
          EXPECT_EQ(rounds[i].emitted, index + 1);
          EXPECT_EQ(rounds[i].proposed, std::min(4, 98 - rounds[i].position)) << "98 is the last position that is forwarded";
          EXPECT_EQ(rounds[i].position, 60 + static_cast<int>(i) * (index + 1));
        }
      }
      expect_serial(trace, config, {SpeculationKind::pipeline, 1, 0});
      expect_serial(trace, config, {SpeculationKind::pipeline, 2, 0});
    }
  }
}

TEST_F(Speculating, AFlushBoundaryAtEveryOffsetOfTheBatchGivesTheBitsOfSerial) {
  // E moves to 64 at committed length 64 + tail: with another prompt length the batch crosses it at another row.
  for (int prompt = 60; prompt <= 66; ++prompt) {
    const Trace plain = trace_of({free_request(0, prompt, 24)});
    const AlgorithmConfig config = encoded("t0s1q1", EncodingPolicy::rolling, 6);
    const RunRecord serial = run(checkpoint_, plain, config);
    for (const int period : {2, 3, 5, 100}) {
      const Trace trace = with_drafts(plain, serial, [&](int, int j) { return j % period == 0; });
      const RunRecord record = expect_serial(trace, config, {SpeculationKind::block, 2, 5});
      expect_serial(trace, config, {SpeculationKind::pipeline, 1, 0});
      if (period == 100) {
        EXPECT_EQ(record.counters.most_doubled_bytes > 0, prompt != 64) << prompt << ": from 64 a round begins right at the boundary";
      }
    }
  }
}

TEST_F(Speculating, AForcedRunTakesForcedTokensForItsTargets) {
  const Trace trace = trace_of({request(0, 30, 12), request(1, 64, 7)});
  for (const int depth : {1, 2}) {
    expect_serial(trace, switches("t0s1q0"), {SpeculationKind::block, depth, 3});
    expect_serial(trace, switches("t0s1q0"), {SpeculationKind::pipeline, depth, 0});
  }
  const Trace all_right = with_drafts(trace, run(checkpoint_, trace, switches("t0s0q0")), [](int, int) { return false; });
  const RunRecord record = expect_serial(all_right, switches("t0s0q0"), kBlock);
  ASSERT_EQ(record.requests[0].rounds.size(), 3u) << "12 rows of 5 in a round";
  EXPECT_EQ(record.requests[0].rounds.back(), (SpeculationRound{40, 1, 1, 2})) << "rows beyond the last do not exist";
}

TEST_F(Speculating, TheEndOfTheSequenceCutsARound) {
  const AlgorithmConfig config = encoded("t0s1q1", EncodingPolicy::rolling, 5);
  const Trace endless = trace_of({free_request(0, 60, 20)});
  const auto tokens = run(checkpoint_, endless, config).requests[0].tokens;
  for (std::size_t at = 1; at < tokens.size(); ++at) {
    Trace trace = trace_of({free_request(0, 60, 20, tokens[at])});
    const RunRecord serial = run(checkpoint_, trace, config);
    trace = with_drafts(trace, run(checkpoint_, endless, config), [](int, int) { return false; });
    const RunRecord record = expect_serial(trace, config, kBlock);
    const auto& rounds = record.requests[0].rounds;
    ASSERT_EQ(rounds.empty(), tokens[0] == tokens[at]) << "the prompt's own token may be the end";
    int emitted = 0;
    for (const SpeculationRound& round : rounds) {
      EXPECT_TRUE(round.emitted == round.accepted + 1 || (&round == &rounds.back() && round.emitted == round.accepted));
      emitted += round.emitted;
    }
    EXPECT_EQ(emitted, record.requests[0].fed);
    Plan late = speculative_plan(trace, EffectiveConfig::resolve(config, checkpoint_.config), kBlock);
    late.submissions_in_flight = 8;
    EXPECT_EQ(differing_groups(serial.requests[0], run(checkpoint_, trace, config, {}, &late).requests[0]), kNone);
    expect_serial(trace, config, {SpeculationKind::pipeline, 1, 0});
    expect_serial(trace, config, {SpeculationKind::pipeline, 2, 0});
    EXPECT_EQ(serial.requests[0].tokens.back(), tokens[at]);
  }
}

TEST_F(Speculating, RoundsReadLateAndPreemptedGiveTheBitsOfSerial) {
  const Trace trace = trace_of({free_request(0, 40, 14), free_request(1, 9, 11)});
  const AlgorithmConfig requested = encoded("t0s1q1", EncodingPolicy::rolling, 6);
  const EffectiveConfig config = EffectiveConfig::resolve(requested, checkpoint_.config);
  const RunRecord serial = run(checkpoint_, trace, requested);
  for (const Speculation& speculation : {kBlock, Speculation{SpeculationKind::pipeline, 1, 0}}) {
    const Plan plain = speculative_plan(trace, config, speculation);
    Plan late = plain;
    late.submissions_in_flight = 6;
    const RunRecord read_late = run(checkpoint_, trace, requested, {}, &late);
    Plan moved = plain;
    const std::size_t step = speculation.kind == SpeculationKind::block ? 2 : 4;
    for (std::size_t i = 2 + step; i < moved.submissions.size(); i += 3 * step) {
      const int request = moved.submissions[i].items[0].request;
      if (moved.submissions[i - 1].items[0].request != request) continue;
      moved.submissions[i].actions = {{ActionKind::preempt, request}, {ActionKind::resume, request}};
    }
    const RunRecord preempted = run(checkpoint_, trace, requested, {}, &moved);
    EXPECT_GT(preempted.counters.preemptions, 0);
    for (std::size_t i = 0; i < 2; ++i) {
      EXPECT_EQ(differing_groups(serial.requests[i], read_late.requests[i]), kNone);
      EXPECT_EQ(differing_groups(serial.requests[i], preempted.requests[i]), kNone);
    }
    EXPECT_EQ(describe(preempted.held_at_drain) + describe(read_late.held_at_drain), "");
  }
}

TEST_F(Speculating, AFailedSubmissionIsUndoneByARewind) {
  const Trace trace = trace_of({free_request(0, 40, 8)});
  const AlgorithmConfig requested = encoded("t1s1q1", EncodingPolicy::rolling, 6);
  const EffectiveConfig config = EffectiveConfig::resolve(requested, checkpoint_.config);
  const RunRecord serial = run(checkpoint_, trace, requested);
  for (const Speculation& speculation : {kBlock, Speculation{SpeculationKind::block, 1, 3}, Speculation{SpeculationKind::pipeline, 2, 0}}) {
    const Plan plain = speculative_plan(trace, config, speculation);
    for (std::size_t at = 1; at < 8; ++at) {
      Plan plan = plain;
      Submission failing = plan.submissions[at];
      failing.failure = PlannedFailure::launch;
      // The round or cycle starts over, and another one makes good for it at the end.
      plan.submissions.insert(plan.submissions.begin() + static_cast<std::ptrdiff_t>(at), failing);
      const std::size_t round = speculation.kind == SpeculationKind::block ? 2 : 2;
      const std::size_t first = at - (at - 1) % round;
      std::vector<Submission> again(plain.submissions.begin() + static_cast<std::ptrdiff_t>(first),
                                    plain.submissions.begin() + static_cast<std::ptrdiff_t>(at));
      again.insert(again.begin(), Submission{{}, {{ActionKind::rewind, 0}}});
      plan.submissions.insert(plan.submissions.begin() + static_cast<std::ptrdiff_t>(at) + 1, again.begin(), again.end());
      if (speculation.kind == SpeculationKind::pipeline) {  // the cycles before the failure may count for nothing
        const std::size_t cycles = plain.submissions.size() - 4;
        plan.submissions.insert(plan.submissions.end(), plain.submissions.begin() + static_cast<std::ptrdiff_t>(cycles),
                                plain.submissions.end());
      }
      const RunRecord record = run(checkpoint_, trace, requested, {}, &plan);
      EXPECT_EQ(record.counters.failures, 1) << at;
      EXPECT_EQ(differing_groups(serial.requests[0], record.requests[0]), kNone) << at;
      EXPECT_EQ(describe(record.held_at_drain), "");
    }
  }
}

TEST_F(Speculating, ACancellationInTheMiddleOfARoundFreesEverything) {
  const Trace trace = trace_of({free_request(0, 40, 14)});
  const AlgorithmConfig requested = switches("t0s1q0");
  const EffectiveConfig config = EffectiveConfig::resolve(requested, checkpoint_.config);
  const RunRecord serial = run(checkpoint_, trace, requested);
  Plan plan = speculative_plan(trace, config, kBlock);
  plan.submissions.resize(4);  // prompt, a round, a draft
  plan.submissions.push_back({{}, {{ActionKind::cancel, 0}}});
  const RunRecord record = run(checkpoint_, trace, requested, {}, &plan);
  const RequestRecord& cut = record.requests[0];
  EXPECT_EQ(cut.outcome, RequestOutcome::cancelled);
  ASSERT_EQ(cut.rounds.size(), 1u);
  EXPECT_EQ(cut.fed, cut.rounds[0].emitted);
  EXPECT_TRUE(std::equal(cut.tokens.begin(), cut.tokens.end(), serial.requests[0].tokens.begin()));
  EXPECT_EQ(describe(record.held_at_drain), "");
}

// --------------------------------------------------------------------------------------------------------- execution_dependent

TEST_F(Speculating, WithoutFlushesInDecodeTheTimingMakesNoDifference) {
  const Trace trace = trace_of({free_request(0, 70, 20)});
  expect_serial(trace, encoded("t0s1q1", EncodingPolicy::rolling, 64, EncodingTiming::execution_dependent), kBlock);
  expect_serial(trace, encoded("t0s1q1", EncodingPolicy::rolling, 64, EncodingTiming::execution_dependent, FlushRule::eager), kBlock);
}

TEST_F(Speculating, EagerFlushKeepsTheParametersOfRejectedKeys) {
  // Tail 0: the block [0, 64) is sealed when a verification has run up to position 63 and beyond, candidates included.
  const Trace plain = trace_of({free_request(0, 60, 24)});
  const auto config = [](FlushRule flush) {
    return encoded("t0s0q1", EncodingPolicy::rolling, 0, EncodingTiming::execution_dependent, flush);
  };
  const RunRecord serial = run(checkpoint_, plain, config(FlushRule::committed));
  // The first round runs rows 60..64, accepts one candidate and rejects those at 62 and after it.
  const Trace trace = with_drafts(plain, serial, [](int, int j) { return j == 2; });
  const RunRecord committed = speculate(trace, config(FlushRule::committed), kBlock);
  const RunRecord eager = speculate(trace, config(FlushRule::eager), kBlock);
  EXPECT_EQ(committed.counters.rewritten_rows, 0);
  EXPECT_EQ(eager.counters.rewritten_rows, 2) << "positions 62 and 63";
  ASSERT_FALSE(committed.requests[0].blocks.empty());
  ASSERT_FALSE(eager.requests[0].blocks.empty());
  const CodecBlock &kept = eager.requests[0].blocks[0], &clean = committed.requests[0].blocks[0];
  EXPECT_EQ(kept.positions, clean.positions);
  EXPECT_NE(kept.streams[0].layers[0].k_min.data, clean.streams[0].layers[0].k_min.data) << "a rejected key has left its mark";
  // Rows of V have groups of their own.
  const auto v_of = [](const CodecBlock& block, int row) {
    const auto all = block.streams[0].layers[0].v_codes.row(0);
    return std::vector<std::uint8_t>(all.begin() + row * 16, all.begin() + (row + 1) * 16);
  };
  for (const int row : {0, 30, 61}) EXPECT_EQ(v_of(kept, row), v_of(clean, row));
  for (const CodecStream& stream : kept.streams) {
    for (const std::uint8_t code : stream.layers[0].k_codes.data) EXPECT_LE(code, 15);
  }
  // What readers get is what is stored.
  for (const int position : {10, 62, 63}) {
    const auto row = kv_row(eager.requests[0], true, 0, 1, 0, position);
    for (int c = 0; c < 16; ++c) {
      const CodecLayer& layer = kept.streams[0].layers[0];
      const float decoded = static_cast<float>(layer.k_codes.row(0)[static_cast<std::size_t>(position * 16 + c)]) *
                                layer.k_scale.row(0)[static_cast<std::size_t>(c)] +
                            layer.k_min.row(0)[static_cast<std::size_t>(c)];
      EXPECT_EQ(row[static_cast<std::size_t>(c)], decoded);
    }
  }
}

// --------------------------------------------------------------------------------------------------------------------- faults

TEST_F(Speculating, EveryPlantedFaultActsInItsModes) {
  // Rejections, and a block that a round crosses while it is rejected.
  const Trace plain = trace_of({free_request(0, 60, 30)});
  const AlgorithmConfig config = encoded("t1s1q1", EncodingPolicy::rolling, 5);
  const RunRecord serial = run(checkpoint_, plain, config);
  const Trace trace = with_drafts(plain, serial, [](int, int j) { return j % 3 == 2; });
  int faults = 0;
  for (const FaultInfo& info : planted_faults()) {
    if (!info.in_reference || (info.mode != "speculation" && info.mode != "block_spec")) continue;
    ++faults;
    for (const int depth : {1, 2}) {
      const RunRecord block = speculate(trace, config, {SpeculationKind::block, depth, 4}, with_fault(info.fault));
      EXPECT_NE(differing_groups(serial.requests[0], block.requests[0]), kNone) << info.name << ", block, d" << depth;
      if (info.mode != "speculation") continue;
      const RunRecord pipeline = speculate(trace, config, {SpeculationKind::pipeline, 1, 0}, with_fault(info.fault));
      EXPECT_NE(differing_groups(serial.requests[0], pipeline.requests[0]), kNone) << info.name << ", pipeline";
    }
  }
  EXPECT_EQ(faults, 5);
}

// ------------------------------------------------------------------------------------------------------------------- sampling

TEST_F(Speculating, ASeedReplaysAndRowsPastTheCutLeaveNoTrace) {
  Trace trace = trace_of({free_request(0, 30, 20), free_request(1, 30, 20)});
  for (TraceRequest& r : trace.requests) r.temperature = 1.0f, r.seed = 7;
  trace.requests[1].prompt = trace.requests[0].prompt;
  const RunRecord serial = run(checkpoint_, trace, switches("t0s0q0"));
  EXPECT_NE(serial.requests[0].tokens, serial.requests[1].tokens) << "the request's id is a part of the counter";
  const RunRecord again = run(checkpoint_, trace, switches("t0s0q0"));
  EXPECT_EQ(serial.requests[0].tokens, again.requests[0].tokens);
  for (const Speculation& speculation : {kBlock, Speculation{SpeculationKind::pipeline, 1, 0}}) {
    const RunRecord first = speculate(trace, switches("t0s0q0"), speculation), second = speculate(trace, switches("t0s0q0"), speculation);
    EXPECT_EQ(first.requests[0].tokens, second.requests[0].tokens);
    // What was committed is what serial execution computes for these tokens.
    Trace forced = trace;
    for (std::size_t i = 0; i < 2; ++i) {
      forced.requests[i].forced = first.requests[i].tokens;
      const RunRecord check = run(checkpoint_, forced, switches("t0s0q0"));
      EXPECT_TRUE(
          std::equal(first.requests[i].logits.data.begin(), first.requests[i].logits.data.end(), check.requests[i].logits.data.begin()));
    }
  }
}

}  // namespace
}  // namespace loopgauge::test
