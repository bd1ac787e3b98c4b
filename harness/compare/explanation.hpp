// SPDX-License-Identifier: Apache-2.0
// Puts what is known of the first divergence of two runs into one answer: the operation row, the recorded result, the decision that flipped
// and by what margin, the clauses of the specification that say what should have happened.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "harness/compare/record_compare.hpp"
#include "harness/compare/row_divergence.hpp"
#include "models/algorithm_config.hpp"
#include "models/model_config.hpp"
#include "models/trace.hpp"

namespace loopgauge::harness {

// Clauses of SPEC.md, such as "S-RMS-1 S-RMS-2", of the operation behind a tap name or of a group of results.
std::string operation_clauses(std::string_view tap);
std::string result_clauses(const Divergence& divergence);

// The one operation of the registry (models/spec/op_list.hpp) that a divergence comes down to, and where.
struct BlamedOperation {
  std::string name;       // empty: none
  std::string clauses;    // of SPEC.md
  bool decision = false;  // its output is a choice: with equal inputs every executor makes the same
  int request = 0, position = -1, loop = 0, layer = -1;
};
BlamedOperation blame_operation(std::string_view name, int request, int position, int loop, int layer);
// `expected`: the request's record in the expected run.
BlamedOperation blame_row(const RowId& row, const RequestRecord& expected, const EffectiveConfig& config);
BlamedOperation blame_result(const Divergence& divergence, const RequestRecord& expected);

// The first element in which two rows of one operation differ.
struct RowDifference {
  std::size_t width = 0;      // elements of the row
  std::size_t different = 0;  // of the elements that were kept
  std::int64_t element = -1;  // first; -1: none among those kept
  int head = -1;              // where the row is laid out by heads
  int element_in_head = -1;
  float expected = 0.0f, actual = 0.0f;
  std::uint64_t ulps = 0;
  UlpFormat format = UlpFormat::float32;
  double max_abs = 0.0;  // over the elements kept
};
// `heads`, `head_dim`: of the model; the operation's record tells whether the row is laid out by them.
RowDifference row_difference(std::string_view tap, std::span<const float> expected, std::span<const float> actual, std::size_t width,
                             const ModelConfig& model);

// How far the expected run was from deciding otherwise, as a sentence; empty when the divergence is not a decision or the record lacks
// what the margin is made of. `expected` is the record that the divergence's `expected` comes from.
//   tokens        gap of the two largest logits
//   active        relative distance of the score to the other side of the selection boundary
//   exit_depths   distance of the exit probability to the threshold
std::string decision_margin(const Divergence& divergence, const RunRecord& expected, const AlgorithmConfig& config);

// The earliest divergence of a decision (tokens, active, keys, exit_depths) of any request, or none.
std::optional<Divergence> first_decision(const RecordComparison& comparison);

// True when the recorded result comes into being before the operation row, in the serial order of their request.
bool happens_before(const Divergence& result, const RowId& row, const RequestRecord& expected, int window);

}  // namespace loopgauge::harness
