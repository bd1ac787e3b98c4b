// SPDX-License-Identifier: Apache-2.0
// The smallest case in which the same operation is still where two runs part: fewer layers, requests, loops, tokens and switches.
#pragma once

#include <string>
#include <vector>

#include "harness/explain/explain_runs.hpp"

namespace loopgauge::harness {

// The model with its first `layers` layers, executed `loops` times; 0: all. Throws ConfigError when the model has fewer.
Checkpoint cut_checkpoint(const Checkpoint& checkpoint, int layers, int loops);

struct MinimizeLimits {
  double seconds = 60.0;  // no further attempt is begun after that long
};

struct MinimizedCase {
  Trace trace;  // named "<name>-minimal"
  AlgorithmConfig config;
  int layers = 0, loops = 0;  // of the model
  int attempts = 0, successes = 0;
  bool out_of_time = false;        // not everything was tried
  std::vector<std::string> steps;  // "prompt of request 0: 300 -> 65 tokens"
};

// `operation`: the blamed operation of the subject (find_divergence). Greedy: whatever still parts at that operation is kept. An attempt
// whose run fails or whose configuration the model refuses counts as one that does not part there.
MinimizedCase minimize(const ExplainSubject& subject, const std::string& operation, int request, const MinimizeLimits& limits);

}  // namespace loopgauge::harness
