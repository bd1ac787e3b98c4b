// SPDX-License-Identifier: Apache-2.0
// Text on its way to a terminal or a log, which would obey what a file put into it.
#pragma once

#include <ostream>
#include <streambuf>
#include <string>
#include <string_view>

namespace loopgauge::harness {

enum class LineBreaks { escaped, kept };  // and tabs

// UTF-8 that a file holds, for a terminal, which would obey control characters (C0, DEL, C1) and reorder text at others: these as \n, \t or \u001b, bytes
// that are no UTF-8 as \x9b, all else as it is.
std::string without_controls(std::string_view text, LineBreaks breaks = LineBreaks::escaped);

// Everything that is written to `stream` while the object lives is shown so, line breaks and tabs kept. The one place for it is the program's standard
// output and error: what commands print may come from any file. JSON text keeps its value.
class EscapedOutput : private std::streambuf {
 public:
  explicit EscapedOutput(std::ostream& stream);
  ~EscapedOutput() override;
  EscapedOutput(const EscapedOutput&) = delete;
  EscapedOutput& operator=(const EscapedOutput&) = delete;

 private:
  std::streamsize xsputn(const char* bytes, std::streamsize count) override;
  int_type overflow(int_type character) override;
  int sync() override;

  std::ostream& stream_;
  std::streambuf* target_;
  std::string pending_;  // of a character whose end was not written yet
};

// printf into a string of any length.
[[gnu::format(printf, 1, 2)]] std::string formatted(const char* format, ...);

}  // namespace loopgauge::harness
