// SPDX-License-Identifier: Apache-2.0
// The comparison must see every element of every group, and name the earliest difference in causal order.
#include "harness/compare/record_compare.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>

#include "tests/compare/hand_made_record.hpp"

namespace loopgauge::harness {
namespace {

constexpr int kWindow = 64;

class RecordCompare : public testing::Test {
 protected:
  HandMade made_ = make_hand_made_record();
  RunRecord actual_ = made_.record;

  RequestRecord& r() { return actual_.requests[0]; }
  RecordComparison compare() const { return compare_records(made_.record, actual_, kWindow); }
};

const GroupComparison& group(const RecordComparison& comparison, RecordGroup which) {
  return comparison.groups[static_cast<std::size_t>(which)];
}

TEST_F(RecordCompare, EqualRecordsAreIdentical) {
  const RecordComparison comparison = compare();
  EXPECT_TRUE(comparison.identical());
  EXPECT_EQ(comparison.different(), 0);
  EXPECT_FALSE(comparison.first);
  for (const GroupComparison& g : comparison.groups) {
    EXPECT_EQ(g.status, GroupStatus::equal) << to_string(g.group);
    EXPECT_GT(g.compared, 0) << to_string(g.group);
  }
}

TEST_F(RecordCompare, NothingInCommonIsNotIdentical) { EXPECT_FALSE(compare_records(RunRecord{}, RunRecord{}, kWindow).identical()); }

// Two prompts have nothing that corresponds: their other groups are neither equal nor different.
TEST_F(RecordCompare, RecordsOfDifferentPromptsAreNotCalledEqual) {
  for (RequestRecord& request : actual_.requests) ++request.prompt_length;
  const RecordComparison comparison = compare();
  EXPECT_FALSE(comparison.identical());
  for (const GroupComparison& g : comparison.groups) {
    if (g.group == RecordGroup::tokens) continue;
    EXPECT_EQ(g.status, GroupStatus::not_compared) << to_string(g.group);
  }
}

TEST_F(RecordCompare, LoopsThatTheModelDoesNotHaveAreNoDifference) {
  for (RunRecord* record : {&made_.record, &actual_}) record->requests[0].kv[2] = record->requests[0].kv[3] = {};
  EXPECT_TRUE(compare().identical());
  actual_.requests[0].kv[1] = {};
  EXPECT_FALSE(compare().identical());
}

// Every number of the record, one at a time: a comparison that overlooks an element lets a wrong executor pass.
TEST_F(RecordCompare, EveryElementCounts) {
  std::int64_t touched = 0;
  const auto expect_seen = [&](RecordGroup which, auto& value, auto changed) {
    const auto before = value;
    value = changed;
    const RecordComparison comparison = compare();
    EXPECT_FALSE(comparison.identical()) << to_string(which);
    EXPECT_EQ(comparison.different(), which == RecordGroup::active ? 2 : 1) << to_string(which);
    EXPECT_EQ(group(comparison, which).status, GroupStatus::different) << to_string(which);
    ASSERT_TRUE(comparison.first);
    EXPECT_EQ(comparison.first->group, which);
    value = before;
    ++touched;
  };
  const auto floats = [&](RecordGroup which, std::vector<float>& values) {
    // All of the small tensors, a stride through the large ones that meets every row and every column.
    for (std::size_t i = 0; i<values.size(); i += values.size()> 100 ? 13 : 1) {
      expect_seen(which, values[i], std::isnan(values[i]) ? 0.0f : std::nextafter(values[i], 1e30f));
    }
  };
  RequestRecord& record = r();
  for (auto& token : record.tokens) expect_seen(RecordGroup::tokens, token, token + 1);
  for (auto& depth : record.exit_depths) expect_seen(RecordGroup::exit_depths, depth, static_cast<std::uint8_t>(depth - 1));
  for (auto& frontier : record.encoded_frontier) expect_seen(RecordGroup::encoded_frontier, frontier, frontier + 64);
  floats(RecordGroup::logits, record.logits.data);
  for (auto& hidden : record.hidden) floats(RecordGroup::hidden, hidden.data);
  floats(RecordGroup::gate, record.gate.data);
  for (auto& scores : record.scores) floats(RecordGroup::scores, scores);
  for (auto& active : record.active) {
    for (auto& p : active) expect_seen(RecordGroup::active, p, 1000 + p);  // one position lost, one won
  }
  for (auto& step : record.keys) {
    for (auto& key : step.layers[0].data) expect_seen(RecordGroup::keys, key, key + 1);
    floats(RecordGroup::mass, step.mass.data);
  }
  for (auto& plane : record.kv) {
    floats(RecordGroup::kv, plane.k.data);
    floats(RecordGroup::kv, plane.v.data);
  }
  for (auto& stream : record.blocks[0].streams) {
    CodecLayer& layer = stream.layers[0];
    for (std::size_t i = 0; i < layer.k_codes.data.size(); i += 5)
      expect_seen(RecordGroup::codec, layer.k_codes.data[i], std::uint8_t(layer.k_codes.data[i] ^ 1));
    for (std::size_t i = 0; i < layer.v_codes.data.size(); i += 5)
      expect_seen(RecordGroup::codec, layer.v_codes.data[i], std::uint8_t(layer.v_codes.data[i] ^ 1));
    floats(RecordGroup::codec, layer.k_min.data);
    floats(RecordGroup::codec, layer.k_scale.data);
    floats(RecordGroup::codec, layer.v_min.data);
    floats(RecordGroup::codec, layer.v_scale.data);
    expect_seen(RecordGroup::codec, stream.rows.back(), stream.rows.back() + 1);
  }
  EXPECT_GT(touched, 800);
}

TEST_F(RecordCompare, SignedZeroDiffersAndNanEqualsNan) {
  made_.record.requests[0].logits.data[0] = 0.0f;
  r().logits.data[0] = -0.0f;
  ASSERT_TRUE(compare().first);
  EXPECT_EQ(compare().first->ulps, 0u);
  r().logits.data[0] = std::numeric_limits<float>::quiet_NaN();
  made_.record.requests[0].logits.data[0] = -std::numeric_limits<float>::quiet_NaN();
  EXPECT_TRUE(compare().identical());
}

TEST_F(RecordCompare, NamesThePlaceAndTheValues) {
  r().kv[3].k.data[71 * 2 + 1] += 1.0f;  // loop 4 of layer 0, position 71, channel 1
  const auto first = compare().first;
  ASSERT_TRUE(first);
  EXPECT_EQ(first->group, RecordGroup::kv);
  EXPECT_EQ(first->tensor, "requests/0/kv/layer0/loop4/k");
  EXPECT_EQ(first->loop, 4);
  EXPECT_EQ(first->layer, 0);
  EXPECT_EQ(first->position, 71);
  EXPECT_EQ(first->head, 0);
  EXPECT_EQ(first->element, 1);
  EXPECT_DOUBLE_EQ(first->actual, static_cast<double>(static_cast<float>(first->expected) + 1.0f));
  EXPECT_NE(first->text().find("request 0 loop 4 layer 0 position 71 head 0 element 1"), std::string::npos) << first->text();
}

TEST_F(RecordCompare, UlpsOfBfloat16ValuesAreCountedInBfloat16) {
  made_.record.requests[0].hidden[0].data[0] = 1.0f;
  r().hidden[0].data[0] = 1.0078125f;
  EXPECT_EQ(compare().first->ulps, 1u);
  EXPECT_EQ(compare().first->format, UlpFormat::bfloat16);
}

// Pairs of changes: the first of each pair happens earlier in the computation and must be the one that is named.
TEST_F(RecordCompare, CausalOrder) {
  using Change = std::function<void(RequestRecord&)>;
  const auto hidden = [](int loop, int p) -> Change {
    return [=](RequestRecord& x) { x.hidden[static_cast<std::size_t>(loop - 1)].row(p)[3] += 1.0f; };
  };
  const auto kv = [](int loop, int p) -> Change {
    return [=](RequestRecord& x) { x.kv[static_cast<std::size_t>(loop - 1)].k.data[static_cast<std::size_t>(p) * 2] += 1.0f; };
  };
  const auto logits = [](int row) -> Change { return [=](RequestRecord& x) { x.logits.row(row)[1] += 1.0f; }; };
  const Change score = [](RequestRecord& x) { x.scores[0][3] += 1.0f; };
  const Change active = [](RequestRecord& x) { x.active[0][0] += 1000; };
  const Change codes = [](RequestRecord& x) { x.blocks[0].streams[0].layers[0].k_codes.data[0] ^= 1; };
  const Change keys = [](RequestRecord& x) { x.keys[0].layers[0].data[2] += 1; };
  const Change frontier = [](RequestRecord& x) { x.encoded_frontier[0] = 0; };
  const Change token = [](RequestRecord& x) { x.tokens[0] += 1; };

  const std::vector<std::pair<Change, Change>> pairs{
      {hidden(1, 63), hidden(2, 0)},  // a loop of a whole window before the next loop
      {hidden(4, 0), hidden(1, 64)},  // all loops of a window before the next window
      {hidden(2, 5), score},          // loop 2's rows before the scores that use them
      {score, active},
      {hidden(4, 69), logits(0)},  // the prompt before its logits
      {logits(0), token},
      {token, hidden(1, 70)},  // which the next row is made of
      {kv(2, 70), keys},       // a row's K before the selection that may select it
      {keys, hidden(2, 70)},   // which is part of that loop's attention
      {kv(3, 70), hidden(3, 70)},
      {hidden(4, 70), logits(1)},
      {codes, kv(1, 0)},         // an encoded position reads what its block holds
      {frontier, hidden(1, 0)},  // which follows from lengths alone
      {hidden(4, 63), codes},    // a block is sealed after its window
  };
  for (std::size_t i = 0; i < pairs.size(); ++i) {
    actual_ = made_.record;
    pairs[i].first(r());
    const auto only = compare().first;
    pairs[i].second(r());
    const auto both = compare();
    ASSERT_TRUE(only && both.first) << i;
    EXPECT_EQ(both.first->text(), only->text()) << "pair " << i;
    EXPECT_GE(both.different(), 2) << i;
  }
}

TEST_F(RecordCompare, EveryRequestHasItsOwnFirstDivergence) {
  made_.record.requests.push_back(made_.record.requests[0]);
  actual_ = made_.record;
  actual_.requests[1].gate.row(2)[0] += 1.0f;
  const RecordComparison comparison = compare();
  ASSERT_EQ(comparison.requests.size(), 2u);
  EXPECT_FALSE(comparison.requests[0]);
  ASSERT_TRUE(comparison.requests[1]);
  EXPECT_EQ(comparison.first->request, 1);
}

TEST_F(RecordCompare, AGroupThatOneSideLacksIsNotEqual) {
  r().kv.clear();
  const RecordComparison comparison = compare();
  EXPECT_EQ(group(comparison, RecordGroup::kv).status, GroupStatus::only_expected);
  EXPECT_FALSE(comparison.identical());
  EXPECT_FALSE(comparison.first);
}

TEST_F(RecordCompare, ShapesAreCompared) {
  r().tokens.pop_back();
  EXPECT_EQ(group(compare(), RecordGroup::tokens).status, GroupStatus::different);
  EXPECT_NE(compare().first->text().find("2 tokens, expected 3"), std::string::npos) << compare().first->text();

  actual_ = made_.record;
  r().keys[1].layers[0] = Tensor<std::int32_t>({1, 7});
  EXPECT_NE(compare().first->text().find("shape [1, 7], expected [1, 8]"), std::string::npos) << compare().first->text();

  actual_ = made_.record;
  r().blocks[0].positions.end = 32;
  EXPECT_NE(compare().first->text().find("positions [0, 32), expected [0, 64)"), std::string::npos) << compare().first->text();

  actual_ = made_.record;
  actual_.requests.clear();
  EXPECT_NE(compare().first->text().find("0 requests, expected 1"), std::string::npos) << compare().first->text();
}

}  // namespace
}  // namespace loopgauge::harness
