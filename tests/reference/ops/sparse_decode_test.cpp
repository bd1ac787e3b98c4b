// SPDX-License-Identifier: Apache-2.0
// Key selection, reference statistics and the correction (S-SDA-2..7).
#include "reference/ops/sparse_decode.hpp"

#include <gtest/gtest.h>

#include <numeric>

#include "models/spec/sparse_correction.hpp"
#include "tests/reference/support.hpp"

namespace loopgauge::reference {
namespace {

std::vector<int> select(const std::vector<float>& logits, int count) { return select_keys<float>(logits, count); }

PlaneView<float> plane(const std::vector<float>& data, int head_dim) { return {data.data(), nullptr, 0, head_dim}; }

TEST(SelectKeys, HighestLogitsInPositionOrderTiesToTheLower) {
  EXPECT_EQ(select({0, 5, 1, 5, 5}, 2), (std::vector<int>{1, 3}));
  EXPECT_EQ(select({2, 2, 2, 2}, 3), (std::vector<int>{0, 1, 2}));
  EXPECT_EQ(select({-1, -3, -2}, 1), (std::vector<int>{0}));
  EXPECT_EQ(select({7}, 1), (std::vector<int>{0})) << "n = 1";
}

TEST(SelectKeys, SignedZerosTie) {
  EXPECT_EQ(select({-0.0f, 0.0f, -1}, 1), (std::vector<int>{0}));
  EXPECT_EQ(select({0.0f, -0.0f, -0.0f}, 2), (std::vector<int>{0, 1}));
}

TEST(SelectKeys, NeitherSinkNorRecencyNorTheCurrentPositionIsForced) {
  std::vector<float> logits(100, 0.0f);
  logits[0] = logits[99] = -1.0f;
  const auto keys = select(logits, 10);
  EXPECT_EQ(keys.front(), 1);
  EXPECT_EQ(keys.back(), 10);
}

TEST(SelectKeys, ManyTiesAtTheBoundaryAgreeWithASortedOrder) {
  test::Random random(71);
  for (const int n : {1, 2, 63, 64, 65, 128, 1000}) {
    std::vector<float> logits(static_cast<std::size_t>(n));
    for (float& x : logits) x = static_cast<float>(random.below(5) - 2);
    for (const int k : {1, n / 10 + 1, n / 2 + 1, n}) {
      if (k > n) continue;
      std::vector<int> order(static_cast<std::size_t>(n));
      std::iota(order.begin(), order.end(), 0);
      std::stable_sort(order.begin(), order.end(),
                       [&](int a, int b) { return logits[static_cast<std::size_t>(a)] > logits[static_cast<std::size_t>(b)]; });
      order.resize(static_cast<std::size_t>(k));
      std::sort(order.begin(), order.end());
      ASSERT_EQ(select(logits, k), order) << n << ' ' << k;
    }
  }
}

// Worked example S-EX-1.
TEST(SparseCorrection, WorkedExampleGivesTwentyThreeAndAHalf) {
  const std::vector<float> probabilities{0.1f, 0.3f, 0.6f}, values{10, 20, 30};
  HeadReference<float> reference;
  reference.keys = {1, 2};
  reference.output = {0.1f * 10 + 0.3f * 20 + 0.6f * 30};
  summarize_reference<Declared>(probabilities, plane(values, 1), reference);
  EXPECT_FLOAT_EQ(reference.mass, 0.9f);
  EXPECT_FLOAT_EQ(reference.partial[0], 24.0f);
  EXPECT_FLOAT_EQ(reference.output[0], 25.0f);

  // Logits ln 3 and 0 give the local softmax [.75, .25]; values of the current loop are [20, 40] there. Position 0 is not read.
  const std::vector<float> q{1}, k{1e30f, std::log(3.0f), 0}, v{1e30f, 20, 40};
  float output = 0;
  sparse_correction<Declared>(q.data(), plane(k, 1), plane(v, 1), reference, 1.0f, &output);
  EXPECT_NEAR(output, 23.5f, 1e-5f);
}

struct Case {
  std::vector<float> q2, k2, v2, q, k, v;  // loop 2 and the current loop
  int n, head_dim;
  Case(int n_, int head_dim_, std::uint64_t seed) : n(n_), head_dim(head_dim_) {
    const std::size_t row = static_cast<std::size_t>(head_dim), all = static_cast<std::size_t>(n * head_dim);
    q2 = test::bf16_values(row, seed, 1), k2 = test::bf16_values(all, seed + 1, 1), v2 = test::bf16_values(all, seed + 2, 3);
    q = test::bf16_values(row, seed + 3, 1), k = test::bf16_values(all, seed + 4, 1), v = test::bf16_values(all, seed + 5, 3);
  }
  template <class P>
  HeadReference<float> reference(int count, std::vector<float>* all_probabilities = nullptr) const {
    HeadReference<float> r;
    std::vector<float> logits(static_cast<std::size_t>(n)), p(static_cast<std::size_t>(n));
    r.output.resize(static_cast<std::size_t>(head_dim));
    attention_dense<P>(q2.data(), plane(k2, head_dim), plane(v2, head_dim), n, attention_scale<P>(head_dim), logits.data(), p.data(),
                       r.output.data());
    r.keys = select_keys<float>(logits, count);
    summarize_reference<P>(p, plane(v2, head_dim), r);
    if (all_probabilities != nullptr) *all_probabilities = p;
    return r;
  }
  template <class P>
  std::vector<float> corrected(const HeadReference<float>& r) const {
    std::vector<float> o(static_cast<std::size_t>(head_dim));
    sparse_correction<P>(q.data(), plane(k, head_dim), plane(v, head_dim), r, attention_scale<P>(head_dim), o.data());
    return o;
  }
};

TEST(SparseCorrection, EqualsTheScalarRestatementInBothFp32Profiles) {
  const Case c(700, 48, 80);
  std::vector<float> p;
  const HeadReference<float> declared = c.reference<Declared>(70, &p);
  ASSERT_EQ(declared.keys.size(), 70u);
  const auto at = [](const std::vector<float>& x, int i) { return x[static_cast<std::size_t>(i)]; };
  EXPECT_EQ(declared.mass, test::plain_running_sum(declared.keys, 0, [&](std::size_t i) { return at(p, declared.keys[i]); }));
  const auto output = c.corrected<Declared>(declared);
  std::vector<float> local(70), l(48);
  attention_listed<Declared>(c.q.data(), plane(c.k, 48), plane(c.v, 48), declared.keys, attention_scale<Declared>(48), local.data(),
                             l.data());
  for (int d = 0; d < 48; ++d) {
    const float c_ref = test::plain_running_sum(
        declared.keys, 0, [&](std::size_t i) { return at(p, declared.keys[i]) * at(c.v2, declared.keys[i] * 48 + d); });
    EXPECT_EQ(test::bits(at(declared.partial, d)), test::bits(c_ref)) << d;
    const float rest = at(declared.output, d) - c_ref, scaled = declared.mass * at(l, d);
    EXPECT_EQ(test::bits(at(output, d)), test::bits(rest + scaled)) << d;
  }
  const HeadReference<float> reordered = c.reference<Reordered>(70, &p);
  EXPECT_EQ(reordered.mass, test::plain_running_sum(reordered.keys, 256, [&](std::size_t i) { return at(p, reordered.keys[i]); }));
}

// Worked example S-EX-4.
TEST(SparseCorrection, WithAllKeysItIsDenseAttentionUpToRounding) {
  for (const int n : {1, 2, 64, 500}) {
    const Case c(n, 64, 90);
    const HeadReference<float> r = c.reference<Declared>(n);
    EXPECT_NEAR(r.mass, 1.0f, 1e-5f);
    const auto corrected = c.corrected<Declared>(r);
    std::vector<float> p(static_cast<std::size_t>(n)), dense(64);
    attention_dense<Declared>(c.q.data(), plane(c.k, 64), plane(c.v, 64), n, attention_scale<Declared>(64), nullptr, p.data(),
                              dense.data());
    for (std::size_t d = 0; d < 64; ++d) EXPECT_NEAR(corrected[d], dense[d], 2e-5f) << n << ' ' << d;
  }
}

TEST(SparseCorrection, OfTheReferenceLoopItselfGivesTheReferenceOutput) {
  Case c(300, 32, 100);
  c.q = c.q2, c.k = c.k2, c.v = c.v2;  // nothing changed since loop 2
  const HeadReference<float> r = c.reference<Declared>(30);
  const auto corrected = c.corrected<Declared>(r);
  for (std::size_t d = 0; d < 32; ++d) EXPECT_NEAR(corrected[d], r.output[d], 1e-5f) << d;
}

TEST(SparseCorrection, PeakedAttentionKeepsTheSmallRest) {
  // One key holds nearly all mass; the rest comes from O_ref - C_ref and must not vanish or turn negative in weight.
  const std::vector<float> q2{8}, k2{0, 0, 10, 0}, v2{4, 4, 1, 4};
  HeadReference<float> r;
  std::vector<float> logits(4), p(4);
  r.output.resize(1);
  attention_dense<Declared>(q2.data(), plane(k2, 1), plane(v2, 1), 4, 0.1f, logits.data(), p.data(), r.output.data());
  r.keys = select_keys<float>(logits, 1);
  EXPECT_EQ(r.keys, (std::vector<int>{2}));
  summarize_reference<Declared>(p, plane(v2, 1), r);
  const float rest = r.output[0] - r.partial[0];
  EXPECT_NEAR(rest, 4 * 3 * std::exp(-8.0) / (1 + 3 * std::exp(-8.0)), 1e-6);
  float output = 0;
  const std::vector<float> v{0, 0, 5, 0};
  sparse_correction<Declared>(q2.data(), plane(k2, 1), plane(v, 1), r, 0.1f, &output);
  EXPECT_EQ(output, rest + r.mass * 5.0f);
}

TEST(SparseCorrection, OtherOrdersStayWithinTheDeclaredTolerance) {
  const Case c(1000, 128, 110);
  const HeadReference<float> r = c.reference<Declared>(100);
  const auto declared = c.corrected<Declared>(r), reordered = c.corrected<Reordered>(r);
  std::vector<float> local(100), l(128);
  attention_listed<Declared>(c.q.data(), plane(c.k, 128), plane(c.v, 128), r.keys, attention_scale<Declared>(128), local.data(), l.data());
  double score_bound = 0;
  for (const int j : r.keys) {
    double magnitude = 0;
    for (std::size_t d = 0; d < 128; ++d)
      magnitude += std::fabs(c.q[d] * c.k[static_cast<std::size_t>(j) * 128 + d]) * attention_scale<DoublePrecision>(128);
    score_bound = std::max(score_bound, spec::bound(spec::kScoreTolerance, {.magnitude = magnitude, .terms = 128}, 0));
  }
  for (std::size_t d = 0; d < 128; ++d) {
    double magnitude = std::fabs(r.output[d]) + std::fabs(r.partial[d]);
    for (std::size_t i = 0; i < 100; ++i) magnitude += r.mass * local[i] * std::fabs(c.v[static_cast<std::size_t>(r.keys[i]) * 128 + d]);
    const spec::Element element{
        .expected = round_to_bfloat16(declared[d]), .magnitude = magnitude, .terms = 100, .input_error = score_bound};
    EXPECT_LE(spec::error_ratio(spec::kSparseCorrection.outputs[0].tolerance, element, round_to_bfloat16(reordered[d])), 1.0) << d;
  }
}

TEST(SparseCorrection, BitsArePinned) {
  const Case c(640, 128, 120);
  const HeadReference<float> r = c.reference<Declared>(64);
  EXPECT_EQ(test::digest(std::span<const int>(r.keys)), "e3855a06e0653ad4");
  EXPECT_EQ(test::digest(r.partial), "e4adfe70e24bbbec");
  EXPECT_EQ(test::digest(c.corrected<Declared>(r)), "47f6c461994accff");
}

}  // namespace
}  // namespace loopgauge::reference
