// SPDX-License-Identifier: Apache-2.0
// A small record whose every value follows from the specification by arithmetic that a reader can check: hidden rows of +1 and -1 (their
// RMS norm is themselves), projections of small integers, one layer, one head of two channels. No executor takes part.
#pragma once

#include "models/algorithm_config.hpp"
#include "models/checkpoint.hpp"
#include "models/run_record.hpp"
#include "models/trace.hpp"

namespace loopgauge::harness {

inline constexpr int kHandPrompt = 70;  // windows [0, 64) and [64, 70)
inline constexpr int kHandForced = 3;

struct HandMade {
  Checkpoint checkpoint;
  Trace trace;
  EffectiveConfig config;
  RunRecord record;
};

// T, S and Q on, window 64, rolling with tail 0, retention 2500 and 1000; tokens forced.
HandMade make_hand_made_record();
// The same without switches and forced tokens: three greedy tokens, two of them forwarded.
HandMade make_hand_made_free_run();

float bfloat16(float value);

}  // namespace loopgauge::harness
