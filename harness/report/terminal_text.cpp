// SPDX-License-Identifier: Apache-2.0
#include "harness/report/terminal_text.hpp"

#include <algorithm>
#include <array>
#include <cstdarg>
#include <cstdio>

#include "harness/report/markup.hpp"

namespace loopgauge::harness {

namespace {

// A byte that is not part of a character, a line break or a tab.
std::string escaped_byte(char byte) {
  if (byte == '\n') return "\\n";
  if (byte == '\t') return "\\t";
  return formatted("\\x%02x", static_cast<unsigned>(static_cast<unsigned char>(byte)));
}

// A character as JSON writes it, so that JSON text keeps its value.
std::string escaped_character(std::string_view sequence) {
  unsigned code = static_cast<unsigned char>(sequence[0]) & (sequence.size() == 1 ? 0x7fu : 0xffu >> (sequence.size() + 1));
  for (const char c : sequence.substr(1)) code = code << 6 | (static_cast<unsigned char>(c) & 0x3f);
  return formatted("\\u%04x", code);
}

}  // namespace

std::string without_controls(std::string_view text, LineBreaks breaks) {
  std::string shown;
  shown.reserve(text.size());
  for (std::size_t i = 0; i < text.size();) {
    const std::size_t length = sequence_length(text.substr(i));
    const std::string_view sequence = text.substr(i, std::max<std::size_t>(length, 1));
    i += sequence.size();
    if (length == 0) {
      shown += escaped_byte(sequence[0]);
    } else if (breaks == LineBreaks::escaped && (sequence == "\n" || sequence == "\t")) {
      shown += escaped_byte(sequence[0]);
    } else if (is_control(sequence) || is_reordering(sequence)) {
      shown += escaped_character(sequence);
    } else {
      shown += sequence;
    }
  }
  return shown;
}

EscapedOutput::EscapedOutput(std::ostream& stream) : stream_(stream), target_(stream.rdbuf()) { stream_.rdbuf(this); }

EscapedOutput::~EscapedOutput() {
  const std::string rest = without_controls(pending_, LineBreaks::kept);
  target_->sputn(rest.data(), static_cast<std::streamsize>(rest.size()));
  target_->pubsync();
  stream_.rdbuf(target_);
}

std::streamsize EscapedOutput::xsputn(const char* bytes, std::streamsize count) {
  pending_.append(bytes, static_cast<std::size_t>(count));
  // What may be the beginning of a character waits for its end.
  std::size_t whole = pending_.size();
  for (std::size_t back = 1; back <= std::min<std::size_t>(3, pending_.size()); ++back) {
    const auto byte = static_cast<unsigned char>(pending_[pending_.size() - back]);
    if ((byte & 0xc0) == 0x80) continue;  // continues a character
    const std::size_t length = byte >= 0xf0 ? 4 : byte >= 0xe0 ? 3 : byte >= 0xc0 ? 2 : 1;
    if (length > back) whole = pending_.size() - back;
    break;
  }
  const std::string shown = without_controls(std::string_view(pending_).substr(0, whole), LineBreaks::kept);
  pending_.erase(0, whole);
  return target_->sputn(shown.data(), static_cast<std::streamsize>(shown.size())) == static_cast<std::streamsize>(shown.size()) ? count : 0;
}

EscapedOutput::int_type EscapedOutput::overflow(int_type character) {
  if (traits_type::eq_int_type(character, traits_type::eof())) return traits_type::not_eof(character);
  const char byte = traits_type::to_char_type(character);
  return xsputn(&byte, 1) == 1 ? character : traits_type::eof();
}

int EscapedOutput::sync() { return target_->pubsync(); }

std::string formatted(const char* format, ...) {
  va_list arguments, again;
  va_start(arguments, format);
  va_copy(again, arguments);
  const int length = std::vsnprintf(nullptr, 0, format, arguments);
  va_end(arguments);
  std::string text(static_cast<std::size_t>(std::max(length, 0)), '\0');
  std::vsnprintf(text.data(), text.size() + 1, format, again);
  va_end(again);
  return text;
}

}  // namespace loopgauge::harness
