// SPDX-License-Identifier: Apache-2.0
// Token-sparse prefill in whole runs (S-TSEL-1..9, S-EX-3, S-INV-5, S-INV-8..10).
#include <gtest/gtest.h>

#include "models/error.hpp"
#include "reference/ops/token_selection.hpp"
#include "tests/reference/executor/attention_rows.hpp"

namespace loopgauge::test {
namespace {

bool is_active(const RequestRecord& r, int loop, int position) {
  const auto& active = r.active[static_cast<std::size_t>(loop - 3)];
  return std::binary_search(active.begin(), active.end(), position);
}

class SparsePrefill : public testing::Test {
 protected:
  const Checkpoint checkpoint_ = tiny_checkpoint();
};

TEST_F(SparsePrefill, BudgetsHoldPerWindowAndSetsAreNested) {
  for (const int prompt : {1, 2, 40, 41, 63, 64, 65, 127, 128, 129, 191, 192}) {
    const RunRecord record = run(checkpoint_, trace_of({request(0, prompt, 0)}), switches("t1s0q0"));
    const RequestRecord& r = record.requests[0];
    for (int w = 0; w < window_count(prompt, 64); ++w) {
      const PositionRange range = window_range(w, prompt, 64);
      int count[2] = {0, 0};
      for (int p = range.begin; p < range.end; ++p) {
        count[0] += is_active(r, 3, p);
        count[1] += is_active(r, 4, p);
        EXPECT_TRUE(!is_active(r, 4, p) || is_active(r, 3, p)) << "loop 4 is not nested at " << p;
      }
      EXPECT_EQ(count[0], budget(2500, range.size())) << prompt << " window " << w;
      EXPECT_EQ(count[1], budget(1000, range.size())) << prompt << " window " << w;
    }
    EXPECT_TRUE(std::is_sorted(r.active[0].begin(), r.active[0].end()));
  }
}

TEST_F(SparsePrefill, ScoresComeFromTheTwoPrecedingLoopsAndDecide) {
  const int prompt = 150;
  const RunRecord record = run(checkpoint_, trace_of({request(0, prompt, 0)}), switches("t1s0q0"));
  const RequestRecord& r = record.requests[0];
  int nonzero = 0;
  for (int loop = 3; loop <= 4; ++loop) {
    const auto& scores = r.scores[static_cast<std::size_t>(loop - 3)];
    ASSERT_EQ(scores.size(), 150u);
    for (int w = 0; w < 3; ++w) {
      const PositionRange range = window_range(w, prompt, 64);
      std::vector<int> eligible;
      for (int p = range.begin; p < range.end; ++p) {
        const bool scored = loop == 3 || is_active(r, 3, p);
        ASSERT_EQ(std::isnan(scores[static_cast<std::size_t>(p)]), !scored) << p;
        if (!scored) continue;
        eligible.push_back(p);
        const auto now = r.hidden[static_cast<std::size_t>(loop - 2)].row(p), before = r.hidden[static_cast<std::size_t>(loop - 3)].row(p);
        EXPECT_EQ(scores[static_cast<std::size_t>(p)], reference::update_score<reference::Declared>(now.data(), before.data(), 48))
            << loop << ' ' << p;
        nonzero += scores[static_cast<std::size_t>(p)] != 0;
      }
      const auto expected = reference::select_tokens(std::span<const int>(eligible), budget(loop == 3 ? 2500 : 1000, range.size()),
                                                     [&](int p) { return scores[static_cast<std::size_t>(p)]; });
      for (int p = range.begin; p < range.end; ++p) {
        EXPECT_EQ(is_active(r, loop, p), std::binary_search(expected.begin(), expected.end(), p)) << loop << ' ' << p;
      }
    }
  }
  EXPECT_EQ(nonzero, 150 + static_cast<int>(r.active[0].size())) << "an aliased buffer scores zero";
}

// S-TSEL-10: budgets and loop-3 scores stay; of the window that holds P-1 one row gives way to it, the other windows are as before.
TEST_F(SparsePrefill, TheFinalPromptPositionCanBeReserved) {
  const int prompt = 150;
  const Trace trace = trace_of({request(0, prompt, 3)});
  AlgorithmConfig config = switches("t1s0q0");
  const RequestRecord plain = run(checkpoint_, trace, config).requests[0];
  config.token_sparse_prefill.reserve = SlotReservation::final_prompt_token;
  const RequestRecord reserved = run(checkpoint_, trace, config).requests[0];
  ASSERT_FALSE(is_active(plain, 3, prompt - 1)) << "the test needs a prompt whose last position is not selected by its score";
  for (int loop = 3; loop <= 4; ++loop) {
    EXPECT_TRUE(is_active(reserved, loop, prompt - 1)) << loop;
    EXPECT_EQ(reserved.active[static_cast<std::size_t>(loop - 3)].size(), plain.active[static_cast<std::size_t>(loop - 3)].size());
    for (int p = 0; p < 128; ++p) EXPECT_EQ(is_active(reserved, loop, p), is_active(plain, loop, p)) << loop << ' ' << p;
  }
  EXPECT_EQ(reserved.scores[0], plain.scores[0]);
  int given_way = 0;
  for (int p = 128; p < prompt; ++p) given_way += is_active(plain, 3, p) && !is_active(reserved, 3, p);
  EXPECT_EQ(given_way, 1);
  EXPECT_FALSE(same_hidden(reserved, 4, 3, prompt - 1));
  EXPECT_TRUE(same_hidden(plain, 4, 2, prompt - 1));
}

// The upstream fault: with zero loop-4 scores the earliest active positions win, whatever changed most.
TEST_F(SparsePrefill, LoopFourFollowsScoresNotPositions) {
  const Trace trace = trace_of({request(0, 256, 0)});
  const RequestRecord honest = run(checkpoint_, trace, switches("t1s0q0")).requests[0];
  const RequestRecord aliased = run(checkpoint_, trace, switches("t1s0q0"), with_fault(Fault::aliased_hidden_rows)).requests[0];
  EXPECT_EQ(honest.active[0], aliased.active[0]);
  EXPECT_NE(honest.active[1], aliased.active[1]);
}

TEST_F(SparsePrefill, InactiveRowsKeepHiddenAndKvOfThePredecessorLoop) {
  const RequestRecord r = run(checkpoint_, trace_of({request(0, 130, 0)}), switches("t1s0q0")).requests[0];
  for (int p = 0; p < 130; ++p) {
    for (int loop = 3; loop <= 4; ++loop) {
      EXPECT_EQ(same_hidden(r, loop, loop - 1, p), !is_active(r, loop, p)) << loop << ' ' << p;
      EXPECT_EQ(same_kv(r, loop, loop - 1, p), !is_active(r, loop, p)) << loop << ' ' << p;
    }
    EXPECT_FALSE(same_hidden(r, 2, 1, p));
  }
}

// Worked example S-EX-3, by forced decisions.
TEST_F(SparsePrefill, WorkedExampleOfEightTokens) {
  const Trace trace = trace_of({request(0, 8, 0)});
  AlgorithmConfig config = switches("t1s0q0");
  config.token_sparse_prefill.retention_bp = {10000, 10000, 5000, 2500};
  RunRecord decisions;
  decisions.requests.resize(1);
  decisions.requests[0].active = {std::vector<std::int32_t>{1, 3, 5, 7}, std::vector<std::int32_t>{3, 7}};
  Recorder taps;
  const RequestRecord r = run(checkpoint_, trace, config, with_decisions(taps, decisions)).requests[0];
  EXPECT_EQ(r.active[0], (std::vector<std::int32_t>{1, 3, 5, 7}));
  for (int p = 0; p < 8; ++p) {
    EXPECT_EQ(same_kv(r, 3, 2, p), p % 2 == 0) << "the plane of loop 3 is [KV2, KV3, KV2, KV3, ...]: position " << p;
    EXPECT_EQ(taps.has("rope.q", p, 3, 0), p % 2 == 1);
    EXPECT_EQ(taps.has("rope.q", p, 4, 0), p == 3 || p == 7);
  }
  for (int layer = 0; layer < 2; ++layer) {
    for (int head = 0; head < kHeads; ++head) {
      const auto visible = dense_output(taps, 3, 3, layer, head, recorded_plane(r, layer, 3, head, 4), 4);
      EXPECT_EQ(tapped_output(taps, 3, 3, layer, head), visible) << "position 3 sees positions 0..3";
      EXPECT_NE(tapped_output(taps, 3, 3, layer, head), dense_output(taps, 3, 3, layer, head, recorded_plane(r, layer, 3, head, 2), 2));
      EXPECT_NE(tapped_output(taps, 3, 3, layer, head), dense_output(taps, 3, 3, layer, head, recorded_plane(r, layer, 3, head, 5), 5));
      EXPECT_NE(tapped_output(taps, 3, 3, layer, head), dense_output(taps, 3, 3, layer, head, recorded_plane(r, layer, 2, head, 4), 4));
    }
  }
}

// Forced decisions index rows while threads share out the work, so what does not fit is refused before anything runs.
TEST_F(SparsePrefill, ForcedDecisionsThatDoNotFitAreRefused) {
  const Trace trace = trace_of({request(0, 8, 0)});
  Recorder taps;
  RunRecord decisions;
  EXPECT_THROW(run(checkpoint_, trace, switches("t1s0q0"), with_decisions(taps, decisions)), ConfigError) << "no request";
  decisions.requests.resize(1);
  EXPECT_THROW(run(checkpoint_, trace, switches("t1s0q0"), with_decisions(taps, decisions)), ConfigError) << "no active set";
  decisions.requests[0].active = {std::vector<std::int32_t>{1, 8}, std::vector<std::int32_t>{1}};
  EXPECT_THROW(run(checkpoint_, trace, switches("t1s0q0"), with_decisions(taps, decisions)), ConfigError) << "beyond the prompt";
  decisions.requests[0].active[0] = {3, 1};
  EXPECT_THROW(run(checkpoint_, trace, switches("t1s0q0"), with_decisions(taps, decisions)), ConfigError) << "not ascending";
  decisions.requests[0].active[0] = {1, 3};
  EXPECT_NO_THROW(run(checkpoint_, trace, switches("t1s0q0"), with_decisions(taps, decisions)));

  const Trace decoding = trace_of({request(0, 8, 2)});
  decisions.requests[0].keys.resize(1);
  decisions.requests[0].keys[0].layers.assign(2, Tensor<std::int32_t>({kHeads, 4}));
  EXPECT_THROW(run(checkpoint_, decoding, switches("t0s1q0"), with_decisions(taps, decisions)), ConfigError) << "one key of nine is due";
  decisions.requests[0].keys[0].layers.assign(2, Tensor<std::int32_t>({kHeads, 1}, 9));
  EXPECT_THROW(run(checkpoint_, decoding, switches("t0s1q0"), with_decisions(taps, decisions)), ConfigError) << "a key of the future";
}

TEST_F(SparsePrefill, EveryActiveRowReadsEveryCausalPositionOfItsLogicalPlane) {
  Recorder taps;
  const int prompt = 140;
  const RequestRecord r = run(checkpoint_, trace_of({request(0, prompt, 0)}), switches("t1s0q0"), with_tap(taps)).requests[0];
  int rows = 0;
  for (int loop = 1; loop <= 4; ++loop) {
    for (int layer = 0; layer < 2; ++layer) {
      for (int head = 0; head < kHeads; ++head) {
        const HeadPlane plane = recorded_plane(r, layer, loop, head, prompt);
        for (int p = 0; p < prompt; ++p) {
          const bool executes = loop <= 2 || is_active(r, loop, p);
          ASSERT_EQ(taps.has("attention.output", p, loop, layer), executes) << "an inherited row emits nothing";
          if (!executes) continue;
          ASSERT_EQ(tapped_output(taps, p, loop, layer, head), dense_output(taps, p, loop, layer, head, plane, p + 1)) << loop << ' ' << p;
          ++rows;
        }
      }
    }
  }
  EXPECT_EQ(rows, 4 * (2 * prompt + static_cast<int>(r.active[0].size() + r.active[1].size())));
}

TEST_F(SparsePrefill, RetentionOfTenThousandIsTheDensePath) {
  const Trace trace = trace_of({request(0, 100, 3)});
  AlgorithmConfig all = switches("t1s0q0");
  all.token_sparse_prefill.retention_bp = {10000, 10000, 10000, 10000};
  const RequestRecord dense = run(checkpoint_, trace, switches("t0s0q0")).requests[0], kept = run(checkpoint_, trace, all).requests[0];
  EXPECT_EQ(differing_groups(dense, kept), kNone);
  EXPECT_TRUE(kept.active[0].empty() && kept.scores[0].empty()) << "no selection work";
}

TEST_F(SparsePrefill, LoopThreeAtTenThousandIsScoredAndFullyActive) {
  AlgorithmConfig config = switches("t1s0q0");
  config.token_sparse_prefill.retention_bp = {10000, 10000, 10000, 1000};
  const RequestRecord r = run(checkpoint_, trace_of({request(0, 70, 0)}), config).requests[0];
  EXPECT_EQ(r.active[0].size(), 70u);
  EXPECT_EQ(r.active[1].size(), static_cast<std::size_t>(budget(1000, 64) + budget(1000, 6)));
  for (const float score : r.scores[0]) EXPECT_TRUE(std::isfinite(score));
}

TEST_F(SparsePrefill, LoopFourNeverHasMoreRowsThanLoopThree) {
  AlgorithmConfig config = switches("t1s0q0");
  config.token_sparse_prefill.retention_bp = {10000, 10000, 2500, 2500};
  const RequestRecord r = run(checkpoint_, trace_of({request(0, 90, 0)}), config).requests[0];
  EXPECT_EQ(r.active[0], r.active[1]);
}

TEST_F(SparsePrefill, NeitherTheLastTokenNorAnyOtherHasAReservedSlot) {
  int last_prompt_token_selected = 0;
  for (int id = 0; id < 12; ++id) {
    const RequestRecord r = run(checkpoint_, trace_of({request(id, 64, 0)}), switches("t1s0q0")).requests[0];
    last_prompt_token_selected += is_active(r, 4, 63);
  }
  EXPECT_LT(last_prompt_token_selected, 12);
}

TEST_F(SparsePrefill, LogitsAfterThePromptAreThoseOfAnInheritedRowToo) {
  for (int id = 0; id < 12; ++id) {
    const RequestRecord r = run(checkpoint_, trace_of({request(id, 64, 0)}), switches("t1s0q0")).requests[0];
    if (is_active(r, 3, 63)) continue;
    EXPECT_TRUE(same_hidden(r, 4, 2, 63));
    const auto hidden = r.hidden[1].row(63);
    for (int v = 0; v < 37; ++v) {
      std::vector<float> weight;
      for (int i = 0; i < 48; ++i) weight.push_back(reference::bfloat16_to_float(checkpoint_.lm_head.row(v)[static_cast<std::size_t>(i)]));
      EXPECT_EQ(r.logits.row(0)[static_cast<std::size_t>(v)], plain_dot(hidden.data(), weight.data(), 48));
    }
    EXPECT_EQ(r.gate.row(63)[3], r.gate.row(63)[1]) << "the gate of an inherited row is that of the hidden it inherits";
    return;
  }
  FAIL() << "every one of twelve prompts had its last token active";
}

TEST_F(SparsePrefill, AWindowDependsOnItsOwnAndEarlierTokensOnly) {
  TraceRequest original = request(0, 150, 0), changed = original;
  changed.prompt[149] = (changed.prompt[149] + 1) % 37;
  const RequestRecord a = run(checkpoint_, trace_of({original}), switches("t1s0q0")).requests[0];
  const RequestRecord b = run(checkpoint_, trace_of({changed}), switches("t1s0q0")).requests[0];
  for (int p = 0; p < 128; ++p) {
    for (int loop = 1; loop <= 4; ++loop) {
      ASSERT_TRUE(same_bits(a.hidden[static_cast<std::size_t>(loop - 1)].row(p), b.hidden[static_cast<std::size_t>(loop - 1)].row(p)))
          << loop << ' ' << p;
    }
  }
  EXPECT_FALSE(same_bits(a.hidden[0].row(149), b.hidden[0].row(149)));
}

TEST_F(SparsePrefill, DenseRowsDependOnEarlierTokensOnly) {
  TraceRequest original = request(0, 100, 0), changed = original;
  changed.prompt[60] = (changed.prompt[60] + 1) % 37;
  const RequestRecord a = run(checkpoint_, trace_of({original}), switches("t0s0q0")).requests[0];
  const RequestRecord b = run(checkpoint_, trace_of({changed}), switches("t0s0q0")).requests[0];
  for (int p = 0; p < 100; ++p) EXPECT_EQ(same_bits(a.hidden[3].row(p), b.hidden[3].row(p)), p < 60) << p;
}

TEST_F(SparsePrefill, ANonFiniteScoreNamesRequestWindowLoopAndPosition) {
  Checkpoint huge = tiny_checkpoint();
  for (Bfloat16Bits& w : huge.norm.data) w = bf16_bits(0x1p100f);  // states whose squares overflow FP32
  try {
    run(huge, trace_of({request(0, 70, 0)}), switches("t1s0q0"));
    FAIL() << "accepted";
  } catch (const NumericError& error) {
    const std::string message = error.what();
    for (const char* part : {"request 0", "window 0", "loop 3", "position 0"}) EXPECT_NE(message.find(part), std::string::npos) << message;
  }
}

}  // namespace
}  // namespace loopgauge::test
