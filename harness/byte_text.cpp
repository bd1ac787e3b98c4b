// SPDX-License-Identifier: Apache-2.0
#include "harness/byte_text.hpp"

#include <array>
#include <cstdio>

namespace loopgauge::harness {

namespace {

// A byte that is not printed as it is.
std::string escaped(unsigned byte) {
  if (byte == '\n') return "\\n";
  if (byte == '\t') return "\\t";
  std::array<char, 8> buffer{};
  std::snprintf(buffer.data(), buffer.size(), "\\x%02x", byte);
  return buffer.data();
}

}  // namespace

std::string printable_text(std::span<const std::int32_t> tokens) {
  std::string text;
  for (std::int32_t token : tokens) {
    if (token == '\\') {
      text += "\\\\";
    } else if (token >= 0x20 && token < 0x7f) {
      text += static_cast<char>(token);
    } else if (token == 256) {
      text += "<bos>";
    } else if (token == 257) {
      text += "<eos>";
    } else if (token == 258) {
      text += "<pad>";
    } else if (token >= 0 && token < 256) {
      text += escaped(static_cast<unsigned>(token));
    } else {
      text.append("<").append(std::to_string(token)).append(">");
    }
  }
  return text;
}

}  // namespace loopgauge::harness
