// SPDX-License-Identifier: Apache-2.0
#include "harness/report/markup.hpp"

#include <algorithm>
#include <array>
#include <cstdint>

namespace loopgauge::harness {

namespace {

constexpr std::string_view kReplacement = "\xef\xbf\xbd";  // U+FFFD
constexpr std::string_view kEllipsis = "\xe2\x80\xa6";

// U+FFFE and U+FFFF are well-formed UTF-8 but not characters of XML 1.0.
bool is_noncharacter(std::string_view sequence) { return sequence == "\xef\xbf\xbe" || sequence == "\xef\xbf\xbf"; }

std::string escaped(std::string_view text, bool references_for_breaks) {
  std::string out;
  out.reserve(text.size() + text.size() / 8);
  for (std::size_t i = 0; i < text.size();) {
    const std::size_t length = sequence_length(text.substr(i));
    if (length == 0) {
      out += kReplacement;
      ++i;
      continue;
    }
    const std::string_view sequence = text.substr(i, length);
    i += length;
    const char c = sequence[0];
    if (c == '&')
      out += "&amp;";
    else if (c == '<')
      out += "&lt;";
    else if (c == '>')
      out += "&gt;";
    else if (c == '"')
      out += "&quot;";
    else if (c == '\'')
      out += "&#39;";
    else if (c == '\n' || c == '\t')
      out += references_for_breaks ? (c == '\n' ? "&#10;" : "&#9;") : std::string(1, c);
    else if (is_control(sequence) || is_noncharacter(sequence))
      out += kReplacement;
    else
      out += sequence;
  }
  return out;
}

}  // namespace

std::size_t sequence_length(std::string_view text) {
  const auto byte = [&](std::size_t i) { return i < text.size() ? static_cast<unsigned char>(text[i]) : 0u; };
  const auto within = [&](std::size_t i, unsigned low, unsigned high) { return byte(i) >= low && byte(i) <= high; };
  const unsigned lead = byte(0);
  if (lead < 0x80) return 1;
  if (lead >= 0xc2 && lead <= 0xdf) return within(1, 0x80, 0xbf) ? 2 : 0;
  if (lead >= 0xe0 && lead <= 0xef) {
    const unsigned low = lead == 0xe0 ? 0xa0 : 0x80, high = lead == 0xed ? 0x9f : 0xbf;
    return within(1, low, high) && within(2, 0x80, 0xbf) ? 3 : 0;
  }
  if (lead >= 0xf0 && lead <= 0xf4) {
    const unsigned low = lead == 0xf0 ? 0x90 : 0x80, high = lead == 0xf4 ? 0x8f : 0xbf;
    return within(1, low, high) && within(2, 0x80, 0xbf) && within(3, 0x80, 0xbf) ? 4 : 0;
  }
  return 0;
}

bool is_control(std::string_view sequence) {
  const auto c = static_cast<unsigned char>(sequence[0]);
  if (sequence.size() == 1) return (c < 0x20 && c != '\n' && c != '\t') || c == 0x7f;
  return sequence.size() == 2 && c == 0xc2 && static_cast<unsigned char>(sequence[1]) < 0xa0;
}

bool is_reordering(std::string_view sequence) {
  return (sequence >= "\xe2\x80\xaa" && sequence <= "\xe2\x80\xae") || (sequence >= "\xe2\x81\xa6" && sequence <= "\xe2\x81\xa9");
}

std::string valid_utf8(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (std::size_t i = 0; i < text.size();) {
    const std::size_t length = sequence_length(text.substr(i));
    if (length == 0)
      out += kReplacement;
    else
      out += text.substr(i, length);
    i += std::max<std::size_t>(length, 1);
  }
  return out;
}

std::string clipped(std::string_view text, std::size_t bytes) {
  std::string out;
  for (std::size_t i = 0; i < text.size();) {
    const std::size_t length = sequence_length(text.substr(i));
    std::string_view sequence = text.substr(i, std::max<std::size_t>(length, 1));
    i += sequence.size();
    if (length == 0 || is_control(sequence) || is_reordering(sequence)) sequence = kReplacement;
    if (out.size() + sequence.size() > bytes) {
      // Room for the ellipsis, a whole character at a time: bytes of the form 10xxxxxx continue one.
      while (!out.empty() && out.size() + kEllipsis.size() > bytes) {
        while ((static_cast<unsigned char>(out.back()) & 0xc0) == 0x80) out.pop_back();
        out.pop_back();
      }
      return out.append(kEllipsis);
    }
    out += sequence;
  }
  return out;
}

std::string html_text(std::string_view text) { return escaped(text, false); }

std::string xml_text(std::string_view text) { return escaped(text, true); }

std::string json_for_script(std::string json) {
  std::string out;
  out.reserve(json.size());
  for (const char c : json) {
    if (c == '<')
      out += "\\u003c";
    else
      out += c;
  }
  return out;
}

std::string markdown_code(std::string_view text) {
  std::string line = valid_utf8(text);
  for (char& c : line) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = ' ';
  }
  if (line.find_first_not_of(' ') == std::string::npos) return "";
  if (line.find_first_of("|\\`") == std::string::npos) return "`" + line + "`";
  // A table is cut at '|' before code spans are seen, and what a backslash before it does differs between places. Character references
  // are never markup.
  std::string out = "<code>";
  for (const char c : line) {
    const auto code = static_cast<unsigned char>(c);
    const bool plain = code >= 0x80 || c == ' ' || (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z');
    out += plain ? std::string(1, c) : "&#" + std::to_string(code) + ";";
  }
  return out + "</code>";
}

std::string base64(std::string_view bytes) {
  constexpr std::string_view kAlphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string out;
  for (std::size_t i = 0; i < bytes.size(); i += 3) {
    std::uint32_t word = 0;
    const std::size_t count = std::min<std::size_t>(3, bytes.size() - i);
    for (std::size_t j = 0; j < 3; ++j) word = word << 8 | (j < count ? static_cast<unsigned char>(bytes[i + j]) : 0u);
    for (std::size_t j = 0; j < 4; ++j) out += j <= count ? kAlphabet[word >> (18 - 6 * j) & 63] : '=';
  }
  return out;
}

}  // namespace loopgauge::harness
