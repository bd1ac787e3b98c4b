// SPDX-License-Identifier: Apache-2.0
// Seeded sampling and acceptance (S-SAMP-1..5): by hand, and that speculation draws from the target's distribution.
#include "reference/ops/sampling.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <iostream>

#include "reference/run/token_choice.hpp"

namespace loopgauge::reference {
namespace {

using Floats = std::vector<float>;

TEST(Sampling, TheDistributionIsTheSoftmaxOfScaledLogits) {
  const Floats logits{0.0f, std::log(2.0f), -80.0f, std::log(5.0f)};
  const Floats plain = token_distribution<Declared>(logits, 1.0f), cold = token_distribution<Declared>(logits, 0.5f);
  EXPECT_NEAR(plain[0], 0.125f, 1e-6f);
  EXPECT_NEAR(plain[1], 0.25f, 1e-6f);
  EXPECT_NEAR(plain[3], 0.625f, 1e-6f);
  EXPECT_NEAR(cold[0], 1.0f / 30, 1e-6f) << "squares: 1, 4, 25";
  EXPECT_NEAR(cold[3], 25.0f / 30, 1e-6f);
}

TEST(Sampling, TheFirstIdBeyondTheNumberIsDrawn) {
  const Floats p{0.25f, 0.0f, 0.5f, 0.25f, 0.0f};
  EXPECT_EQ(inverse_cdf<float>(p, 0.0f), 0);
  EXPECT_EQ(inverse_cdf<float>(p, 0.25f), 2) << "an id without probability is never drawn";
  EXPECT_EQ(inverse_cdf<float>(p, 0.7499f), 2);
  EXPECT_EQ(inverse_cdf<float>(p, 0.75f), 3);
  EXPECT_EQ(inverse_cdf<float>(Floats{0.5f, 0.25f, 0.0f}, 0.9f), 1) << "where rounding leaves none, the last with a probability";
}

TEST(Sampling, AcceptanceAndResidual) {
  const Floats p{0.5f, 0.25f, 0.25f}, q{0.25f, 0.75f, 0.0f};
  EXPECT_TRUE(accepts<float>(p, q, 0, 0.99f)) << "p above q";
  EXPECT_TRUE(accepts<float>(p, q, 1, 0.33f));
  EXPECT_FALSE(accepts<float>(p, q, 1, 1.0f / 3)) << "u q < p is strict: 0.25 is not below 0.25";
  EXPECT_EQ(draw_residual<Declared>(p, q, 1, 0.49f), 0) << "residual .25, 0, .25";
  EXPECT_EQ(draw_residual<Declared>(p, q, 1, 0.5f), 2);
  // A draft without a distribution has probability 1.
  EXPECT_TRUE(accepts<float>(p, {}, 1, 0.24f));
  EXPECT_FALSE(accepts<float>(p, {}, 1, 0.25f));
  EXPECT_EQ(draw_residual<Declared>(p, {}, 1, 0.6f), 0) << "residual .5, 0, .25";
  EXPECT_EQ(draw_residual<Declared>(p, {}, 1, 0.7f), 2);
  EXPECT_EQ(draw_residual<Declared>(p, p, 1, 0.6f), 1) << "nothing is left: from p";
}

// ---------------------------------------------------------------------------------------------------------- distributions

// The probability that a chi-square variable of `freedom` degrees exceeds `x`: the incomplete gamma function by its series.
double chi_square_tail(double x, int freedom) {
  const double a = freedom / 2.0, y = x / 2;
  double term = 1 / a, sum = term;
  for (int n = 1; n < 2000; ++n) sum += term *= y / (a + n);
  return std::max(0.0, 1 - sum * std::exp(a * std::log(y) - y - std::lgamma(a)));
}

constexpr int kVocab = 12, kDraws = 40000;

Floats logits_of(int which) {
  Floats logits;
  for (int v = 0; v < kVocab; ++v) logits.push_back(static_cast<float>((v * v * 7 + v * 5 * which + which * 3) % 23) / 8.0f);
  return logits;
}

TraceRequest sampled(float temperature, std::uint64_t seed) {
  TraceRequest request;
  request.id = 3;
  request.temperature = temperature;
  request.seed = seed;
  request.prompt = {0};
  return request;
}

using Histogram = std::vector<double>;

Histogram serial_draws(const TraceRequest& request, const Floats& target) {
  Histogram counts(kVocab, 0);
  for (int i = 0; i < kDraws; ++i) ++counts[static_cast<std::size_t>(choose_token<Declared>(request, i, target).token)];
  return counts;
}

// One candidate a position, drawn from `draft`; `judge` says which token comes of it.
template <class Judge>
Histogram speculative_draws(const TraceRequest& request, const Floats& draft, Judge judge) {
  Histogram counts(kVocab, 0);
  for (int i = 0; i < kDraws; ++i) {
    const Choice<float> candidate = choose_token<Declared>(request, i, draft, SamplingPurpose::draft);
    ++counts[static_cast<std::size_t>(judge(i, candidate))];
  }
  return counts;
}

double against(const Histogram& counts, const Floats& p) {
  double x = 0;
  for (std::size_t v = 0; v < counts.size(); ++v) {
    const double expected = static_cast<double>(p[v]) * kDraws;
    x += (counts[v] - expected) * (counts[v] - expected) / expected;
  }
  return chi_square_tail(x, kVocab - 1);
}

// Two samples of one size.
double against(const Histogram& a, const Histogram& b) {
  double x = 0;
  for (std::size_t v = 0; v < a.size(); ++v) {
    if (a[v] + b[v] > 0) x += (a[v] - b[v]) * (a[v] - b[v]) / (a[v] + b[v]);
  }
  return chi_square_tail(x, kVocab - 1);
}

TEST(Sampling, TheTestItselfKnowsItsDistribution) {
  EXPECT_NEAR(chi_square_tail(19.675, 11), 0.05, 1e-3);
  EXPECT_NEAR(chi_square_tail(24.725, 11), 0.01, 1e-3);
}

TEST(Sampling, SpeculationDrawsFromTheTargetAsSerialSamplingDoes) {
  for (const float temperature : {0.7f, 1.0f, 2.0f}) {
    const TraceRequest request = sampled(temperature, 20261130), other = sampled(temperature, 77);
    const Floats target = logits_of(1), draft = logits_of(2);
    const Floats p = token_distribution<Declared>(target, temperature);
    const Histogram serial = serial_draws(other, target);
    const Histogram drafted = speculative_draws(request, draft, [&](int i, const Choice<float>& candidate) {
      return judge_candidate<Declared>(request, i, target, candidate.token, candidate.distribution).token;
    });
    const Histogram given = speculative_draws(request, draft, [&](int i, const Choice<float>& candidate) {
      return judge_candidate<Declared>(request, i, target, candidate.token, {}).token;
    });
    // Where the draft is tested without its probability the target is missed.
    const Histogram wrong = speculative_draws(request, draft, [&](int i, const Choice<float>& candidate) {
      const float u = draw_of<float>(request, i, SamplingPurpose::acceptance);
      if (u < p[static_cast<std::size_t>(candidate.token)]) return candidate.token;
      return draw_residual<Declared>(p, candidate.distribution, candidate.token, draw_of<float>(request, i, SamplingPurpose::residual));
    });
    const std::string at = "_t" + std::to_string(temperature).substr(0, 3);
    const auto expect_likely = [&](const std::string& name, double probability) {
      RecordProperty(name + at, std::to_string(probability));
      std::cout << "p-value of " << name << " at temperature " << temperature << ": " << probability << "\n";
      EXPECT_GT(probability, 0.001) << name << at;
    };
    expect_likely("serial_against_target", against(serial, p));
    expect_likely("speculative_against_target", against(drafted, p));
    expect_likely("speculative_against_serial", against(drafted, serial));
    expect_likely("given_drafts_against_target", against(given, p));
    EXPECT_LT(against(wrong, p), 1e-6) << at;
  }
}

TEST(Sampling, AcceptanceIsTheOverlapOfTheDistributions) {
  const TraceRequest request = sampled(1.0f, 5);
  const Floats target = logits_of(1), draft = logits_of(2);
  const Floats p = token_distribution<Declared>(target, 1.0f), q = token_distribution<Declared>(draft, 1.0f);
  double overlap = 0, accepted = 0;
  for (std::size_t v = 0; v < p.size(); ++v) overlap += std::min(p[v], q[v]);
  speculative_draws(request, draft, [&](int i, const Choice<float>& candidate) {
    const Verdict verdict = judge_candidate<Declared>(request, i, target, candidate.token, candidate.distribution);
    accepted += verdict.confirmed;
    return verdict.token;
  });
  EXPECT_NEAR(accepted / kDraws, overlap, 4 * std::sqrt(overlap * (1 - overlap) / kDraws));
}

}  // namespace
}  // namespace loopgauge::reference
