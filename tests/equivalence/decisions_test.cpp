// SPDX-License-Identifier: Apache-2.0
// Decisions that must be exact: selected tokens, exits, the greedy token.
#include <algorithm>
#include <limits>
#include <numeric>

#include "optimized/ops/exit_gate.cuh"
#include "optimized/ops/exit_step.cuh"
#include "optimized/ops/head_argmax.cuh"
#include "optimized/ops/select_tokens.cuh"
#include "reference/ops/exit_gate.hpp"
#include "reference/ops/head_argmax.hpp"
#include "reference/ops/token_selection.hpp"
#include "tests/equivalence/device_fixture.hpp"

namespace loopgauge::test {
namespace {

using optimized::Bfloat16;
using optimized::ExitState;
using optimized::HeadChoice;
using optimized::QueryRow;
using reference::Declared;

class DecisionsTest : public DeviceTest {
 protected:
  std::vector<std::int32_t> select(const std::vector<std::int32_t>& candidates, const std::vector<float>& scores, int budget,
                                   int reserved = -1) {
    const auto c = upload(candidates), s = upload(scores);
    auto selected = poisoned<std::int32_t>(static_cast<std::size_t>(budget));
    const int count = static_cast<int>(candidates.size());
    optimized::select_tokens(c.as<std::int32_t>(), s.as<float>(), count, budget, reserved, selected.as<std::int32_t>(), *stream_);
    return download<std::int32_t>(selected, static_cast<std::size_t>(budget));
  }

