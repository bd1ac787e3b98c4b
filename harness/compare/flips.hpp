// SPDX-License-Identifier: Apache-2.0
// Discrete decisions in which two teacher-forced runs differ, each with its margin and with the difference of the compared values between
// the runs (models/spec: select_tokens, reference_statistics.keys, head_argmax.token, exit_step).
//
//   kind      one flip is                                   compared value                    decisions counted
//   token     a prompt row selected by one run only         selection score                   rows that the expected run selects
//   key       a key selected by one run only, or a step     logit of loop 2                   keys that the expected run selects
//             at which one run selects none
//   argmax    a logits row with another greedy token        logit                             logits rows
//   exit      a decode row with another last loop           exit probability of the loop      decode rows
//
// Tokens and keys flip in pairs: one row or key goes (`lost`), another comes in its place. The margin is the distance of the two in the
// expected run, the difference is what the two values moved by, together. Where a run ranks its own values correctly, the margin is at
// most the difference: otherwise the selection itself is wrong. A flip is *explained* if so and if, in addition, neither value moved by
// more than the limit of its distance (FlipLimits) or an explained flip lies in its causal past. Where a value exists in one run only, the
// causal past alone explains. A flip without a flip in its past is a *root*.
//
// Causal past, with forced tokens: a token flip at loop r acts on what rows of its window and later compute from loop r on; a key flip on
// loops 3 and 4 of its row and of later rows; an exit flip on the loops after the earlier exit, of its row and later rows; an argmax flip
// on nothing. Loops 1 and 2 of full-depth rows see none of these, so that keys and loop-3 tokens are roots.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "harness/compare/distances.hpp"
#include "harness/compare/key_logits.hpp"
#include "models/algorithm_config.hpp"
#include "models/model_config.hpp"

namespace loopgauge::harness {

enum class DecisionKind { token, key, argmax, exit };
inline constexpr int kDecisionKinds = 4;
std::string_view to_string(DecisionKind kind);

struct Flip {
  DecisionKind kind = DecisionKind::token;
  int request = 0, position = -1;  // position: the lost prompt row, the decode row, or the row that the logits are read from
  int loop = -1;                   // of the decision: 3, 4 (token), 2 (key), the earlier exit (exit)
  int layer = -1, head = -1;
  int window = -1;            // token
  double margin = 0.0;        // NaN here or
  double difference = 0.0;    // here: a value exists in one run only, which follows from an earlier flip
  double slack = 0.0;         // what the margin may exceed the difference by: rounding of recomputed values
  double largest_move = 0.0;  // the larger of the two values' moves
  bool root = true;
  bool explained = false;
  std::string detail = {};
};

// Largest move of one compared value that counts as noise.
struct FlipLimits {
  double score[2] = {0.0, 0.0};  // loops 3, 4
  double key_logit = 0.0;
  double logit = 0.0;
  double exit_probability = 0.0;
};

struct Decisions {
  std::vector<Flip> flips;                    // in causal order within each request
  std::int64_t decided[kDecisionKinds] = {};  // by DecisionKind
  std::int64_t flipped(DecisionKind kind) const;
};

// What a run's keys were chosen by; both null: without sparse decode attention.
struct KeyEvidence {
  const KeyLogitTap* expected = nullptr;
  const KeyLogitTap* actual = nullptr;
};

// The flips, not yet explained. Requires shape_difference() to be empty and forced tokens. Keys that differ without evidence have a NaN
// margin.
Decisions find_flips(const RunRecord& expected, const RunRecord& actual, const EffectiveConfig& config, const ModelConfig& model,
                     const KeyEvidence& evidence);

// Whether `cause` lies in the causal past of `effect`, both of forced runs.
bool acts_on(const Flip& cause, const Flip& effect);

// Sets root and explained of every flip.
void explain_flips(Decisions& decisions, const FlipLimits& limits);

// Metric "key_logits", loop 2: per decode row, layer and head with selection in both runs, the largest |difference| of a key's logit.
PooledDistance key_logit_distance(const RunRecord& expected, const RunRecord& actual, const ModelConfig& model,
                                  const KeyEvidence& evidence);

}  // namespace loopgauge::harness
