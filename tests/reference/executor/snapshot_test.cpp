// SPDX-License-Identifier: Apache-2.0
// Preemption at every boundary, and snapshots that do not fit (S-ACT-3, S-ACT-4, S-PRE-1, S-INV-11).
#include "reference/run/snapshot.hpp"

#include <gtest/gtest.h>

#include "models/error.hpp"
#include "reference/run/observation.hpp"
#include "reference/run/request_life.hpp"
#include "tests/reference/executor/modes.hpp"

namespace loopgauge::test {
namespace {

using reference::Declared;

// Every item of the serial plan cut into single loops, so that there is a boundary between any two.
Plan loop_by_loop(const Trace& trace, const EffectiveConfig& config) {
  Plan plan{"split", {}};
  for (const Submission& s : serial_plan(trace, config).submissions) {
    for (int loop = 1; loop <= config.loops(); ++loop) {
      WorkItem item = s.items.front();
      item.loop_first = item.loop_last = loop;
      plan.submissions.push_back({{item}});
    }
  }
  return plan;
}

class Preemption : public testing::TestWithParam<AlgorithmConfig> {};

TEST_P(Preemption, AtEveryBoundaryContinuesBitForBit) {
  const Checkpoint checkpoint = tiny_checkpoint();
  const EffectiveConfig config = EffectiveConfig::resolve(GetParam(), checkpoint.config);
  const Trace trace = trace_of({request(0, 70, 2), free_request(1, 30, 3)});
  const RunRecord serial = run(checkpoint, trace, GetParam());
  const Plan undisturbed = loop_by_loop(trace, config);
  for (std::size_t at = 1; at < undisturbed.submissions.size(); ++at) {
    const int who = undisturbed.submissions[at - 1].items.front().request;
    Plan plan = undisturbed;
    plan.mode = "split+preempt";
    Submission& next = plan.submissions[at];
    next.actions = {{ActionKind::preempt, who}, {ActionKind::resume, who}, {ActionKind::preempt, who}, {ActionKind::resume, who}};
    const RunRecord other = run(checkpoint, trace, GetParam(), {}, &plan);
    expect_same_requests(serial, other, "preempted before submission " + std::to_string(at));
    expect_accounts(other, "preempted");
    const bool ended = at + 1 > 4u * (2 + 2) && who == 0;  // its last result has been read
    EXPECT_EQ(other.counters.preemptions, ended ? 0 : 2) << at;
    EXPECT_EQ(other.counters.snapshot_bytes > 0, !ended);
  }
}

INSTANTIATE_TEST_SUITE_P(All, Preemption, testing::ValuesIn(sixteen_settings()),
                         [](const auto& setting) { return setting_name(setting.param); });

// A request between its loops 2 and 3, which holds everything that a snapshot covers.
class Snapshot : public testing::Test {
 protected:
  using Context = reference::RunContext<Declared>;
  using State = reference::RequestState<Declared>;

  Snapshot()
      : weights_(checkpoint_), trace_(trace_of({request(0, 70, 2)})), config_(EffectiveConfig::resolve(setting(), checkpoint_.config)) {
    options_.record = RecordGroups::all();
    context_ = context(config_, checkpoint_.sha256);
    state_ = state(*context_);
    reference::begin_request(*context_, state_);
    for (int loop = 1; loop <= 4; ++loop) reference::advance(*context_, state_, {0, RowKind::prefill, 0, 70, loop, loop});
    reference::advance(*context_, state_, {0, RowKind::decode, 70, 71, 1, 2});
    reference::preempt(*context_, state_);
  }

  static AlgorithmConfig setting() {
    AlgorithmConfig config = switches("t1s1q1");
    config.kv_residual_quantization.policy = EncodingPolicy::streaming;
    return config;
  }
  std::unique_ptr<Context> context(const EffectiveConfig& config, const std::string& model_sha256) const {
    return std::unique_ptr<Context>(new Context{.model = checkpoint_.config,
                                                .model_sha256 = model_sha256,
                                                .weights = weights_,
                                                .trace = trace_,
                                                .config = config,
                                                .options = options_,
                                                .rope_table = reference::RopeTable<Declared>(80, 16, 10000.0),
                                                .scale = reference::attention_scale<Declared>(16),
                                                .references = reference::AttentionReferencePool<float>(4, 16),
                                                .prefixes = {},
                                                .ticket = {},
                                                .counters = {},
                                                .pooled_selection = {}});
  }
  State state(const Context& context) const {
    State s;
    s.request = &trace_.requests[0];
    s.prompt_length = 70;
    s.capacity = 72;
    reference::open_record(context, s);
    return s;
  }

  // The refusal of these bytes, which must come before anything is allocated.
  std::string refusal(std::vector<std::byte> bytes, Context& context) const {
    State s = state(context);
    s.generation = 0;
    s.phase = State::Phase::preempted;
    s.snapshot = std::move(bytes);
    try {
      reference::restore(context, s);
    } catch (const FileError& error) {
      EXPECT_EQ(s.held, nullptr);
      EXPECT_EQ(context.references.in_use(), 0);
      return error.what();
    }
    return "";
  }
  std::string refusal(std::vector<std::byte> bytes) { return refusal(std::move(bytes), *context_); }

