// SPDX-License-Identifier: Apache-2.0
// `bench e2e`: requests served online from their arrival to their last token, under the same fixed arrivals for every setting.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "harness/bench/bench_output.hpp"
#include "harness/bench/serving.hpp"
#include "models/algorithm_config.hpp"
#include "models/checkpoint.hpp"
#include "models/model_config.hpp"
#include "optimized/runtime/device_allocator.hpp"

namespace loopgauge::harness {

// low: a few requests at once. high: more arrive than a server keeps up with. failures: some are given up, one does not fit, submissions fail. fit: as many
// long prompts at once as fit the memory, then decoding with all of them. pd: prompts on one device, decoding on another, beside both on both.
inline constexpr const char* kLoadNames[] = {"low", "high", "failures", "fit", "pd"};

struct EndToEndOptions {
  std::vector<std::string> loads{"low", "high"};
  std::vector<std::string> switches{"t0s0q0", "t1s0q0", "t0s1q0", "t0s0q1", "t1s1q1"};
  EncodingPolicy policy = EncodingPolicy::rolling;
  // In place of what the load says:
  std::optional<int> requests, new_tokens;
  std::optional<double> requests_per_s;
  std::vector<int> prompt_tokens;
  std::uint64_t seed = 1;
  // How they are served.
  SchedulerOptions scheduler;
  int submissions_in_flight = 2;       // fit: 1, because memory is counted exactly; 1 on an executor without a device, which computes when it is told to
  bool graph_replay = false;
  std::int64_t reserve_bytes = std::int64_t{2} << 30;  // of a device's free memory, for everything that is no request's
  bool check = false;                  // every finished request runs again alone, and has to generate the same tokens
};

// What is measured. `make`: an executor with the weights on device 0, 1, ...; the same weights everywhere.
struct ServingTarget {
  ModelConfig model;
  bool on_device = false;              // memory is counted, and there may be several devices
  int devices = 1;
  std::function<std::unique_ptr<Executor>(int device)> make;
  std::function<handoff::TransportEnds()> transport;                      // between device 0 and 1, or within a host
  std::function<std::int64_t(int device)> free_bytes;                     // of a device's memory
  std::function<optimized::MemoryUsage(const Executor&)> memory_usage;    // of an executor on a device
};

// The CUDA runtime at the shape of Ouro-1.4B with random weights made on the device; of another shape for tests. Throws UnsupportedError without a device.
ServingTarget random_model_on_devices(const ModelConfig& shape, std::uint32_t seed);
// The reference or the CUDA runtime with a checkpoint, which must outlive the target.
ServingTarget checkpoint_target(const std::string& executor, const Checkpoint& checkpoint);

// Bytes that each request of the load holds at most, as harness/compare/memory_model predicts them.
std::vector<RequestBytes> predicted_bytes(const ModelConfig& model, const EffectiveConfig& config, const ServingLoad& load, int windows_in_flight);

// How many requests of these bytes can be live at once: all but one past their prompt, and one that completes it.
int most_that_fit(const RequestBytes& bytes, std::int64_t budget);

// The row of a result: percentiles over finished requests (nearest rank; p90 from 10 values on, p99 from 100), counts of the others.
EndToEndRow summarize(const ServingResult& result, const ServingLoad& load);

struct EndToEndVerdict {
  bool tokens_agree = true;            // as far as they were compared
  bool compared = true;                // something was, or nothing was to be
};

// Measures and hands each row on as it comes. What a target cannot do is left out with the reason. Throws ConfigError, before anything is measured, for a
// load that the model cannot have.
EndToEndVerdict run_end_to_end_bench(const ServingTarget& target, const EndToEndOptions& options, BenchOutput& output);

}  // namespace loopgauge::harness
