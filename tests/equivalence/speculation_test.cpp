// SPDX-License-Identifier: Apache-2.0
// Block speculation of the CUDA executor: what is committed has the bits of its own serial run, whatever was drafted.
#include "models/error.hpp"
#include "tests/equivalence/executor_fixture.hpp"

namespace loopgauge::test {
namespace {

class SpeculationTest : public ExecutorTest {
 protected:
  // Returns the BF16 bytes that were held beside their encoding.
  std::int64_t expect_serial_bits(const Trace& trace, const Setting& setting, const std::string& mode) {
    const EffectiveConfig config = config_of(setting);
    const RunRecord serial = run(*executor_, trace, config);
    const RunRecord actual = run(*executor_, trace, config, {.record = RecordGroups::all()}, mode);
    const std::string what = trace.name + ", " + mode + ", " + text(setting);
    expect_identical(serial, actual, config.window(), what);
    std::int64_t rounds = 0, decode_rows = 0;
    for (std::size_t i = 0; i < serial.requests.size(); ++i) {
      const RequestRecord& record = actual.requests[i];
      EXPECT_EQ(serial.requests[i].tokens, record.tokens) << what;
      EXPECT_EQ(serial.requests[i].executions, record.executions) << what << ", request " << i;
      for (const SpeculationRound& round : record.rounds) decode_rows += round.emitted;
      rounds += static_cast<std::int64_t>(record.rounds.size());
    }
    EXPECT_EQ(rounds, actual.counters.speculation_rounds) << what;
    EXPECT_GT(rounds, 0) << what;
    EXPECT_EQ(actual.counters.draft_rows + actual.counters.verify_rows - actual.counters.rejected_rows, kLoops * decode_rows) << what;
    EXPECT_EQ(actual.counters.executed_rows - actual.counters.rejected_rows, serial.counters.executed_rows) << what;
    EXPECT_EQ(describe(actual.held_at_drain), "") << what;
    return actual.counters.most_doubled_bytes;
  }
};

// Drafts of these traces are given: a rejection at every index, a flush at every offset, an end inside a round.
TEST_F(SpeculationTest, GivenDraftsCommitTheBitsOfTheSerialRun) {
  for (const char* name : {"spec-reject", "spec-flush", "spec-end"}) {
    const Trace trace = shipped(name);
    std::int64_t doubled_bytes = 0;
    for (const Setting& setting : kSettings) {
      for (const char* mode : {"block_spec.d1.k1", "block_spec.d1.k4", "block_spec.d2.k3", "block_spec.d2.k8"})
        doubled_bytes += expect_serial_bits(trace, setting, mode);
    }
    if (std::string(name) == "spec-flush") {
      EXPECT_GT(doubled_bytes, 0) << "no round held a block in both representations";
    }
  }
}

TEST_F(SpeculationTest, OwnDraftsCommitTheBitsOfTheSerialRun) {
  const Trace trace = shipped("greedy");
  for (const Setting& setting : kSettings) {
    for (const char* mode : {"block_spec.d1.k8", "block_spec.d2.k1", "block_spec.d2.k4"}) expect_serial_bits(trace, setting, mode);
  }
}

TEST_F(SpeculationTest, PreemptionGivesUpTheRoundAndChangesNoBit) {
  const Trace trace = shipped("spec-flush");
  for (const Setting& setting : kSettings) expect_serial_bits(trace, setting, "block_spec.d2.k4+preempt");
}

TEST_F(SpeculationTest, WhatIsNotThereIsRefused) {
  const Trace trace = shipped("spec-reject");
  const EffectiveConfig config = config_of({"t0s0q0"});
  for (const char* mode : {"pipeline_spec.d1", "block_spec.d1.k4+async", "block_spec.d2.k4+graph"}) {
    EXPECT_THROW(static_cast<void>(run(*executor_, trace, config, {.record = RecordGroups::all()}, mode)), UnsupportedError) << mode;
  }
}

}  // namespace
}  // namespace loopgauge::test
