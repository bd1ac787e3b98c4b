// SPDX-License-Identifier: Apache-2.0
// Requests that arrive at fixed times: made from a seed, so that every setting and every executor is offered the same load.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "models/trace.hpp"

namespace loopgauge::harness {

struct LoadOptions {
  std::string name;                        // "low"
  int requests = 8;
  double requests_per_s = 1;               // mean of exponential gaps; 0: everything arrives at once
  std::vector<int> prompt_tokens{2048};    // each request draws one of them
  int new_tokens = 32;                     // at least 1
  int cancelled = 0;                       // requests that their client gives up, after a random share of `patience_s`
  double patience_s = 1;
  int oversized = 0;                       // further requests in between, with prompts of `oversized_tokens`
  int oversized_tokens = 0;
  std::uint64_t seed = 1;
};

inline constexpr double kNever = std::numeric_limits<double>::infinity();

// Request i of the trace arrives at arrival_s[i], ascending from 0, and is given up at cancel_s[i], seconds from the begin of the load. Its tokens
// are uniform over the vocabulary; it generates greedily and has no end-of-sequence token, so it is as long as it may be.
struct ServingLoad {
  std::string name;
  Trace trace;
  std::vector<double> arrival_s, cancel_s;
  std::vector<bool> oversized;   // drawn to be longer than what has room
};

// Throws ConfigError for options out of range.
ServingLoad make_load(const LoadOptions& options, int vocab_size);

// Every second request from the first (part 0) or the second (part 1) on, at the same times: what each of two servers gets.
ServingLoad half_of(const ServingLoad& load, int part);

}  // namespace loopgauge::harness
