// SPDX-License-Identifier: Apache-2.0
// Tokens of a byte-level vocabulary as text: ids 0..255 are bytes, 256 BOS, 257 EOS, 258 PAD, the rest unused (vocabulary of 264).
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace loopgauge::harness {

inline constexpr int kByteVocabulary = 264;

// One printable ASCII line: other bytes as \n, \t, \\ or \xNN, special tokens as <bos>, <eos>, <pad>, <NNN>.
std::string printable_text(std::span<const std::int32_t> tokens);

// UTF-8 that a file holds, for a terminal, which would obey control characters: these as \n, \t or \xNN, all else as it is.
std::string without_controls(std::string_view text);

}  // namespace loopgauge::harness
