// SPDX-License-Identifier: Apache-2.0
// Times of the device at a model's shape with random weights and random K/V made on the device: decode steps, prefill windows and single
// operations, beside the ceilings of the same card in the same run.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "models/algorithm_config.hpp"
#include "models/model_config.hpp"
#include "optimized/cuda_executor.hpp"
#include "optimized/runtime/device_allocator.hpp"

namespace loopgauge::optimized {

// Repeated, unprofiled, between device events.
struct Timing {
  double median_us = 0, minimum_us = 0, maximum_us = 0;
  int repeats = 0;
  std::vector<double> samples_us{};  // in the order in which they were taken
};

// Of at least one time; the median of an even number is the mean of the middle two.
inline Timing timing_of(std::vector<double> samples_us) {
  std::vector<double> sorted = samples_us;
  std::sort(sorted.begin(), sorted.end());
  const std::size_t middle = sorted.size() / 2;
  const double median = sorted.size() % 2 == 1 ? sorted[middle] : 0.5 * (sorted[middle - 1] + sorted[middle]);
  return {median, sorted.front(), sorted.back(), static_cast<int>(sorted.size()), std::move(samples_us)};
}

struct BenchRow {
  std::string what;                // "decode step", "linear.qkv", "attention_decode"
  std::string setting;             // switches; empty where none applies
  int context = 0;                 // positions of each request before the step
  int batch = 0;                   // rows
  Timing timing;
  double bytes = 0;                // device-memory bytes that the operation must move at least; 0: not a memory-bound row
  double flops = 0;                // arithmetic that it must do; 0: not counted
  std::string implementation{};    // what ran, where there is a choice
  std::optional<MemoryUsage> memory{};  // of a whole step or prompt: peak since its setting was set up
};

struct Ceilings {
  double read_gb_per_s = 0;        // grid-stride read of 4 GB
  double bf16_tflop_per_s = 0;     // 8192^3 product of random BF16 matrices
};

// Groups of rows.
//   step: whole decode steps, captured and launched      prefill: whole prompts, their attention, products and encoding alone
//   linear: products of all implementations              attention: the kernels of decode attention, selection and correction
//   projections: a decode step without attention, and its head alone        encode: sealing one group of positions of every request, and whole prompts
//   prefill_attention: the last rows of prompts over BF16 and over encoded history
inline constexpr std::array<std::string_view, 7> kBenchGroups{"step", "prefill", "linear", "attention", "projections", "encode", "prefill_attention"};

struct StepShape {
  int context = 0;                 // positions of each request before the step
  int batch = 0;                   // requests
};

struct StepBenchOptions {
  std::vector<std::string> what;   // of kBenchGroups
  std::vector<StepShape> steps;    // decode steps, and operations of one
  std::vector<std::string> switches{"t0s0q0", "t1s0q0", "t0s1q0", "t0s0q1", "t1s1q0", "t1s1q1"};  // of decode
  std::vector<std::string> prefill_switches{"t0s0q0", "t1s0q0", "t1s1q1"};  // with Q the prompt is encoded at its end
  std::vector<int> prompts{2048, 8192, 16384};
  std::vector<int> prefill_rows{256, 4096};   // active rows that prefill batches may hold, at least a window's; the latter is what the executor joins
  int repeats = 15;
  LinearImplementation linear = LinearImplementation::automatic;
};

// Told of everything as it happens; each may be empty, and may throw to end the bench.
struct StepBenchObserver {
  std::function<void(const std::string& name)> announce;  // before a group of rows is measured
  std::function<void(const Ceilings&)> ceilings;          // once, before the first row
  std::function<void(const BenchRow&)> row;
  std::function<void(const std::string& name, const std::string& reason)> left_out;  // rows that did not run
};

// The shape of Ouro-1.4B.
inline ModelConfig ouro_1_4b_shape() {
  ModelConfig shape;
  shape.layers = 24;
  shape.loops = kLoops;
  shape.hidden = 2048;
  shape.heads = 16;
  shape.head_dim = 128;
  shape.intermediate = 5632;
  shape.vocab = 49152;
  shape.max_positions = 65536;
  shape.rms_norm_eps = 1e-6f;
  shape.rope_theta = 1e6;
  return shape;
}

// Throws UnsupportedError without a device. Rows that do not fit the device's memory are left out.
void run_step_bench(const ModelConfig& shape, const StepBenchOptions& options, const StepBenchObserver& observer);

}  // namespace loopgauge::optimized
