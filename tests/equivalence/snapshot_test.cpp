// SPDX-License-Identifier: Apache-2.0
// Snapshots as bytes: what is written is read, and nothing else is accepted. No device is needed.
#include "optimized/snapshot.hpp"

#include <gtest/gtest.h>

#include <cstring>

namespace loopgauge::test {
namespace {

using namespace optimized;

SnapshotOwner owner() {
  return {std::string(64, 'a'), "{\"window\":64}", {2, 3, 64, 192}, 100, 140, std::string(64, 'b'), "2 of trace four, generation 3"};
}

RequestSnapshot state() {
  RequestSnapshot s;
  s.complete_windows = 1;
  s.committed = 110;
  s.encoded = 64;
  s.encoded_ahead = 128;
  s.unreadable = 110;
  s.incarnations = 11;
  s.kv.max_positions = 140;
  s.kv.maps.resize(3);
  s.kv.maps[1].active[2] = 0x123456789abcdef0u;
  s.kv.maps[1].rows[3] = 13;
  s.kv.resident = {0, 15, 3};
  s.kv.blocks = {{{0, 64}, {64, 64, 16, 7}}};
  s.windows = {{1, {64, 16}}};
  s.row_position = 110;
  s.row_completed = 2;
  s.row_last_loop = 3;
  s.row_depth_given = true;
  s.has_reference = true;
  s.reference_state = ReferenceStore::State::reusable;
  s.row_key = {5, 10};
  return s;
}

std::vector<std::byte> sealed(const SnapshotOwner& of, std::size_t payload_bytes = 1000) {
  std::vector<std::byte> snapshot = begin_snapshot(of, state(), payload_bytes);
  std::size_t i = 0;
  for (std::byte& byte : payload_of(snapshot)) byte = static_cast<std::byte>(++i * 37);
  seal_snapshot(snapshot);
  return snapshot;
}

std::string refusal(std::span<const std::byte> snapshot, const SnapshotOwner& of = owner()) {
  try {
    static_cast<void>(open_snapshot(snapshot, of));
    return "";
  } catch (const SnapshotError& error) {
    return error.what();
  }
}

TEST(Snapshot, GivesBackWhatWasPutIn) {
  const std::vector<std::byte> snapshot = sealed(owner());
  const OpenedSnapshot opened = open_snapshot(snapshot, owner());
  const RequestSnapshot& s = opened.state;
  const RequestSnapshot expected = state();
  EXPECT_EQ(s.complete_windows, 1);
  EXPECT_EQ(s.committed, 110);
  EXPECT_EQ(s.encoded, 64);
  EXPECT_EQ(s.encoded_ahead, 128);
  EXPECT_EQ(s.unreadable, 110);
  EXPECT_EQ(s.incarnations, 11u);
  EXPECT_EQ(s.kv.max_positions, 140);
  ASSERT_EQ(s.kv.maps.size(), 3u);
  EXPECT_EQ(std::memcmp(s.kv.maps.data(), expected.kv.maps.data(), sizeof(ActivityMap) * 3), 0);
  EXPECT_EQ(s.kv.resident, expected.kv.resident);
  EXPECT_EQ(s.kv.blocks, expected.kv.blocks);
  EXPECT_EQ(s.windows, expected.windows);
  EXPECT_EQ(s.row_position, 110);
  EXPECT_EQ(s.row_completed, 2);
  EXPECT_EQ(s.row_last_loop, 3);
  EXPECT_TRUE(s.row_depth_given);
  EXPECT_FALSE(s.row_committed);
  EXPECT_TRUE(s.has_reference);
  EXPECT_EQ(s.reference_state, ReferenceStore::State::reusable);
  EXPECT_EQ(s.row_key, expected.row_key);
  ASSERT_EQ(opened.payload.size(), 1000u);
  EXPECT_EQ(opened.payload[2], std::byte{111});
}

TEST(Snapshot, AnyChangedByteIsNoticed) {
  const std::vector<std::byte> snapshot = sealed(owner(), 100);
  for (std::size_t i = 0; i < snapshot.size(); ++i) {
    for (const int bit : {0, 7}) {
      std::vector<std::byte> changed = snapshot;
      changed[i] ^= static_cast<std::byte>(1 << bit);
      EXPECT_NE(refusal(changed), "") << "byte " << i << ", bit " << bit;
    }
  }
}

TEST(Snapshot, AnyOtherLengthIsNoticed) {
  const std::vector<std::byte> snapshot = sealed(owner(), 100);
  for (std::size_t length = 0; length < snapshot.size(); ++length) EXPECT_NE(refusal(std::span(snapshot).first(length)), "") << length;
  std::vector<std::byte> longer = snapshot;
  longer.push_back(std::byte{0});
  EXPECT_NE(refusal(longer), "");
}

TEST(Snapshot, TheFieldThatDiffersIsNamed) {
  const std::vector<std::byte> snapshot = sealed(owner());
  EXPECT_EQ(refusal(snapshot), "");
  const auto differs = [&](const char* field, auto change) {
    SnapshotOwner other = owner();
    change(other);
    EXPECT_NE(refusal(snapshot, other).find(field), std::string::npos) << field << ": " << refusal(snapshot, other);
  };
  differs("model_sha256", [](SnapshotOwner& o) { o.model_sha256[5] = 'c'; });
  differs("configuration", [](SnapshotOwner& o) { o.configuration = "{\"window\":128}"; });
  differs("layers", [](SnapshotOwner& o) { o.extents[0] = 4; });
  differs("heads", [](SnapshotOwner& o) { o.extents[1] = 4; });
  differs("head_dim", [](SnapshotOwner& o) { o.extents[2] = 128; });
  differs("hidden", [](SnapshotOwner& o) { o.extents[3] = 256; });
  differs("prompt_length", [](SnapshotOwner& o) { o.prompt_length = 99; });
  differs("capacity", [](SnapshotOwner& o) { o.capacity = 141; });
  differs("tokens_sha256", [](SnapshotOwner& o) { o.tokens_sha256[0] = 'x'; });
  differs("request", [](SnapshotOwner& o) { o.request = "2 of trace four, generation 4"; });
  std::vector<std::byte> newer = snapshot;
  newer[8] = std::byte{3};
  seal_snapshot(newer);
  EXPECT_NE(refusal(newer).find("version is 3, this run needs 2"), std::string::npos) << refusal(newer);
  std::vector<std::byte> unsealed = snapshot;
  payload_of(unsealed)[0] ^= std::byte{1};
  EXPECT_NE(refusal(unsealed).find("checksum"), std::string::npos);
}

// A valid checksum over a description that lies about its lists: refused in the same words, nothing read out of bounds.
TEST(Snapshot, ListsThatExceedTheDescriptionAreRefused) {
  std::vector<std::byte> snapshot = sealed(owner());
  const std::uint64_t absurd = ~std::uint64_t{0} / 2;
  std::memcpy(snapshot.data() + 96, &absurd, sizeof absurd);  // the length of the first text
  seal_snapshot(snapshot);
  EXPECT_NE(refusal(snapshot).find("exceeds the description"), std::string::npos) << refusal(snapshot);
}

}  // namespace
}  // namespace loopgauge::test
