// SPDX-License-Identifier: Apache-2.0
// SHA-256 (FIPS 180-4), for fingerprints of files and digests of results.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace loopgauge {

class Sha256 {
 public:
  // `portable`: without the processor's SHA instructions, which are taken where it has them. The digest is the same.
  explicit Sha256(bool portable = false);
  void update(const void* data, std::size_t bytes);
  // Finishes and returns 64 lower-case hex digits. The object must not be used afterwards.
  std::string hex_digest();

 private:
  void compress(const std::uint8_t* data, std::size_t blocks);
  std::array<std::uint32_t, 8> state_{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<std::uint8_t, 64> pending_{};
  std::size_t pending_bytes_ = 0;
  std::uint64_t total_bytes_ = 0;
  bool portable_;
};

}  // namespace loopgauge
