// SPDX-License-Identifier: Apache-2.0
// attention_dense and its form over a list of positions (S-ATT-2..4, S-SUM-2..3, S-PROF-2).
#include "reference/ops/attention.hpp"

#include <gtest/gtest.h>

#include <numeric>

#include "models/spec/attention.hpp"
#include "tests/reference/support.hpp"

namespace loopgauge::reference {
namespace {

struct Result {
  std::vector<float> logits, probabilities, output;
};

template <class P>
Result attend(const std::vector<float>& q, const PlaneView<float>& keys, const PlaneView<float>& values, int n) {
  Result r{std::vector<float>(static_cast<std::size_t>(n)), std::vector<float>(static_cast<std::size_t>(n)), std::vector<float>(q.size())};
  attention_dense<P>(q.data(), keys, values, n, attention_scale<P>(static_cast<int>(q.size())), r.logits.data(), r.probabilities.data(),
                     r.output.data());
  return r;
}

PlaneView<float> plane(const std::vector<float>& data, int head_dim) { return {data.data(), nullptr, 0, head_dim}; }

// SPEC.md in scalar loops. `lanes` and `block` choose the profile.
Result restated(const std::vector<float>& q, const std::vector<float>& k, const std::vector<float>& v, std::span<const int> positions,
                int lanes, int block) {
  const int head_dim = static_cast<int>(q.size()), n = static_cast<int>(positions.size());
  const float scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(head_dim)));
  Result r;
  for (const int p : positions) r.logits.push_back(test::plain_dot(q.data(), k.data() + p * head_dim, head_dim, lanes) * scale);
  const float top = *std::max_element(r.logits.begin(), r.logits.end());
  std::vector<float> e;
  for (const float s : r.logits) e.push_back(exp_binary32(s - top));
  const float z = test::plain_lane_sum(n, lanes, [&](int i) { return e[static_cast<std::size_t>(i)]; });
  for (const float x : e) r.probabilities.push_back(x / z);
  for (int d = 0; d < head_dim; ++d) {
    r.output.push_back(test::plain_running_sum(
        positions, block, [&](std::size_t i) { return r.probabilities[i] * v[static_cast<std::size_t>(positions[i] * head_dim + d)]; }));
  }
  return r;
}

std::vector<int> first_positions(int n) {
  std::vector<int> all(static_cast<std::size_t>(n));
  std::iota(all.begin(), all.end(), 0);
  return all;
}

TEST(AttentionDense, OneKeyGivesItsValue) {
  const std::vector<float> q{3, -1}, k{0.5f, 2}, v{7, -9};
  const Result r = attend<Declared>(q, plane(k, 2), plane(v, 2), 1);
  EXPECT_EQ(r.probabilities, (std::vector<float>{1}));
  EXPECT_EQ(r.output, v);
}

TEST(AttentionDense, EqualLogitsGiveTheMean) {
  const std::vector<float> q{0, 0}, k{1, 2, 3, 4, 5, 6, 7, 8}, v{1, 10, 2, 20, 3, 30, 6, 60};
  const Result r = attend<Declared>(q, plane(k, 2), plane(v, 2), 4);
  EXPECT_EQ(r.probabilities, std::vector<float>(4, 0.25f));
  EXPECT_EQ(r.output, (std::vector<float>{3, 30}));
}

TEST(AttentionDense, ADominantKeyIsOneHotAndFarLogitsStayFinite) {
  // Logits 0 and 3e5 * 1 * scale: the difference underflows exp, and |q . k| is far above the FP16 range.
  const std::vector<float> q{1000, 0}, k{-3000, 0, 3000, 0, 0, 0}, v{1, 2, 3, 4, 5, 6};
  const Result r = attend<Declared>(q, plane(k, 2), plane(v, 2), 3);
  EXPECT_EQ(r.probabilities, (std::vector<float>{0, 1, 0}));
  EXPECT_EQ(r.output, (std::vector<float>{3, 4}));
}

