// SPDX-License-Identifier: Apache-2.0
// Bit-exact comparison of two records of one trace, and the first divergence in the causal order of the computation.
//
// Causal order: requests do not influence each other, so each has its own order, that of the serial plan, which is a linear extension of
// the dependencies of every legal plan: prompt windows ascending, each through loops 1..4; then what completing the prompt produces; then
// decode rows ascending, each through its loops. Inside one (window or row, loop): scores, active set, then per layer K/V rows and selected
// keys, then hidden rows, then the gate. After the last loop: logits, token, exit depth, encoded frontier, sealed blocks, and the K/V that
// those blocks now hold (a record keeps K/V as read at the end, so an encoded position's value belongs to its encoding). The encoded
// frontier after the prompt follows from lengths alone and comes first.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "harness/compare/causal_order.hpp"
#include "harness/compare/ulp_distance.hpp"
#include "models/run_record.hpp"

namespace loopgauge::harness {

enum class RecordGroup { tokens, exit_depths, encoded_frontier, logits, hidden, gate, scores, active, keys, mass, codec, kv };
std::string_view to_string(RecordGroup group);

// A place where two records differ. Unused coordinates are -1 (loop: 0).
struct Divergence {
  RecordGroup group = RecordGroup::tokens;
  std::string tensor;  // path as in a dump file, such as "requests/0/hidden/loop3"
  int request = 0;
  int loop = 0;  // 1..4
  int layer = -1;
  int position = -1;  // absolute token position of the row
  int head = -1;
  std::int64_t element = -1;  // index within the innermost row
  double expected = 0.0, actual = 0.0;
  std::uint64_t ulps = 0;  // in the unit of `format`; kNoUlpDistance where it has no meaning (integers, non-finite, shapes)
  UlpFormat format = UlpFormat::float32;
  std::string note;  // filled when the difference is of shape or length: "shape [4, 8], expected [4, 7]"

  CausalKey key;  // when, in the serial order of the request

  std::string text() const;  // one line naming everything above
};

// not_compared: both sides have the group, but of different prompts, where nothing corresponds.
enum class GroupStatus { equal, different, only_expected, only_actual, absent, not_compared };
std::string_view to_string(GroupStatus status);

struct GroupComparison {
  RecordGroup group = RecordGroup::tokens;
  GroupStatus status = GroupStatus::absent;
  std::int64_t compared = 0;        // elements looked at
  std::int64_t different = 0;       // of these; a difference of shape or length counts as one
  std::optional<Divergence> first;  // earliest in causal order, of the first request that differs
};

struct RecordComparison {
  std::vector<GroupComparison> groups;              // one per RecordGroup, in its order
  std::vector<std::optional<Divergence>> requests;  // earliest divergence of each request
  std::optional<Divergence> first;                  // of the first request that has one

  bool identical() const;  // something was compared, nothing differs and neither side lacks a group that the other has
  std::int64_t different() const;
};

// Compares every group that both records hold. `window` is the configuration's selection window in tokens: it cuts the causal order.
// Rows beyond the shorter of two runs (different numbers of tokens) are a difference of the group `tokens` and are not compared further.
RecordComparison compare_records(const RunRecord& expected, const RunRecord& actual, int window);

}  // namespace loopgauge::harness
