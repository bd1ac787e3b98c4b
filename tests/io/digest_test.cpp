// SPDX-License-Identifier: Apache-2.0
#include "harness/io/digest.hpp"

#include <gtest/gtest.h>

#include <bit>
#include <functional>

#include "tests/io/hand_made_record.hpp"

namespace loopgauge::harness {
namespace {

using test::hand_made_record;

// Computed by a second implementation of the serialization (Python, hashlib), so that both it and SHA-256 are pinned.
TEST(Digest, Golden) {
  const std::map<std::string, std::string> expected{
      {"active", "b96fbba7c07f6e22d041d6e3230a4e715a0cce5bb1567636532a21a6e381c93b"},
      {"all", "4fd2ce499df335e5bf69c337a6d29cc3cec9b9430f15f05ec0fd1d09cf6b98dc"},
      {"codec", "1aae66d39c42e21fd1d08f9bb3296a263a92dfe74d7d198ee6efaf1ed1486e41"},
      {"encoded_frontier", "36dbc6fd6c3869ef1540fb4ed285e2c7a218a4cc97fe17abf93cff25abdf7c00"},
      {"exits", "9efaf717654becde78791c713f6bb5b136d30b17d382a8b537860358b3b0b50e"},
      {"gate", "d96ab2a7c4e13baa41333f95c113b17a22b169ee0166a6ae8c3d8a20e4578877"},
      {"hidden", "114e0b36a21192820b4006147124cb75c277c31c21c82351ad22a0244aec0fc4"},
      {"keys", "6e0ffef13d8e94b3f1f50227e6facb4f573fec48e43a42bd84761bc608779c58"},
      {"kv", "dc726585d436315a280acfb65eb9ddac1156159b4fc9360183433cd42dad3a56"},
      {"logits", "faead4f10dc9146b2c850bbdb83eee053ca406bc0d61443994d03fe6a53103ba"},
      {"mass", "e618402f6af66448e206ea0f0fe0a011617d8459f10e4615bce4a7cb7c9ddc0d"},
      {"scores", "a58ae5d9c2ae14e952fb2f98ef95d730a839780e3e1ab558db52b01e0b967dfc"},
      {"tokens", "7ed934ffad8fec60a30a2b509c58c7716e9fadec068779bec2f6929420caeb95"},
  };
  EXPECT_EQ(digests(hand_made_record()), expected);
}

struct Change {
  const char* name;
  std::function<void(RequestRecord&)> apply;
};

// Every tensor reaches exactly its own group's digest.
TEST(Digest, EachGroupCoversItsTensorsAndNothingElse) {
  const std::vector<Change> changes{
      {"tokens", [](RequestRecord& r) { r.tokens[1] = 0; }},
      {"logits", [](RequestRecord& r) { r.logits.data.back() += 1; }},
      {"logits", [](RequestRecord& r) { r.logits.data[1] = 0.0f; }},  // was -0
      {"logits",
       [](RequestRecord& r) {
         r.logits.shape = {7, 3};
       }},
      {"hidden", [](RequestRecord& r) { r.hidden[3].data[29] += 1; }},
      {"hidden", [](RequestRecord& r) { std::swap(r.hidden[2], r.hidden[3]); }},
      {"gate", [](RequestRecord& r) { r.gate.data[23] += 1; }},
      {"exits", [](RequestRecord& r) { r.exit_depths[0] = 3; }},
      {"scores", [](RequestRecord& r) { r.scores[1][3] = 0.0f; }},
      {"active", [](RequestRecord& r) { r.active[1][0] = 1; }},
      {"active", [](RequestRecord& r) { std::swap(r.active[0], r.active[1]); }},
      {"keys", [](RequestRecord& r) { r.keys[0].layers[1].data[3] = 4; }},
      {"mass", [](RequestRecord& r) { r.keys[0].mass.data[3] += 1; }},
      {"kv", [](RequestRecord& r) { r.kv[7].v.data[35] += 1; }},
      {"kv",
       [](RequestRecord& r) {
         std::swap(r.kv[0].k, r.kv[0].v);
         r.kv[0].k.data[0] = 9;
       }},
      {"encoded_frontier", [](RequestRecord& r) { r.encoded_frontier[2] = 0; }},
      {"codec", [](RequestRecord& r) { r.blocks[0].positions.begin = 1; }},
      {"codec", [](RequestRecord& r) { r.blocks[0].streams[2].rows[0] = 0; }},
      {"codec", [](RequestRecord& r) { r.blocks[0].streams[1].layers[1].k_codes.data[0] ^= 1; }},
      {"codec", [](RequestRecord& r) { r.blocks[0].streams[1].layers[1].v_scale.data[3] += 1; }},
      {"codec", [](RequestRecord& r) { r.blocks[0].streams[1].layers[1].k_min.data[0] += 1; }},
  };
  const std::map<std::string, std::string> before = digests(hand_made_record());
  for (const Change& change : changes) {
    RunRecord record = hand_made_record();
    change.apply(record.requests[0]);
    for (const auto& [group, digest] : digests(record)) {
      EXPECT_EQ(digest != before.at(group), group == change.name || group == "all") << "changed " << change.name << ", looked at " << group;
    }
  }
}

TEST(Digest, NanPayloadsAreOneValue) {
  RunRecord record = hand_made_record();
  record.requests[0].scores[1][0] = std::bit_cast<float>(0xffc12345u);
  EXPECT_EQ(digests(record), digests(hand_made_record()));
}

TEST(Digest, MetadataIsNotCovered) {
  RunRecord record = hand_made_record();
  record.executor = "optimized";
  record.mode = "split";
  EXPECT_EQ(digests(record), digests(hand_made_record()));
}

TEST(Digest, StepsWithoutSelectionAreTheSameRecordedOrNot) {
  RunRecord record = hand_made_record();
  record.requests[0].keys.resize(1);
  EXPECT_EQ(digests(record), digests(hand_made_record()));
}

TEST(Digest, OrderOfRequestsCounts) {
  RunRecord record = hand_made_record();
  std::swap(record.requests[0], record.requests[1]);
  EXPECT_NE(digests(record).at("tokens"), digests(hand_made_record()).at("tokens"));
}

}  // namespace
}  // namespace loopgauge::harness
