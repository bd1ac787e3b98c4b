// SPDX-License-Identifier: Apache-2.0
// Test vectors of FIPS 180-4 / NIST CAVP.
#include "models/sha256.hpp"

#include <gtest/gtest.h>

#include <string>

namespace loopgauge {
namespace {

std::string digest(const std::string& text) {
  Sha256 sha;
  sha.update(text.data(), text.size());
  return sha.hex_digest();
}

TEST(Sha256, Empty) { EXPECT_EQ(digest(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"); }

TEST(Sha256, OneBlock) { EXPECT_EQ(digest("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"); }

TEST(Sha256, TwoBlocks) {
  EXPECT_EQ(digest("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
}

TEST(Sha256, LongerThanTwoBlocks) {
  EXPECT_EQ(digest("abcdefghbcdefghicdefghijdefghijkefghijklfghijklmghijklmnhijklmnoijklmnopjklmnopqklmnopqrlmnopqrsmnopqrstnopqrstu"),
            "cf5b16a778af8380036ce59e7b0492370b249b11e8f07a51afac45037afee9d1");
}

TEST(Sha256, MillionLetters) {
  EXPECT_EQ(digest(std::string(1000000, 'a')), "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

// Every way of cutting a message into two updates gives one digest; lengths around the padding's limits (55, 56, 63, 64).
TEST(Sha256, CutsDoNotMatter) {
  for (const std::size_t length : {1u, 55u, 56u, 57u, 63u, 64u, 65u, 119u, 120u, 128u}) {
    std::string text;
    for (std::size_t i = 0; i < length; ++i) text += static_cast<char>(i * 7 + 1);
    for (std::size_t cut = 0; cut <= length; ++cut) {
      Sha256 sha;
      sha.update(text.data(), cut);
      sha.update(text.data() + cut, length - cut);
      ASSERT_EQ(sha.hex_digest(), digest(text)) << length << " cut at " << cut;
    }
  }
}

TEST(Sha256, TheProcessorsInstructionsDoNotMatter) {
  std::string text;
  for (std::size_t i = 0; i < 5000; ++i) text += static_cast<char>(i * i * 31 + i / 7);
  for (std::size_t length = 0; length <= text.size(); length += length < 260 ? 1 : 237) {
    Sha256 portable(true);
    portable.update(text.data(), length);
    ASSERT_EQ(portable.hex_digest(), digest(text.substr(0, length))) << length;
  }
}

}  // namespace
}  // namespace loopgauge
