// SPDX-License-Identifier: Apache-2.0
// Wall-clock speed of an executor whose submit() returns when the work is done, as the reference's does.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "models/checkpoint.hpp"
#include "models/executor.hpp"

namespace loopgauge::harness {

struct ReferenceBenchOptions {
  int context = 1024;   // prompt tokens, drawn uniformly from the vocabulary
  int new_tokens = 32;  // forwarded after the prompt, greedily generated
  int repeat = 3;       // measured runs after one that is not measured
  std::uint64_t seed = 1;
};

// Median and range of the repeated runs.
struct Spread {
  double median = 0;
  double minimum = 0;
  double maximum = 0;
};
// Of at least one value; the median of an even number is the mean of the middle two.
Spread spread(std::vector<double> values);

struct ReferenceBenchRow {
  std::string settings;              // settings part of a case id
  Spread prefill_tokens_per_second;  // prompt tokens over the time of the prefill submissions
  Spread decode_tokens_per_second;   // forwarded tokens over the time of the decode submissions
};

// One row: serial plan, nothing recorded. Throws ConfigError for options out of range, Interrupted between submissions.
ReferenceBenchRow measure_reference(Executor& executor, const AlgorithmConfig& config, const ModelConfig& model, Profile profile,
                                    const ReferenceBenchOptions& options);

}  // namespace loopgauge::harness
