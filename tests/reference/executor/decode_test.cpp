// SPDX-License-Identifier: Apache-2.0
// Sparse decode attention, exits and generation in whole runs (S-SDA-1..11, S-EXIT-1..5, S-GEN-1..5).
#include <gtest/gtest.h>

#include "models/error.hpp"
#include "reference/ops/head_argmax.hpp"
#include "tests/reference/executor/attention_rows.hpp"

namespace loopgauge::test {
namespace {

class Decode : public testing::Test {
 protected:
  const Checkpoint checkpoint_ = tiny_checkpoint();
};

// Loops 2, 3 and 4 of every decode row, recomputed from queries and recorded K/V: loop 4 takes S, m, C_ref and O_ref of loop 2.
TEST_F(Decode, LoopsThreeAndFourAreCorrectedByLoopTwosReference) {
  Recorder taps;
  const int prompt = 90, steps = 4;
  const RequestRecord r = run(checkpoint_, trace_of({request(0, prompt, steps)}), switches("t0s1q0"), with_tap(taps)).requests[0];
  for (int step = 0; step < steps; ++step) {
    const int p = prompt + step, n = p + 1, k = budget(1000, n);
    for (int layer = 0; layer < 2; ++layer) {
      for (int head = 0; head < kHeads; ++head) {
        const float scale = reference::attention_scale<reference::Declared>(kHeadDim);
        const HeadPlane second = recorded_plane(r, layer, 2, head, n);
        reference::HeadReference<float> ref;
        std::vector<float> logits(static_cast<std::size_t>(n)), probabilities(static_cast<std::size_t>(n));
        ref.output.resize(kHeadDim);
        reference::attention_dense<reference::Declared>(query(taps, p, 2, layer, head), second.keys(), second.values(), n, scale,
                                                        logits.data(), probabilities.data(), ref.output.data());
        ref.keys = reference::select_keys<float>(logits, k);
        reference::summarize_reference<reference::Declared>(probabilities, second.values(), ref);

        const auto recorded = r.keys[static_cast<std::size_t>(step)].layers[static_cast<std::size_t>(layer)].row(head);
        EXPECT_EQ(std::vector<int>(recorded.begin(), recorded.end()), ref.keys);
        EXPECT_EQ(r.keys[static_cast<std::size_t>(step)].mass.row(layer)[static_cast<std::size_t>(head)], ref.mass);
        EXPECT_EQ(tapped_output(taps, p, 2, layer, head), dense_output(taps, p, 2, layer, head, second, n)) << "loop 2 outputs bf16(O_ref)";
        for (int loop = 3; loop <= 4; ++loop) {
          const HeadPlane plane = recorded_plane(r, layer, loop, head, n);
          std::vector<float> o(kHeadDim);
          reference::sparse_correction<reference::Declared>(query(taps, p, loop, layer, head), plane.keys(), plane.values(), ref, scale,
                                                            o.data());
          for (float& x : o) x = reference::round_to_bfloat16(x);
          EXPECT_EQ(tapped_output(taps, p, loop, layer, head), o) << "step " << step << " loop " << loop;
        }
        EXPECT_EQ(tapped_output(taps, p, 1, layer, head), dense_output(taps, p, 1, layer, head, recorded_plane(r, layer, 1, head, n), n));
      }
    }
  }
}

TEST_F(Decode, ThePromptIsTheSameWithSparseDecodeOnAndOff) {
  const Trace trace = trace_of({request(0, 90, 2)});
  const RequestRecord dense = run(checkpoint_, trace, switches("t0s0q0")).requests[0],
                      sparse = run(checkpoint_, trace, switches("t0s1q0")).requests[0];
  for (int p = 0; p < 90; ++p) ASSERT_TRUE(same_bits(dense.hidden[3].row(p), sparse.hidden[3].row(p))) << p;
  EXPECT_TRUE(same_bits(dense.logits.row(0), sparse.logits.row(0)));
  EXPECT_TRUE(same_bits(dense.hidden[1].row(90), sparse.hidden[1].row(90))) << "loops 1 and 2 of a decode row are dense";
  EXPECT_FALSE(same_bits(dense.hidden[3].row(90), sparse.hidden[3].row(90)));
}

TEST_F(Decode, WithAllKeysTheCorrectionIsDenseUpToRounding) {
  AlgorithmConfig all = switches("t0s1q0");
  all.sparse_decode_attention.key_fraction_bp = 10000;
  const Trace trace = trace_of({request(0, 90, 3)});
  const RequestRecord dense = run(checkpoint_, trace, switches("t0s0q0")).requests[0], corrected = run(checkpoint_, trace, all).requests[0];
  ASSERT_EQ(corrected.keys[0].layers[0].extent(1), 91);
  for (const float m : corrected.keys[0].mass.data) EXPECT_NEAR(m, 1.0f, 1e-5f);
  for (std::size_t i = 0; i < dense.logits.data.size(); ++i) EXPECT_NEAR(corrected.logits.data[i], dense.logits.data[i], 0.1f);
}

TEST_F(Decode, KeyBudgetCountsTheCurrentPosition) {
  const RequestRecord r = run(checkpoint_, trace_of({request(0, 9, 3)}), switches("t0s1q0")).requests[0];
  EXPECT_EQ(r.keys[0].layers[0].extent(1), 1) << "n = 10";
  EXPECT_EQ(r.keys[1].layers[0].extent(1), 2) << "n = 11";
  const RequestRecord one = run(checkpoint_, trace_of({request(0, 1, 2)}), switches("t0s1q0")).requests[0];
  EXPECT_EQ(one.keys[0].layers[0].extent(1), 1) << "a prompt of one token";
}

TEST_F(Decode, ANonFiniteReferenceLogitNamesRequestPositionLayerAndHead) {
  Checkpoint poisoned = tiny_checkpoint();
  for (Bfloat16Bits& w : poisoned.embed_tokens.row(36)) w = 0x7fc0;  // token 36 embeds as NaN
  TraceRequest r = request(0, 20, 2);
  for (std::int32_t& token : r.prompt) token %= 36;
  r.forced = {0, 36};
  try {
    run(poisoned, trace_of({r}), switches("t0s1q0"));
    FAIL() << "accepted";
  } catch (const NumericError& error) {
    const std::string message = error.what();
    for (const char* part : {"request 0", "position 21", "layer 0", "head 0"}) EXPECT_NE(message.find(part), std::string::npos) << message;
  }
}

TEST_F(Decode, ANonFiniteHeadLogitIsRefused) {
  Checkpoint poisoned = tiny_checkpoint();
  poisoned.lm_head.row(5)[7] = 0x7f80;
  EXPECT_THROW(run(poisoned, trace_of({request(0, 10, 1)}), switches("t0s0q0")), NumericError);
}

TEST_F(Decode, ANonFiniteGateIsRefusedWhereItDecides) {
  Checkpoint poisoned = tiny_checkpoint();
  poisoned.early_exit_bias.data[0] = 0x7fc0;
  const Trace trace = trace_of({request(0, 10, 1)});
  EXPECT_NO_THROW(run(poisoned, trace, switches("t0s0q0"))) << "mode full reads no gate";
  AlgorithmConfig config = switches("t0s0q0");
  config.exit = parse_exit_rule("threshold:0.9");
  EXPECT_THROW(run(poisoned, trace, config), NumericError);
}

// ---- exits ----

TraceRequest with_depths(int prompt, const std::vector<std::uint8_t>& depths) {
  TraceRequest r = request(0, prompt, static_cast<int>(depths.size()));
  r.exit_depths = depths;
  return r;
}

TEST_F(Decode, ForcedDepthsInheritTheDeeperPlanesAndReadTheLogitsOfTheirLastLoop) {
  AlgorithmConfig config = switches("t0s0q0");
  config.exit.mode = ExitMode::trace;
  const std::vector<std::uint8_t> depths{1, 2, 3, 4, 1};
  const RequestRecord r = run(checkpoint_, trace_of({with_depths(20, depths)}), config).requests[0];
  EXPECT_EQ(r.exit_depths, depths);
  for (int j = 0; j < 5; ++j) {
    const int p = 20 + j, e = depths[static_cast<std::size_t>(j)];
    for (int loop = 2; loop <= 4; ++loop) {
      EXPECT_EQ(same_hidden(r, loop, loop - 1, p), loop > e) << p << ' ' << loop;
      EXPECT_EQ(same_kv(r, loop, loop - 1, p), loop > e) << p << ' ' << loop;
    }
    const auto hidden = r.hidden[static_cast<std::size_t>(e - 1)].row(p);
    std::vector<float> weight;
    for (int i = 0; i < 48; ++i) weight.push_back(reference::bfloat16_to_float(checkpoint_.lm_head.row(3)[static_cast<std::size_t>(i)]));
    EXPECT_EQ(r.logits.row(j + 1)[3], plain_dot(hidden.data(), weight.data(), 48));
  }
}

// LAST_EXITED: the full-depth row after an early exit reads the exited token in version min(r, e).
TEST_F(Decode, LaterRowsReadAnExitedTokenInItsLastVersion) {
  AlgorithmConfig config = switches("t0s0q0");
  config.exit.mode = ExitMode::trace;
  Recorder taps;
  const RequestRecord r = run(checkpoint_, trace_of({with_depths(20, {1, 2, 4})}), config, with_tap(taps)).requests[0];
  for (int loop = 1; loop <= 4; ++loop) {
    for (int head = 0; head < kHeads; ++head) {
      HeadPlane plane = recorded_plane(r, 1, loop, head, 23);
      for (const auto& [position, last] : {std::pair{20, 1}, {21, 2}}) {
        const auto k = kv_row(r, true, 1, std::min(loop, last), head, position),
                   v = kv_row(r, false, 1, std::min(loop, last), head, position);
        std::copy(k.begin(), k.end(), plane.k.begin() + position * kHeadDim);
        std::copy(v.begin(), v.end(), plane.v.begin() + position * kHeadDim);
      }
      EXPECT_EQ(tapped_output(taps, 22, loop, 1, head), dense_output(taps, 22, loop, 1, head, plane, 23)) << loop;
    }
  }
}

TEST_F(Decode, ExitedTokensAreAbsentFromDeeperStreams) {
  AlgorithmConfig config = switches("t0s0q1");
  config.exit.mode = ExitMode::trace;
  config.kv_residual_quantization.tail = 0;
  std::vector<std::uint8_t> depths(64, 4);
  depths[0] = 1, depths[5] = 2, depths[9] = 3;
  const RequestRecord r = run(checkpoint_, trace_of({with_depths(64, depths)}), config).requests[0];
  ASSERT_EQ(r.blocks.size(), 2u);
  const CodecBlock& block = r.blocks[1];
  EXPECT_EQ(block.positions, (PositionRange{64, 128}));
  EXPECT_EQ(block.streams[0].rows.size(), 64u);
  EXPECT_EQ(block.streams[1].rows.size(), 63u) << "stream 2 lacks the token that exited at loop 1";
  EXPECT_EQ(block.streams[2].rows.size(), 62u);
  EXPECT_EQ(block.streams[3].rows.size(), 61u);
  EXPECT_FALSE(std::binary_search(block.streams[1].rows.begin(), block.streams[1].rows.end(), 64));
  EXPECT_TRUE(same_kv(r, 4, 1, 64)) << "reconstructed values inherit too";
  EXPECT_TRUE(same_kv(r, 4, 2, 69));
  EXPECT_FALSE(same_kv(r, 2, 1, 69));
}

TEST_F(Decode, ExitsAndSparseDecodeCompose) {
  AlgorithmConfig config = switches("t1s1q1");
  config.exit.mode = ExitMode::trace;
  const RequestRecord r = run(checkpoint_, trace_of({with_depths(70, {1, 4, 2, 4, 3, 4})}), config).requests[0];
  EXPECT_TRUE(r.keys[0].layers.empty()) << "an exit before loop 2 selects nothing";
  for (const std::size_t step : {1u, 2u, 3u, 4u, 5u}) EXPECT_EQ(r.keys[step].layers.size(), 2u) << step;
}

TEST_F(Decode, ThresholdAndDelayedDifferByOneLoop) {
  Checkpoint zero = tiny_checkpoint();
  for (Bfloat16Bits& w : zero.early_exit_gate.data) w = 0;
  zero.early_exit_bias.data[0] = 0;  // every gate 0: exit probability 1/2, 3/4, 7/8
  const Trace trace = trace_of({request(0, 12, 3)});
  const auto depths = [&](const char* rule, int min_loops) {
    AlgorithmConfig config = switches("t0s0q0");
    config.exit = parse_exit_rule(rule);
    config.exit.min_loops = min_loops;
    return run(zero, trace, config).requests[0].exit_depths;
  };
  using Depths = std::vector<std::uint8_t>;
  EXPECT_EQ(depths("threshold:0.5", 1), (Depths{1, 1, 1}));
  EXPECT_EQ(depths("threshold:0.75", 1), (Depths{2, 2, 2}));
  EXPECT_EQ(depths("threshold:0.5", 3), (Depths{3, 3, 3}));
  EXPECT_EQ(depths("threshold:0.9", 1), (Depths{4, 4, 4}));
  EXPECT_EQ(depths("threshold:1", 1), (Depths{4, 4, 4}));
  EXPECT_EQ(depths("delayed:0.5", 1), (Depths{2, 2, 2}));
  EXPECT_EQ(depths("delayed:0.75", 1), (Depths{3, 3, 3}));
  EXPECT_EQ(depths("delayed:0.85", 1), (Depths{4, 4, 4}));
}

TEST_F(Decode, ForcedExitsWithoutDepthsAreRefused) {
  AlgorithmConfig config = switches("t0s0q0");
  config.exit.mode = ExitMode::trace;
  EXPECT_THROW(run(checkpoint_, trace_of({request(0, 5, 2)}), config), Error);
}

// ---- generation ----

TraceRequest free_run(int prompt, int max_new_tokens, int eos = -1) {
  TraceRequest r = request(0, prompt, 0);
  r.max_new_tokens = max_new_tokens;
  r.eos_token_id = eos;
  return r;
}

TEST_F(Decode, AFreeRunEmitsTheArgmaxAndDoesNotForwardTheLastToken) {
  const RequestRecord r = run(checkpoint_, trace_of({free_run(15, 6)}), switches("t0s0q0")).requests[0];
  ASSERT_EQ(r.tokens.size(), 6u);
  EXPECT_EQ(r.fed, 5);
  EXPECT_EQ(r.logits.extent(0), 6);
  EXPECT_EQ(r.hidden[3].extent(0), 20);
  EXPECT_EQ(r.exit_depths, (std::vector<std::uint8_t>{4, 4, 4, 4, 4, 0}));
  for (int j = 0; j < 6; ++j)
    EXPECT_EQ(r.tokens[static_cast<std::size_t>(j)], reference::argmax(std::span<const float>(r.logits.row(j)))) << j;
}

TEST_F(Decode, ForcingTheEmittedTokensGivesTheSameLogits) {
  const RequestRecord free = run(checkpoint_, trace_of({free_run(15, 6)}), switches("t1s1q1")).requests[0];
  TraceRequest forced = request(0, 15, 0);
  forced.forced.assign(free.tokens.begin(), free.tokens.end() - 1);
  forced.max_new_tokens = 5;
  EXPECT_TRUE(same_bits(run(checkpoint_, trace_of({forced}), switches("t1s1q1")).requests[0].logits.data, free.logits.data));
}

TEST_F(Decode, EndOfSequenceIsEmittedAndStopsAFreeRunOnly) {
  const RequestRecord whole = run(checkpoint_, trace_of({free_run(15, 8)}), switches("t0s0q0")).requests[0];
  const std::int32_t eos = whole.tokens[3];
  const std::size_t first = static_cast<std::size_t>(std::find(whole.tokens.begin(), whole.tokens.end(), eos) - whole.tokens.begin());
  const RequestRecord stopped = run(checkpoint_, trace_of({free_run(15, 8, eos)}), switches("t0s0q0")).requests[0];
  ASSERT_EQ(stopped.tokens.size(), first + 1);
  EXPECT_EQ(stopped.tokens.back(), eos);
  EXPECT_EQ(stopped.fed, static_cast<int>(first));
  TraceRequest forced = request(0, 15, 4);
  forced.eos_token_id = forced.forced[1];
  EXPECT_EQ(run(checkpoint_, trace_of({forced}), switches("t0s0q0")).requests[0].fed, 4);
}

TEST_F(Decode, NoNewTokensMeansOneRowOfLogits) {
  const RequestRecord r = run(checkpoint_, trace_of({free_run(15, 0)}), switches("t1s1q1")).requests[0];
  EXPECT_TRUE(r.tokens.empty() && r.exit_depths.empty());
  EXPECT_EQ(r.fed, 0);
  EXPECT_EQ(r.logits.extent(0), 1);
  EXPECT_EQ(r.encoded_frontier, (std::vector<std::int32_t>{0}));
}

}  // namespace
}  // namespace loopgauge::test
