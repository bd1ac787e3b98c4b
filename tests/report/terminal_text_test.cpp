// SPDX-License-Identifier: Apache-2.0
#include "harness/report/terminal_text.hpp"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <sstream>
#include <string>

#include "harness/report/text_table.hpp"

namespace loopgauge::harness {
namespace {

// Controls of one byte, of two (C1: U+009B begins what ESC [ does), text order, and bytes that are no UTF-8.
const std::string kHostile = "a\x1b[31mb\nc\td\x7f\r\b\xc2\x9b" "2J\xe2\x80\xae" "e\x9b\xe2\x80";
constexpr const char* kShown = "a\\u001b[31mb\nc\td\\u007f\\u000d\\u0008\\u009b2J\\u202ee\\x9b\\xe2\\x80";

TEST(TerminalText, ATerminalIsToldNothingByAFile) {
  EXPECT_EQ(without_controls(kHostile, LineBreaks::kept), kShown);
  EXPECT_EQ(without_controls("a\nb\tc"), "a\\nb\\tc");
  EXPECT_EQ(without_controls("Grüße \\ <x> … 🙂"), "Grüße \\ <x> … 🙂");
}

TEST(TerminalText, AStreamShowsTheSameHoweverItIsWritten) {
  for (const std::string& text : {kHostile, std::string("Grüße … 🙂")}) {
    for (std::size_t piece = 1; piece <= text.size(); ++piece) {
      std::ostringstream stream;
      {
        const EscapedOutput escaped(stream);
        for (std::size_t at = 0; at < text.size(); at += piece) stream << text.substr(at, piece) << std::flush;
        stream << 7;
        stream.put('!');
      }
      EXPECT_EQ(stream.str(), without_controls(text, LineBreaks::kept) + "7!") << piece;
    }
  }
}

TEST(TerminalText, JsonKeepsItsValue) {
  const nlohmann::json value{{"a\x7f", "b\xc2\x9b\\\x1b\xe2\x80\xae"}};
  EXPECT_EQ(nlohmann::json::parse(without_controls(value.dump(1), LineBreaks::kept)), value);
}

TEST(TerminalText, FormattedHasAnyLength) { EXPECT_EQ(formatted("%s %d", std::string(5000, 'x').c_str(), 7), std::string(5000, 'x') + " 7"); }

TEST(TerminalText, NoNumberLosesItsLastDigits) {
  EXPECT_EQ(percent(2e60, 0).size(), 63 + std::string(" %").size()) << percent(2e60, 0);
  EXPECT_EQ(short_number(-1.5e-300, 3), "-1.5e-300");
}

}  // namespace
}  // namespace loopgauge::harness