TEST(AttentionDense, ScaleIsTheSinglePrecisionNeighbourOfOneOverRootD) {
  EXPECT_EQ(attention_scale<Declared>(128), 0.08838834764831845f);
  EXPECT_EQ(attention_scale<Declared>(64), 0.125f);
  EXPECT_EQ(attention_scale<DoublePrecision>(128), 1.0 / std::sqrt(128.0));
}

TEST(AttentionDense, EqualsTheScalarRestatementInBothFp32Profiles) {
  for (const int head_dim : {2, 16, 48, 128}) {
    for (const int n : {1, 2, 15, 16, 17, 63, 64, 65, 300, 600}) {
      const std::size_t size = static_cast<std::size_t>(n * head_dim);
      const auto q = test::bf16_values(static_cast<std::size_t>(head_dim), 41, 2), k = test::bf16_values(size, 42, 2),
                 v = test::bf16_values(size, 43, 4);
      const Result declared = attend<Declared>(q, plane(k, head_dim), plane(v, head_dim), n);
      const Result expected = restated(q, k, v, first_positions(n), 16, 0);
      ASSERT_TRUE(test::same_bits(declared.logits, expected.logits)) << head_dim << ' ' << n;
      ASSERT_TRUE(test::same_bits(declared.probabilities, expected.probabilities)) << head_dim << ' ' << n;
      ASSERT_TRUE(test::same_bits(declared.output, expected.output)) << head_dim << ' ' << n;
      const Result reordered = attend<Reordered>(q, plane(k, head_dim), plane(v, head_dim), n);
      const Result other = restated(q, k, v, first_positions(n), 32, 256);
      ASSERT_TRUE(test::same_bits(reordered.probabilities, other.probabilities)) << head_dim << ' ' << n;
      ASSERT_TRUE(test::same_bits(reordered.output, other.output)) << head_dim << ' ' << n;
    }
  }
}

TEST(AttentionListed, EqualsTheScalarRestatementOverAnyList) {
  const int head_dim = 32, n = 900;
  const auto q = test::bf16_values(32, 44, 2), k = test::bf16_values(900 * 32, 45, 2), v = test::bf16_values(900 * 32, 46, 4);
  for (const std::vector<int>& list : {std::vector<int>{0}, {899}, {3, 255, 256, 257, 511, 512, 898}, first_positions(n)}) {
    std::vector<float> p(list.size()), o(32);
    attention_listed<Declared>(q.data(), plane(k, head_dim), plane(v, head_dim), list, attention_scale<Declared>(head_dim), p.data(),
                               o.data());
    const Result expected = restated(q, k, v, list, 16, 0);
    EXPECT_TRUE(test::same_bits(p, expected.probabilities));
    EXPECT_TRUE(test::same_bits(o, expected.output));
    attention_listed<Reordered>(q.data(), plane(k, head_dim), plane(v, head_dim), list, attention_scale<Reordered>(head_dim), p.data(),
                                o.data());
    EXPECT_TRUE(test::same_bits(o, restated(q, k, v, list, 32, 256).output)) << "block sums follow absolute positions, not list indices";
  }
}

TEST(AttentionDense, ReadsReconstructedRowsBelowTheFrontierAndExactRowsAboveIt) {
  const int head_dim = 16, n = 50, frontier = 32;
  const auto q = test::bf16_values(16, 47), exact_k = test::bf16_values(50 * 16, 48), exact_v = test::bf16_values(50 * 16, 49);
  const auto coded_k = test::cancelling_values(50 * 16, 50), coded_v = test::cancelling_values(50 * 16, 51);
  std::vector<float> k = exact_k, v = exact_v, half_k(coded_k), half_v(coded_v);
  for (std::size_t i = 0; i < frontier * 16; ++i) k[i] = half_k[i] = coded_k[i] * 0x1p-20f, v[i] = coded_v[i];
  const Result mixed =
      attend<Declared>(q, {exact_k.data(), half_k.data(), frontier, head_dim}, {exact_v.data(), half_v.data(), frontier, head_dim}, n);
  const Result expected = attend<Declared>(q, plane(k, head_dim), plane(v, head_dim), n);
  EXPECT_TRUE(test::same_bits(mixed.output, expected.output));
  EXPECT_TRUE(test::same_bits(mixed.logits, expected.logits));
}

