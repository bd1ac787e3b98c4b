// SPDX-License-Identifier: Apache-2.0
// What the rows of a bench report say together: features alone and together, the own rows against a peer's, where a step's time goes. Everything
// follows from the rows; what a table needs and the file lacks is a dash.
#pragma once

#include <string>
#include <vector>

#include "harness/bench/bench_report.hpp"

namespace loopgauge::harness {

// A row beside the fastest rows of the peer of the same run for the same thing: the dense variant, and the sparse one where there is one.
struct PeerComparison {
  const BenchRow* own = nullptr;
  const BenchRow* dense = nullptr;   // null: the peer did not measure it
  const BenchRow* sparse = nullptr;
};
std::vector<PeerComparison> compare_with_peer(const BenchReport& report);

// Medians of one thing under the settings that separate the features, of one run; NaN: not measured.
struct FeatureGains {
  std::string what;
  std::int64_t run = 0, context = 0, batch = 0;
  double dense_us = kNotMeasured;
  double t_us = kNotMeasured, s_us = kNotMeasured, q_us = kNotMeasured;  // each alone
  double ts_us = kNotMeasured, all_us = kNotMeasured;                    // T, then with S, then with Q
};
// Of decode steps and prompts that were measured under more than one setting.
std::vector<FeatureGains> feature_gains(const BenchReport& report);

// Where the time of a captured decode step goes, in microseconds. Rows of any run of the file are taken, the last where several fit: `bench step` and
// `bench ops` together.
struct StepAttribution {
  std::string setting;
  std::int64_t context = 0, batch = 0;
  double step_us = kNotMeasured;
  // Parts of the step. Operations that were timed alone do not overlap as those of a step may, so `remainder_us` can be negative.
  double projections_us = kNotMeasured;     // everything but attention and head: products, norms, RoPE, SwiGLU, append of K and V
  double head_us = kNotMeasured;
  double attention_us = kNotMeasured;       // readers of all loops and the correction
  double selection_us = kNotMeasured;       // choosing keys and what the reference keeps of them; 0 without S
  double remainder_us = kNotMeasured;
  // Part of attention_us: what its packed readers take beyond the BF16 ones of the same setting with q0. Negative: the smaller reads save more than unpacking
  // costs. 0 without Q.
  double dequantisation_us = kNotMeasured;
  // Not in the step: what launching it kernel by kernel adds, and the encoding of its new positions, a kGroupSize-th of that of a group. 0 without Q.
  double launches_us = kNotMeasured;
  double packing_us = kNotMeasured;
};
std::vector<StepAttribution> attribute_steps(const BenchReport& report);

struct PrefillAttribution {
  std::string setting;
  std::int64_t run = 0, context = 0, batch = 0;
  double prompt_us = kNotMeasured, attention_us = kNotMeasured, products_us = kNotMeasured, remainder_us = kNotMeasured;
  double encoding_us = kNotMeasured;  // of settings with Q
};
std::vector<PrefillAttribution> attribute_prompts(const BenchReport& report);

// The same and everything else as tables of text, in the order in which a reader wants them; empty ones are absent.
struct BenchTable {
  std::string id;                    // of the section of a page
  std::string title;
  std::string note;                  // what the columns mean, a sentence or two
  std::vector<std::string> header;
  std::vector<std::vector<std::string>> rows;
  int text_columns = 1;              // the first ones; the others hold numbers
  std::vector<std::string> part_names{};          // of what adds up to a whole, and below for each row the shares: drawn as bars where something is drawn
  std::vector<std::vector<double>> part_shares{};
};
std::vector<BenchTable> bench_tables(const BenchReport& report);

}  // namespace loopgauge::harness
