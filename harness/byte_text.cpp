// SPDX-License-Identifier: Apache-2.0
#include "harness/byte_text.hpp"

#include <array>
#include <cstdio>

namespace loopgauge::harness {

std::string printable_text(std::span<const std::int32_t> tokens) {
  std::string text;
  for (std::int32_t token : tokens) {
    if (token == '\n') {
      text += "\\n";
    } else if (token == '\t') {
      text += "\\t";
    } else if (token == '\\') {
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
      std::array<char, 8> buffer{};
      std::snprintf(buffer.data(), buffer.size(), "\\x%02x", static_cast<unsigned>(token));
      text += buffer.data();
    } else {
      text.append("<").append(std::to_string(token)).append(">");
    }
  }
  return text;
}

}  // namespace loopgauge::harness
