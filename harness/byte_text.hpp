// SPDX-License-Identifier: Apache-2.0
// Tokens of a byte-level vocabulary as text: ids 0..255 are bytes, 256 BOS, 257 EOS, 258 PAD, the rest unused (vocabulary of 264).
#pragma once

#include <cstdint>
#include <span>
#include <string>

namespace loopgauge::harness {

inline constexpr int kByteVocabulary = 264;

// One printable ASCII line: other bytes as \n, \t, \\ or \xNN, special tokens as <bos>, <eos>, <pad>, <NNN>.
std::string printable_text(std::span<const std::int32_t> tokens);

}  // namespace loopgauge::harness