  void expect_reference_selection(const std::vector<std::int32_t>& candidates, const std::vector<float>& scores, int budget) {
    const std::vector<int> positions(candidates.begin(), candidates.end());
    const auto expected = reference::select_tokens(std::span<const int>(positions), budget, [&](int position) {
      return scores[static_cast<std::size_t>(std::lower_bound(positions.begin(), positions.end(), position) - positions.begin())];
    });
    EXPECT_TRUE(same_bits(std::vector<std::int32_t>(expected.begin(), expected.end()), select(candidates, scores, budget)))
        << candidates.size() << " candidates, budget " << budget;
  }
};

TEST_F(DecisionsTest, TokensAreSelectedAsByTheReference) {
  std::mt19937 generator(5);
  for (const int count : {1, 2, 63, 64, 65, 255, 256, 257, 1000, 1024, 1025, 5000}) {
    std::vector<std::int32_t> candidates;
    for (std::int32_t position = 512; static_cast<int>(candidates.size()) < count; ++position) {
      if (generator() % 3 != 0) candidates.push_back(position);
    }
    std::vector<float> distinct(candidates.size()), tied(candidates.size()), equal(candidates.size(), 0.25f);
    for (auto& score : distinct) score = std::uniform_real_distribution<float>(0.0f, 2.0f)(generator);
    for (auto& score : tied) score = static_cast<float>(generator() % 4) * 0.5f;
    for (const int budget : {1, count / 10 + 1, count / 4 + 1, count}) {
      if (budget > count) continue;
      expect_reference_selection(candidates, distinct, budget);
      expect_reference_selection(candidates, tied, budget);
      expect_reference_selection(candidates, equal, budget);
    }
  }
}

TEST_F(DecisionsTest, ScoresCompareAsNumbers) {
  // -0 equals +0: the tie goes to the lower position. Large and subnormal scores keep their order.
  EXPECT_EQ(select({10, 11, 12}, {-0.0f, 0.0f, 0.0f}, 1), (std::vector<std::int32_t>{10}));
  EXPECT_EQ(select({10, 11, 12}, {0.0f, 1e-45f, 3e38f}, 2), (std::vector<std::int32_t>{11, 12}));
}

TEST_F(DecisionsTest, TheReservedPositionIsSelectedWhateverItsScore) {
  EXPECT_EQ(select({10, 11, 12}, {3.0f, 2.0f, 0.0f}, 2, 12), (std::vector<std::int32_t>{10, 12}));
  EXPECT_EQ(select({10, 11, 12}, {3e38f, 2.0f, -0.0f}, 1, 12), (std::vector<std::int32_t>{12}));
  EXPECT_EQ(select({10, 11, 12}, {3.0f, 2.0f, 0.0f}, 1, 9), (std::vector<std::int32_t>{10}));  // of another window
}

TEST_F(DecisionsTest, ExitGateHasTheReferenceBits) {
  for (const int hidden : {8, 100, 384, 2048}) {
    const int rows = 19;
    const Bits states = random_bits(static_cast<std::size_t>(rows) * hidden, 31), weight = random_bits(hidden, 32, 0.05f),
               bias = random_bits(1, 33);
    const auto x = to_matrix(states, rows, hidden), w = to_matrix(weight, 1, hidden);
    std::vector<float> expected;
    for (int row = 0; row < rows; ++row) {
      expected.push_back(reference::exit_gate<Declared>(x.row(row).data(), w.data(), reference::bfloat16_to_float(bias[0]), hidden));
    }
    const auto dx = upload(states), dw = upload(weight), db = upload(bias);
    auto gates = poisoned<float>(rows);
    optimized::exit_gate(dx.as<Bfloat16>(), dw.as<Bfloat16>(), db.as<Bfloat16>(), gates.as<float>(), rows, hidden, *stream_);
    EXPECT_TRUE(same_bits(expected, download<float>(gates, rows))) << "hidden " << hidden;
  }
}

// Row i stands for slot rows - 1 - i; every third row has its depth given, every seventh is padding.
TEST_F(DecisionsTest, ExitStepFollowsTheReferenceHazard) {
  std::mt19937 generator(8);
  const int rows = 60;
  for (const float threshold : {0.0f, 0.5f, 0.9f, 1.0f}) {
    for (const int min_loops : {1, 3}) {
      for (const int delay : {0, 1}) {
        const ExitRule rule{ExitMode::threshold, threshold, min_loops};
        std::vector<reference::ExitHazard<Declared>> hazards(rows);
        std::vector<ExitState> states(rows, {1.0f, kLoops, 1, 0});
        for (int row = 0; row < rows; row += 3) states[static_cast<std::size_t>(rows - 1 - row)].gate_decides = 0;
        auto exits = upload(states);
        std::vector<int> expected(rows, kLoops);
        for (int loop = 1; loop <= kLoops; ++loop) {
          std::vector<float> gates(rows);
          std::vector<QueryRow> queries;
          for (int row = 0; row < rows; ++row) {
            float& gate = gates[static_cast<std::size_t>(row)];
            gate = std::normal_distribution<float>(0.0f, 4.0f)(generator);
            const bool padding = row % 7 == 6;
            queries.push_back({padding ? -1 : rows - 1 - row, 0, loop, 0, -1});
            if (padding) continue;
            const bool fires = hazards[static_cast<std::size_t>(row)].fires(rule, loop, gate);
            int& last = expected[static_cast<std::size_t>(rows - 1 - row)];
            if (fires && row % 3 != 0) last = std::min(last, loop + delay);
          }
          const auto g = upload(gates), q = upload(queries);
          optimized::exit_step(g.as<float>(), q.as<QueryRow>(), exits.as<ExitState>(), rows, threshold, min_loops, delay, *stream_);
          std::vector<int> found;
          for (const ExitState& state : download<ExitState>(exits, rows)) found.push_back(state.last_loop);
          EXPECT_EQ(expected, found) << "threshold " << threshold << ", loop " << loop << ", delay " << delay;
        }
      }
    }
  }
}

TEST_F(DecisionsTest, AGateThatIsNotFiniteIsReported) {
  const auto gates = upload(std::vector<float>{0.0f, std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()});
  auto exits = upload(std::vector<ExitState>(3, {1.0f, kLoops, 1, 0}));
  const auto rows = upload(std::vector<QueryRow>{{0, 0, 2, 0, -1}, {1, 0, 3, 0, -1}, {2, 0, 2, 0, -1}});
  optimized::exit_step(gates.as<float>(), rows.as<QueryRow>(), exits.as<ExitState>(), 3, 0.9f, 1, 0, *stream_);
  std::vector<int> found;
  for (const ExitState& state : download<ExitState>(exits, 3)) found.push_back(state.not_finite);
  EXPECT_EQ(found, (std::vector<int>{0, 3, 2}));
}

TEST_F(DecisionsTest, GreedyTokenIsTheLowestIdOfTheHighestLogit) {
  std::mt19937 generator(11);
  for (const int vocab : {4, 264, 1000, 49152}) {
    const int rows = 9;
    std::vector<float> logits(static_cast<std::size_t>(rows) * vocab);
    for (auto& logit : logits)
      logit = static_cast<float>(static_cast<int>(generator() % 64) - 40);  // many ties, many rows with equal maxima
    std::fill_n(logits.begin() + vocab, vocab, -3.0f);
    logits[2 * static_cast<std::size_t>(vocab)] = -0.0f;
    for (int i = 1; i < vocab; ++i) logits[2 * static_cast<std::size_t>(vocab) + static_cast<std::size_t>(i)] = i % 2 == 0 ? 0.0f : -1.0f;
    const auto l = upload(logits);
    auto choices = poisoned<HeadChoice>(rows);
    optimized::head_argmax(l.as<float>(), choices.as<HeadChoice>(), rows, vocab, *stream_);
    const auto chosen = download<HeadChoice>(choices, rows);
    for (int row = 0; row < rows; ++row) {
      const std::span<const float> values(logits.data() + static_cast<std::size_t>(row) * vocab, static_cast<std::size_t>(vocab));
      EXPECT_EQ(chosen[static_cast<std::size_t>(row)].token, reference::argmax(values)) << "vocab " << vocab << ", row " << row;
      EXPECT_EQ(chosen[static_cast<std::size_t>(row)].first_non_finite, -1);
    }
  }
}

TEST_F(DecisionsTest, TheFirstNonFiniteLogitIsNamed) {
  const int vocab = 700;
  std::vector<float> logits(3 * vocab, 1.0f);
  logits[650] = std::numeric_limits<float>::quiet_NaN();
  logits[40] = std::numeric_limits<float>::infinity();
  logits[2 * vocab + 699] = -std::numeric_limits<float>::infinity();
  const auto l = upload(logits);
  auto choices = poisoned<HeadChoice>(3);
  optimized::head_argmax(l.as<float>(), choices.as<HeadChoice>(), 3, vocab, *stream_);
  const auto chosen = download<HeadChoice>(choices, 3);
  EXPECT_EQ(chosen[0].first_non_finite, 40);
  EXPECT_EQ(chosen[1].first_non_finite, -1);
  EXPECT_EQ(chosen[2].first_non_finite, 699);
}

}  // namespace
}  // namespace loopgauge::test