TEST(AttentionDense, OtherOrdersAndDoublePrecisionStayWithinTheDeclaredTolerance) {
  const int head_dim = 128, n = 1000;
  const auto q = test::bf16_values(128, 52, 1), k = test::bf16_values(1000 * 128, 53, 8), v = test::bf16_values(1000 * 128, 54, 3);
  const Result declared = attend<Declared>(q, plane(k, head_dim), plane(v, head_dim), n),
               reordered = attend<Reordered>(q, plane(k, head_dim), plane(v, head_dim), n);
  const std::vector<double> dq(q.begin(), q.end()), dk(k.begin(), k.end()), dv(v.begin(), v.end());
  std::vector<double> logits(1000), probabilities(1000), output(128);
  attention_dense<DoublePrecision>(dq.data(), {dk.data(), nullptr, 0, head_dim}, {dv.data(), nullptr, 0, head_dim}, n,
                                   attention_scale<DoublePrecision>(head_dim), logits.data(), probabilities.data(), output.data());
  double score_bound = 0;
  for (std::size_t j = 0; j < 1000; ++j) {
    double magnitude = 0;
    for (std::size_t d = 0; d < 128; ++d) magnitude += std::fabs(dq[d] * dk[j * 128 + d]);
    const spec::Element element{
        .expected = declared.logits[j], .magnitude = magnitude * attention_scale<DoublePrecision>(head_dim), .terms = 128};
    EXPECT_LE(spec::error_ratio(spec::kScoreTolerance, element, reordered.logits[j]), 1.0);
    EXPECT_LE(spec::error_ratio(spec::kScoreTolerance, element, logits[j]), 1.0);
    score_bound = std::max(score_bound, spec::bound(spec::kScoreTolerance, element, declared.logits[j]));
  }
  const spec::Tolerance p_tolerance = spec::kAttentionDense.outputs[1].tolerance, o_tolerance = spec::kAttentionDense.outputs[2].tolerance;
  for (std::size_t j = 0; j < 1000; ++j) {
    const spec::Element element{
        .expected = declared.probabilities[j], .magnitude = declared.probabilities[j], .terms = 1000, .input_error = score_bound};
    EXPECT_LE(spec::error_ratio(p_tolerance, element, reordered.probabilities[j]), 1.0);
    EXPECT_LE(spec::error_ratio(p_tolerance, element, probabilities[j]), 1.0);
  }
  for (std::size_t d = 0; d < 128; ++d) {
    double magnitude = 0;
    for (std::size_t j = 0; j < 1000; ++j) magnitude += probabilities[j] * std::fabs(dv[j * 128 + d]);
    const spec::Element element{
        .expected = round_to_bfloat16(declared.output[d]), .magnitude = magnitude, .terms = 1000, .input_error = score_bound};
    EXPECT_LE(spec::error_ratio(o_tolerance, element, round_to_bfloat16(reordered.output[d])), 1.0);
    EXPECT_LE(spec::error_ratio(o_tolerance, element, output[d]), 1.0);
  }
}

TEST(AttentionDense, BitsArePinned) {
  const auto q = test::bf16_values(128, 55, 8), k = test::bf16_values(777 * 128, 56, 8), v = test::bf16_values(777 * 128, 57, 3);
  const Result declared = attend<Declared>(q, plane(k, 128), plane(v, 128), 777),
               reordered = attend<Reordered>(q, plane(k, 128), plane(v, 128), 777);
  EXPECT_EQ(test::digest(declared.probabilities), "801495f5a77655c3");
  EXPECT_EQ(test::digest(declared.output), "06d21e2250b69dbd");
  EXPECT_EQ(test::digest(reordered.output), "3afd6fa1550e5835");
}

}  // namespace
}  // namespace loopgauge::reference
