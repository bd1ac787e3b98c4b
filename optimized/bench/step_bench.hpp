// SPDX-License-Identifier: Apache-2.0
// Times of the device at a model's shape with random weights and random K/V made on the device: decode steps, prefill windows and single
// operations, beside the ceilings of the same card in the same run.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "models/algorithm_config.hpp"
#include "models/model_config.hpp"
#include "optimized/cuda_executor.hpp"

namespace loopgauge::optimized {

// Repeated, unprofiled, between device events.
struct Timing {
  double median_us = 0, minimum_us = 0, maximum_us = 0;
  int repeats = 0;
};

struct BenchRow {
  std::string what;                // "decode step", "linear.qkv", "attention_decode"
  std::string setting;             // switches, or the variant that ran
  int context = 0;                 // positions of each request before the step
  int batch = 0;                   // rows
  Timing timing;
  double bytes = 0;                // device-memory bytes that the operation must move at least; 0: not a memory-bound row
  double flops = 0;                // arithmetic that it must do; 0: not counted
};

struct Ceilings {
  double read_gb_per_s = 0;        // grid-stride read of 4 GB
  double bf16_tflop_per_s = 0;     // 8192^3 product of random BF16 matrices
};

struct StepBenchOptions {
  std::vector<std::string> what{"linear", "decode", "attention", "prefill"};  // groups of rows; attention: the kernels of decode attention
  std::vector<int> contexts{2048, 8192, 32768};
  std::vector<int> batches{1, 8};
  std::vector<std::string> switches{"t0s0q0", "t0s1q0", "t1s0q1", "t1s1q1"};
  std::vector<int> prompts{2048, 8192, 16384};
  std::vector<int> prefill_rows{256, 2048};   // active rows that prefill batches may hold, at least a window's
  int repeats = 15;
  LinearImplementation linear = LinearImplementation::automatic;
};

struct StepBenchResult {
  Ceilings ceilings;
  std::vector<BenchRow> rows;
  std::vector<std::string> left_out;   // rows that did not run, with the reason
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

// Throws UnsupportedError without a device. A row that does not fit the device's memory is listed in left_out. `progress` is called with
// the name of each row before it is measured; it may be empty.
StepBenchResult run_step_bench(const ModelConfig& shape, const StepBenchOptions& options, const std::function<void(const std::string&)>& progress);

}  // namespace loopgauge::optimized
