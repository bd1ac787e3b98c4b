// SPDX-License-Identifier: Apache-2.0
#include "models/sha256.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

#include <algorithm>
#include <bit>
#include <cstring>

namespace loopgauge {
namespace {

constexpr std::array<std::uint32_t, 64> kRoundConstants{
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5, 0xd807aa98, 0x12835b01, 0x243185be,
    0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa,
    0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967, 0x27b70a85,
    0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85, 0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3,
    0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f,
    0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

using State = std::array<std::uint32_t, 8>;

void compress_portably(State& state, const std::uint8_t* block) {
  std::array<std::uint32_t, 64> w;
  for (std::size_t i = 0; i < 16; ++i) {
    w[i] = std::uint32_t{block[4 * i]} << 24 | std::uint32_t{block[4 * i + 1]} << 16 | std::uint32_t{block[4 * i + 2]} << 8 | block[4 * i + 3];
  }
  for (std::size_t i = 16; i < 64; ++i) {
    const std::uint32_t s0 = std::rotr(w[i - 15], 7) ^ std::rotr(w[i - 15], 18) ^ (w[i - 15] >> 3);
    const std::uint32_t s1 = std::rotr(w[i - 2], 17) ^ std::rotr(w[i - 2], 19) ^ (w[i - 2] >> 10);
    w[i] = w[i - 16] + s0 + w[i - 7] + s1;
  }
  auto [a, b, c, d, e, f, g, h] = state;
  for (std::size_t i = 0; i < 64; ++i) {
    const std::uint32_t s1 = std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25);
    const std::uint32_t t1 = h + s1 + ((e & f) ^ (~e & g)) + kRoundConstants[i] + w[i];
    const std::uint32_t s0 = std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22);
    const std::uint32_t t2 = s0 + ((a & b) ^ (a & c) ^ (b & c));
    h = g, g = f, f = e, e = d + t1, d = c, c = b, b = a, a = t1 + t2;
  }
  const std::array<std::uint32_t, 8> add{a, b, c, d, e, f, g, h};
  for (std::size_t i = 0; i < 8; ++i) state[i] += add[i];
}

#if defined(__x86_64__)
bool has_sha_instructions() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (b >> 29 & 1) != 0;
}

__m128i load(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }

// Four rounds at a time; the instructions take the state as (a, b, e, f) and (c, d, g, h), the first of each in the highest lane.
__attribute__((target("sha,sse4.1"))) void compress_by_instructions(State& state, const std::uint8_t* data, std::size_t blocks) {
  const __m128i big_endian = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
  std::array<int, 8> s = std::bit_cast<std::array<int, 8>>(state);
  __m128i abef = _mm_set_epi32(s[0], s[1], s[4], s[5]), cdgh = _mm_set_epi32(s[2], s[3], s[6], s[7]);
  for (; blocks > 0; --blocks, data += 64) {
    const __m128i abef_before = abef, cdgh_before = cdgh;
    __m128i w[4];  // the last 16 words of the schedule
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      __m128i& now = w[i % 4];
      if (i < 4) {
        now = _mm_shuffle_epi8(load(data + 16 * i), big_endian);
      } else {
        const __m128i last = w[(i + 3) % 4];
        const __m128i sum = _mm_add_epi32(_mm_sha256msg1_epu32(now, w[(i + 1) % 4]), _mm_alignr_epi8(last, w[(i + 2) % 4], 4));
        now = _mm_sha256msg2_epu32(sum, last);
      }
      const __m128i added = _mm_add_epi32(now, load(kRoundConstants.data() + 4 * i));
      cdgh = _mm_sha256rnds2_epu32(cdgh, abef, added);
      abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(added, 0x0e));
    }
    abef = _mm_add_epi32(abef, abef_before);
    cdgh = _mm_add_epi32(cdgh, cdgh_before);
  }
  s = {_mm_extract_epi32(abef, 3), _mm_extract_epi32(abef, 2), _mm_extract_epi32(cdgh, 3), _mm_extract_epi32(cdgh, 2),
       _mm_extract_epi32(abef, 1), _mm_extract_epi32(abef, 0), _mm_extract_epi32(cdgh, 1), _mm_extract_epi32(cdgh, 0)};
  state = std::bit_cast<State>(s);
}
#else
bool has_sha_instructions() { return false; }
void compress_by_instructions(State&, const std::uint8_t*, std::size_t) {}
#endif

}  // namespace

Sha256::Sha256(bool portable) : portable_(portable) {
  static const bool instructions = has_sha_instructions();
  portable_ = portable_ || !instructions;
}

void Sha256::compress(const std::uint8_t* data, std::size_t blocks) {
  if (!portable_) return compress_by_instructions(state_, data, blocks);
  for (; blocks > 0; --blocks, data += 64) compress_portably(state_, data);
}

void Sha256::update(const void* data, std::size_t bytes) {
  const auto* input = static_cast<const std::uint8_t*>(data);
  total_bytes_ += bytes;
  while (bytes > 0) {
    if (const std::size_t blocks = bytes / 64; pending_bytes_ == 0 && blocks > 0) {
      compress(input, blocks);
      input += 64 * blocks, bytes -= 64 * blocks;
      continue;
    }
    const std::size_t take = std::min(bytes, 64 - pending_bytes_);
    std::memcpy(pending_.data() + pending_bytes_, input, take);
    pending_bytes_ += take, input += take, bytes -= take;
    if (pending_bytes_ == 64) {
      compress(pending_.data(), 1);
      pending_bytes_ = 0;
    }
  }
}

std::string Sha256::hex_digest() {
  const std::uint64_t bits = total_bytes_ * 8;
  const std::uint8_t one = 0x80, zero = 0;
  update(&one, 1);
  while (pending_bytes_ != 56) update(&zero, 1);
  std::array<std::uint8_t, 8> length;
  for (std::size_t i = 0; i < 8; ++i) length[i] = static_cast<std::uint8_t>(bits >> (56 - 8 * i));
  update(length.data(), 8);
  std::string text;
  for (const std::uint32_t word : state_) {
    for (int shift = 28; shift >= 0; shift -= 4) text += "0123456789abcdef"[(word >> shift) & 15];
  }
  return text;
}

}  // namespace loopgauge
