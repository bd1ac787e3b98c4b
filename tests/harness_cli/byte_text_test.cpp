// SPDX-License-Identifier: Apache-2.0
#include "harness/byte_text.hpp"

#include <gtest/gtest.h>

#include <vector>

namespace loopgauge::harness {
namespace {

TEST(ByteText, IsOnePrintableLine) {
  EXPECT_EQ(printable_text(std::vector<std::int32_t>{256, 'H', 'i', '\n', '\t', '\\', 0, 0x7f, 0xe9, 257, 258, 263, -1}),
            "<bos>Hi\\n\\t\\\\\\x00\\x7f\\xe9<eos><pad><263><-1>");
  EXPECT_EQ(printable_text({}), "");
}

TEST(ByteText, EveryByteHasItsOwnText) {
  std::vector<std::string> seen;
  for (std::int32_t byte = 0; byte < kByteVocabulary; ++byte) {
    const std::string text = printable_text(std::vector<std::int32_t>{byte});
    for (char c : text) EXPECT_TRUE(c >= 0x20 && c < 0x7f) << byte;
    for (const std::string& other : seen) EXPECT_NE(text, other) << byte;
    seen.push_back(text);
  }
}

}  // namespace
}  // namespace loopgauge::harness
