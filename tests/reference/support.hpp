// SPDX-License-Identifier: Apache-2.0
// Data and plain re-statements of the specification for the reference's tests. The restatements are scalar loops written from SPEC.md, in
// its order, with none of the reference's code.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "models/sha256.hpp"
#include "reference/ops/matrix.hpp"

namespace loopgauge::test {

// SplitMix64: the same data on every machine.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  std::uint64_t next() {
    std::uint64_t z = (state_ += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  // In [-1, 1).
  float uniform() { return static_cast<float>(static_cast<std::int32_t>(next() >> 40) - (1 << 23)) * 0x1p-23f; }
  // A BF16 value: uniform mantissa, exponent within 2^-spread .. 1, both signs.
  float bf16(int spread = 3) {
    const std::uint64_t r = next();
    const std::uint32_t exponent = 127u - static_cast<std::uint32_t>((r >> 32) % static_cast<std::uint64_t>(spread + 1));
    return std::bit_cast<float>((static_cast<std::uint32_t>(r & 1u) << 31) | (exponent << 23) |
                                (static_cast<std::uint32_t>((r >> 1) & 0x7fu) << 16));
  }
  int below(int n) { return static_cast<int>(next() % static_cast<std::uint64_t>(n)); }

 private:
  std::uint64_t state_;
};

inline std::vector<float> bf16_values(std::size_t count, std::uint64_t seed, int spread = 3) {
  Random random(seed);
  std::vector<float> values(count);
  for (float& x : values) x = random.bf16(spread);
  return values;
}

// Values that cancel: FP32 mantissas, magnitudes over 2^20, so that another order of additions shows.
inline std::vector<float> cancelling_values(std::size_t count, std::uint64_t seed) {
  Random random(seed);
  std::vector<float> values(count);
  for (float& x : values) x = std::ldexp(random.uniform(), random.below(20));
  return values;
}

inline std::uint32_t bits(float x) { return std::bit_cast<std::uint32_t>(x); }
inline std::uint16_t bf16_bits(float x) { return static_cast<std::uint16_t>(bits(x) >> 16); }

// NaN and signed zeros count: the words are compared.
inline bool same_bits(std::span<const float> a, std::span<const float> b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

// The first 16 hex digits of the SHA-256 of the little-endian words.
template <class T>
std::string digest(std::span<const T> values) {
  Sha256 sha;
  sha.update(values.data(), values.size() * sizeof(T));
  return sha.hex_digest().substr(0, 16);
}
inline std::string digest(const std::vector<float>& values) { return digest(std::span<const float>(values)); }

// ---- plain restatements ----

// Nearest of the two BF16 neighbours of a finite x, ties to even; the upper neighbour of the greatest finite value counts as 2^128.
inline float plain_bf16(float x) {
  if (!std::isfinite(x)) return x;
  const std::uint32_t low = bits(x) & 0xffff0000u, high = low + 0x10000u;
  const auto value = [](std::uint32_t word) {
    const float f = std::bit_cast<float>(word);
    return std::isinf(f) ? std::copysign(0x1p128, f) : static_cast<double>(f);
  };
  const double below = std::fabs(static_cast<double>(x) - value(low)), above = std::fabs(value(high) - static_cast<double>(x));
  const bool take_high = above < below || (above == below && (low & 0x10000u) != 0);
  return std::bit_cast<float>(take_high ? high : low);
}

// S-SUM-1 with `lanes` lanes over terms(i), i < n.
template <class Terms>
float plain_lane_sum(int n, int lanes, Terms terms) {
  std::vector<float> lane(static_cast<std::size_t>(lanes), 0.0f);
  for (int i = 0; i < n; ++i) {
    const float term = terms(i);
    float& target = lane[static_cast<std::size_t>(i % lanes)];
    target = target + term;
  }
  for (int s = lanes / 2; s > 0; s /= 2) {
    for (int j = 0; j < s; ++j)
      lane[static_cast<std::size_t>(j)] = lane[static_cast<std::size_t>(j)] + lane[static_cast<std::size_t>(j + s)];
  }
  return lane[0];
}

inline float plain_dot(const float* a, const float* b, int n, int lanes = 16) {
  return plain_lane_sum(n, lanes, [&](int i) { return a[i] * b[i]; });
}

// S-SUM-3; with block > 0 the order of S-PROF-2 over absolute positions.
template <class Terms>
float plain_running_sum(std::span<const int> positions, int block, Terms terms) {
  float total = 0.0f, partial = 0.0f;
  for (std::size_t i = 0; i < positions.size(); ++i) {
    if (block > 0 && i > 0 && positions[i] / block != positions[i - 1] / block) {
      total = total + partial;
      partial = 0.0f;
    }
    partial = partial + terms(i);
  }
  return total + partial;
}

// BF16 values of `rows` x `cols` as the reference's matrix of bit patterns.
inline reference::Matrix<std::uint16_t> weight_matrix(const std::vector<float>& values, int rows, int cols) {
  reference::Matrix<std::uint16_t> m(rows, cols);
  for (std::ptrdiff_t i = 0; i < m.size(); ++i) m.data()[i] = bf16_bits(values[static_cast<std::size_t>(i)]);
  return m;
}

template <class Real>
reference::Matrix<Real> matrix(const std::vector<float>& values, int rows, int cols) {
  reference::Matrix<Real> m(rows, cols);
  for (std::ptrdiff_t i = 0; i < m.size(); ++i) m.data()[i] = values[static_cast<std::size_t>(i)];
  return m;
}

template <class Real>
reference::Vector<Real> vector_of(const std::vector<float>& values) {
  reference::Vector<Real> v(static_cast<std::ptrdiff_t>(values.size()));
  for (std::size_t i = 0; i < values.size(); ++i) v[static_cast<std::ptrdiff_t>(i)] = values[i];
  return v;
}

inline std::vector<float> to_vector(const reference::Matrix<float>& m) { return {m.data(), m.data() + m.size()}; }

}  // namespace loopgauge::test
