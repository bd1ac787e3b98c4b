// SPDX-License-Identifier: Apache-2.0
// Control messages: their bytes, and that nothing else is taken for one.
#include "models/handoff/message.hpp"

#include <gtest/gtest.h>

#include "models/handoff/bytes.hpp"
#include "tests/handoff/handoff_fixture.hpp"

namespace loopgauge::test {
namespace {

using handoff::Message;
using handoff::MessageKind;

std::vector<Message> samples() {
  std::vector<Message> all(10);
  all[0].kind = MessageKind::offer;
  all[0].descriptor = serialize(descriptor_of(small_model(), settings("t1s1q1"), 200));
  all[1].kind = MessageKind::arrived;
  all[1].partition = {7, 3, 0x100000000, 4096};
  all[2].kind = MessageKind::commit;
  all[2].partitions = 9;
  all[2].summaries = {{5, 6}, {7, 8}};
  all[3].kind = MessageKind::writes_ended;
  all[4].kind = MessageKind::reserved;
  all[4].destinations = {{0xABCDEF, 64}};
  all[5].kind = MessageKind::refused;
  all[5].reason = "no room";
  all[6].kind = MessageKind::activated;
  all[7].kind = MessageKind::failed;
  all[7].reason = "checksum";
  all[8].kind = MessageKind::cancel;
  all[9].kind = MessageKind::released;
  for (Message& message : all) message.transfer = {0x1122334455667788, 2};
  return all;
}

TEST(HandoffMessage, EachComesBackAsItWas) {
  for (const Message& message : samples()) EXPECT_EQ(handoff::parse_message(serialize(message)), message) << to_string(message.kind);
}

TEST(HandoffMessage, HasTheseBytes) {
  const std::string head =
      "4c4750444d455347"
      "01000000";  // LGPDMESG, version
  const std::string transfer =
      "8877665544332211"
      "0200000000000000";
  EXPECT_EQ(handoff::to_hexadecimal(serialize(samples()[1])), head + "02000000" + transfer +
                                                                  "07000000"
                                                                  "03000000"
                                                                  "0000000001000000"
                                                                  "0010000000000000");
  EXPECT_EQ(handoff::to_hexadecimal(serialize(samples()[2])), head + "03000000" + transfer +
                                                                  "09000000"
                                                                  "02000000"
                                                                  "0500000000000000"
                                                                  "0600000000000000"
                                                                  "0700000000000000"
                                                                  "0800000000000000");
  EXPECT_EQ(handoff::to_hexadecimal(serialize(samples()[4])), head + "10000000" + transfer +
                                                                  "01000000"
                                                                  "efcdab0000000000"
                                                                  "4000000000000000");
  EXPECT_EQ(handoff::to_hexadecimal(serialize(samples()[5])), head + "11000000" + transfer +
                                                                  "07000000"
                                                                  "6e6f20726f6f6d");
  EXPECT_EQ(handoff::to_hexadecimal(serialize(samples()[8])), head + "14000000" + transfer);
}

TEST(HandoffMessage, ALongReasonIsCut) {
  Message message = samples()[5];
  message.reason = std::string(5000, 'x');
  EXPECT_EQ(handoff::parse_message(serialize(message)).reason.size(), handoff::kMaximumReasonBytes);
}

TEST(HandoffMessage, RefusesWhatItDoesNotKnow) {
  const auto refusal = [](std::vector<std::byte> bytes) -> std::string {
    try {
      handoff::parse_message(bytes);
      return "accepted";
    } catch (const handoff::HandoffError& error) {
      return error.what();
    }
  };
  auto bytes = serialize(samples()[1]);
  bytes[8] = std::byte{9};
  EXPECT_EQ(refusal(bytes), "message: version 9 is not the version 1 that can be read");
  bytes = serialize(samples()[1]);
  bytes[12] = std::byte{99};
  EXPECT_EQ(refusal(bytes), "message: kind 99 is not known to version 1");
  bytes = serialize(samples()[1]);
  bytes.push_back(std::byte{0});
  EXPECT_NE(refusal(bytes).find("1 bytes follow its end"), std::string::npos);
  bytes = serialize(samples()[2]);
  for (std::size_t i = 36; i < 40; ++i) bytes[i] = std::byte{0xFF};
  EXPECT_NE(refusal(bytes).find("regions"), std::string::npos) << "a count that does not fit allocates nothing";
  for (const Message& message : samples()) {
    const auto good = serialize(message);
    for (std::size_t count = 0; count < good.size(); ++count)
      EXPECT_NE(refusal({good.begin(), good.begin() + static_cast<std::ptrdiff_t>(count)}), "accepted");
  }
}

TEST(HandoffMessage, ArbitraryBytesAreRefusedCleanly) {
  std::mt19937 generator(11);
  const std::vector<Message> all = samples();
  int accepted = 0;
  for (int i = 0; i < 40000; ++i) {
    auto bytes = serialize(all[generator() % all.size()]);
    for (unsigned changes = 1 + generator() % 3; changes > 0; --changes) mutate(bytes, generator);
    try {
      const Message message = handoff::parse_message(bytes);
      EXPECT_EQ(serialize(message), bytes) << "one message has two spellings";
      ++accepted;
    } catch (const handoff::HandoffError&) {
    }
  }
  EXPECT_GT(accepted, 100);
}

}  // namespace
}  // namespace loopgauge::test