  static void expect_part(const std::string& text, const std::string& part) {
    EXPECT_NE(text.find(part), std::string::npos) << '"' << text << '"';
  }

  const Checkpoint checkpoint_ = tiny_checkpoint();
  const reference::Weights<float> weights_;
  const Trace trace_;
  const EffectiveConfig config_;
  RunOptions options_;
  std::unique_ptr<Context> context_;
  State state_;
};

TEST_F(Snapshot, MovesEverythingThatIsHeld) {
  EXPECT_EQ(state_.held, nullptr);
  EXPECT_EQ(context_->references.in_use(), 0);
  EXPECT_EQ(context_->counters.snapshot_bytes, static_cast<std::int64_t>(state_.snapshot.size()));
  const auto bytes = state_.snapshot;
  reference::restore(*context_, state_);
  EXPECT_EQ(context_->references.in_use(), 1);
  EXPECT_TRUE(state_.snapshot.empty());
  EXPECT_EQ(state_.held->row.completed_loops, 2);
  EXPECT_EQ(state_.held->blocks.size(), 1u);
  reference::preempt(*context_, state_);
  EXPECT_EQ(state_.snapshot, bytes) << "a snapshot of what was restored is the same bytes";
}

// The reference of another incarnation, or of a request that bore the id before, is never read (S-SDA-10).
TEST_F(Snapshot, AStaleReferenceIsRefused) {
  reference::restore(*context_, state_);
  auto& slot = context_->references.at(state_.held->row.reference);
  const WorkItem next{0, RowKind::decode, 70, 71, 3, 3};
  ++slot.incarnation;
  EXPECT_THROW(reference::advance(*context_, state_, next), InternalError);
  --slot.incarnation, ++slot.generation;
  EXPECT_THROW(reference::advance(*context_, state_, next), InternalError);
  --slot.generation;
  slot.state = reference::AttentionReference<float>::State::source_ready;
  EXPECT_THROW(reference::advance(*context_, state_, next), InternalError);
  slot.state = reference::AttentionReference<float>::State::reusable;
  EXPECT_NO_THROW(reference::advance(*context_, state_, next));
}

TEST_F(Snapshot, ThatFitsIsRestored) { EXPECT_EQ(refusal(state_.snapshot), ""); }

TEST_F(Snapshot, OfAnotherModelConfigurationProfileOrRequestIsRefused) {
  const std::string other = "another";
  const auto other_model = context(config_, other);
  expect_part(refusal(state_.snapshot, *other_model), "model is " + checkpoint_.sha256 + ", here it is another");
  AlgorithmConfig fewer_keys = setting();
  fewer_keys.sparse_decode_attention.key_fraction_bp = 500;
  const auto other_config = context(EffectiveConfig::resolve(fewer_keys, checkpoint_.config), checkpoint_.sha256);
  expect_part(refusal(state_.snapshot, *other_config), "configuration is {");
  const reference::SnapshotIdentity identity = reference::snapshot_identity(*context_, state_);
  auto foreign = identity;
  foreign.request = "1 of trace tiny, id 1, generation 1";
  expect_part(refusal(reference::seal_snapshot(foreign, {})), "request is 1 of trace tiny");
  foreign = identity;
  foreign.profile = "double";
  expect_part(refusal(reference::seal_snapshot(foreign, {})), "profile is double");
}

TEST_F(Snapshot, OfAnotherKindOrVersionIsRefused) {
  auto bytes = state_.snapshot;
  bytes[0] = std::byte{'X'};
  expect_part(refusal(bytes), "magic");
  bytes = state_.snapshot;
  bytes[8] = std::byte{9};
  expect_part(refusal(bytes), "version 9 is not the version 2");
}

// Cut anywhere, or with a bit turned anywhere: refused, and never read beyond its end.
TEST_F(Snapshot, CutShortIsRefused) {
  const auto& whole = state_.snapshot;
  for (std::size_t size = 0; size < whole.size(); size += size < 1000 ? 1 : 997) {
    const std::string text = refusal({whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(size)});
    ASSERT_NE(text.find("length"), std::string::npos) << size << ": " << text;
  }
  auto longer = whole;
  longer.push_back(std::byte{0});
  expect_part(refusal(longer), "length");
}

TEST_F(Snapshot, WithAnyBitTurnedIsRefused) {
  const auto& whole = state_.snapshot;
  for (std::size_t at = 0; at < whole.size(); at += at < 600 || at + 80 > whole.size() ? 1 : 9973) {
    auto bytes = whole;
    bytes[at] ^= std::byte{static_cast<unsigned char>(1u << (at % 8))};
    ASSERT_NE(refusal(bytes), "") << "byte " << at;
  }
  auto payload = whole;
  payload[whole.size() / 2] ^= std::byte{1};
  expect_part(refusal(payload), "checksum");
}

}  // namespace
}  // namespace loopgauge::test
