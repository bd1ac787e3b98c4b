// SPDX-License-Identifier: Apache-2.0
// Seeded sampling on the device: equal logits draw the reference's tokens, accept its candidates and leave its distributions, bit for bit.
#include "optimized/ops/draw_tokens.cuh"

#include <cmath>

#include "reference/run/token_choice.hpp"
#include "tests/equivalence/device_fixture.hpp"

namespace loopgauge::test {
namespace {

using optimized::HeadChoice;
using optimized::TokenDraw;
using reference::Declared;
using Floats = std::vector<float>;

class DrawTokensTest : public DeviceTest {
 protected:
  struct Drawn {
    std::vector<HeadChoice> choices;
    std::vector<std::int32_t> confirmed;
    Floats distributions;
  };
  // Rows one after the other in `logits`; distributions of the draws are set here.
  Drawn draw(const Floats& logits, std::vector<TokenDraw> draws) {
    const std::size_t vocab = logits.size() / draws.size();
    const int rows = static_cast<int>(draws.size()), width = static_cast<int>(vocab);
    auto distributions = poisoned<float>(logits.size());
    for (std::size_t i = 0; i < draws.size(); ++i) draws[i].distribution = distributions.as<float>() + i * vocab;
    const auto device_logits = upload(logits), device_draws = upload(draws);
    auto choices = poisoned<HeadChoice>(draws.size());
    auto confirmed = poisoned<std::int32_t>(draws.size());
    optimized::head_argmax(device_logits.as<float>(), choices.as<HeadChoice>(), rows, width, *stream_);
    optimized::draw_tokens(device_logits.as<float>(), device_draws.as<TokenDraw>(), choices.as<HeadChoice>(), confirmed.as<std::int32_t>(), rows, width,
                           *stream_);
    return {download<HeadChoice>(choices, draws.size()), download<std::int32_t>(confirmed, draws.size()),
            download<float>(distributions, logits.size())};
  }

  static Floats random_logits(std::size_t count, std::uint32_t seed, float scale) {
    std::mt19937 generator(seed);
    std::normal_distribution<float> normal(0.0f, scale);
    Floats logits(count);
    for (float& logit : logits) logit = normal(generator);
    return logits;
  }
  static TraceRequest request(float temperature, std::uint64_t seed) {
    TraceRequest request;
    request.id = 3;
    request.temperature = temperature;
    request.seed = seed;
    request.prompt = {0};
    return request;
  }
};

TEST_F(DrawTokensTest, TokensAndDistributionsAreTheReferences) {
  for (const std::size_t vocab : {std::size_t{1}, std::size_t{12}, std::size_t{264}, std::size_t{513}, std::size_t{49152}}) {
    for (const float temperature : {0.01f, 0.7f, 1.0f, 2.0f, 100.0f}) {
      const TraceRequest r = request(temperature, 20261130 + vocab);
      constexpr int kRows = 24;
      const Floats logits = random_logits(vocab * kRows, static_cast<std::uint32_t>(vocab), 3.0f);
      std::vector<TokenDraw> draws(kRows);
      for (int i = 0; i < kRows; ++i) {
        if (i % 8 == 7) continue;  // greedy rows between the others
        draws[static_cast<std::size_t>(i)].temperature = temperature;
        draws[static_cast<std::size_t>(i)].draw = uniform_draw(r.seed, r.id, i, SamplingPurpose::target);
      }
      const Drawn drawn = draw(logits, draws);
      for (std::size_t i = 0; i < kRows; ++i) {
        const auto row = std::span(logits).subspan(i * vocab, vocab);
        const std::string what = "vocabulary " + std::to_string(vocab) + ", temperature " + std::to_string(temperature) + ", row " + std::to_string(i);
        if (draws[i].temperature == 0.0f) {
          EXPECT_EQ(drawn.choices[i].token, reference::argmax(row)) << what;
          continue;
        }
        const auto expected = reference::choose_token<Declared>(r, static_cast<int>(i), row);
        EXPECT_EQ(drawn.choices[i].token, expected.token) << what;
        EXPECT_EQ(drawn.choices[i].first_non_finite, -1) << what;
        const Floats p(drawn.distributions.begin() + static_cast<std::ptrdiff_t>(i * vocab),
                       drawn.distributions.begin() + static_cast<std::ptrdiff_t>((i + 1) * vocab));
        EXPECT_TRUE(same_bits(expected.distribution, p)) << what;
      }
    }
  }
}

// Numbers at the ends of the running sum, where rounding leaves no id.
TEST_F(DrawTokensTest, NumbersAtTheEndsOfTheDistribution) {
  for (const std::size_t vocab : {std::size_t{7}, std::size_t{1000}}) {
    Floats logits = random_logits(vocab, 5, 4.0f);
    logits.back() = -1000.0f;  // without probability
    const Floats p = reference::token_distribution<Declared>(logits, 1.0f);
    ASSERT_EQ(p.back(), 0.0f);
    for (const float u : {0.0f, 0.5f, 1.0f - 0x1p-24f, 1.0f}) {
      TokenDraw one;
      one.temperature = 1.0f;
      one.draw = u;
      EXPECT_EQ(draw(logits, {one}).choices[0].token, reference::inverse_cdf<float>(p, u)) << u;
    }
  }
}

TEST_F(DrawTokensTest, CandidatesAreJudgedAsTheReferenceJudgesThem) {
  int accepted = 0, rejected = 0, nothing_left = 0;
  for (const std::size_t vocab : {std::size_t{12}, std::size_t{264}, std::size_t{3000}}) {
    for (const float temperature : {0.5f, 1.0f, 2.0f}) {
      const TraceRequest r = request(temperature, 77 + vocab);
      constexpr int kRows = 60;
      const Floats target = random_logits(vocab * kRows, 11, 2.0f), noise = random_logits(vocab * kRows, 12, 1.0f);
      std::vector<Floats> q(kRows);
      std::vector<optimized::DeviceBuffer> device_q(kRows);
      std::vector<TokenDraw> draws(kRows);
      for (int i = 0; i < kRows; ++i) {
        const auto row = static_cast<std::size_t>(i);
        Floats draft(target.begin() + static_cast<std::ptrdiff_t>(row * vocab), target.begin() + static_cast<std::ptrdiff_t>((row + 1) * vocab));
        if (i % 5 != 0) {  // else the draft is the target, so that a rejection would leave nothing
          for (std::size_t v = 0; v < vocab; ++v) draft[v] += noise[row * vocab + v];
        }
        const auto choice = reference::choose_token<Declared>(r, i, draft, SamplingPurpose::draft);
        TokenDraw& d = draws[row];
        d.temperature = temperature;
        d.candidate = choice.token;
        d.draw = uniform_draw(r.seed, r.id, i, SamplingPurpose::target);
        // One that no candidate of its own distribution is accepted with, so that nothing is left.
        d.acceptance = i % 5 == 0 && i % 2 == 0 ? 1.0f : uniform_draw(r.seed, r.id, i, SamplingPurpose::acceptance);
        d.residual = uniform_draw(r.seed, r.id, i, SamplingPurpose::residual);
        if (i % 3 == 2) continue;  // a given draft
        q[row] = choice.distribution;
        device_q[row] = upload(q[row]);
        d.draft = device_q[row].as<float>();
      }
      const Drawn drawn = draw(target, draws);
      for (std::size_t i = 0; i < kRows; ++i) {
        const Floats p = reference::token_distribution<Declared>(std::span(target).subspan(i * vocab, vocab), temperature);
        const bool stands = reference::accepts<float>(p, q[i], draws[i].candidate, draws[i].acceptance);
        const std::int32_t token =
            stands ? draws[i].candidate : reference::draw_residual<Declared>(p, q[i], draws[i].candidate, draws[i].residual);
        EXPECT_EQ(drawn.confirmed[i], stands ? 1 : 0) << "vocabulary " << vocab << ", row " << i;
        EXPECT_EQ(drawn.choices[i].token, token) << "vocabulary " << vocab << ", row " << i;
        (stands ? accepted : rejected) += 1;
        nothing_left += !stands && q[i] == p;
      }
    }
  }
  EXPECT_GT(accepted, 100);
  EXPECT_GT(rejected, 100);
  EXPECT_GT(nothing_left, 0);
}

}  // namespace
}  // namespace loopgauge::test
