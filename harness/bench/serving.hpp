// SPDX-License-Identifier: Apache-2.0
// An online server around an executor: requests begin when they arrive, by the wall clock, and every round is decided from what is there then.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "harness/bench/serving_load.hpp"
#include "harness/bench/serving_scheduler.hpp"
#include "harness/handoff/endpoint.hpp"
#include "models/executor.hpp"

namespace loopgauge::harness {

// Seconds since the begin of a load. Used by several threads at once.
class ServingClock {
 public:
  virtual ~ServingClock() = default;
  virtual double now() = 0;
  virtual void sleep_until(double seconds) = 0;
};

// Steady wall clock, 0 at construction.
class WallClock final : public ServingClock {
 public:
  double now() override;
  void sleep_until(double seconds) override;

 private:
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

// The first submission with rows from this one on fails as planned (S-FAIL); its rows run again.
struct FailureAt {
  int submission = 0;
  PlannedFailure kind = PlannedFailure::launch;
};

struct ServingOptions {
  SchedulerOptions scheduler;
  std::vector<RequestBytes> bytes;           // by request
  std::int64_t budget = std::numeric_limits<std::int64_t>::max();  // bytes, of each executor
  int submissions_in_flight = 2;             // 1: every result is read before the next submission
  bool graph_replay = false;
  std::vector<FailureAt> failures;           // ascending
  std::function<void(const ServingScheduler&)> after_round;  // may be empty
};

// waiting: it has not ended. refused: it would not have fitted alone. cancelled: its client gave up. failed: memory ran out, or its handoff failed.
enum class ServedOutcome { waiting, finished, cancelled, refused, failed };
std::string_view to_string(ServedOutcome outcome);

// Seconds since the begin of the load. A token's time is when the host has read it and the call that read it has returned.
struct ServedRequest {
  ServedOutcome outcome = ServedOutcome::waiting;
  std::string reason;                        // of a request that was refused or failed
  double arrival_s = 0;
  double begun_s = std::numeric_limits<double>::quiet_NaN();  // its first rows were issued
  double end_s = std::numeric_limits<double>::quiet_NaN();
  std::vector<double> token_s;
  std::vector<std::int32_t> tokens;          // as far as they were read
};

struct ServingResult {
  std::vector<ServedRequest> requests;
  int most_live = 0;                         // requests that held memory at once; of several executors those of all
  int failed_submissions = 0;                // planned failures and refused allocations
  double transfer_s = 0;                     // in which at least one complete prompt was being handed over
  std::int64_t transfer_bytes = 0;
  RunCounters counters;                      // of several executors the sums
  std::vector<Submission> submissions;       // what ran, in order; with submissions of a failure planned in it
  HeldResources held_at_drain;
};

// Serves the load until every request has ended. Throws what the executor throws but DeviceMemoryError, which ends the request that began last.
ServingResult serve(Executor& executor, const ServingLoad& load, const EffectiveConfig& config, const ServingOptions& options, ServingClock& clock);

// Two servers, each with every second request, at the same time. `options.bytes` are those of all requests.
ServingResult serve_halves(Executor& first, Executor& second, const ServingLoad& load, const EffectiveConfig& config, const ServingOptions& options,
                           ServingClock& clock);

// Prompts on one executor, decoding on the other, each at its own pace; a request begins when both have room for it. Loads without cancels and options
// without failures; `transport` serves both threads. Throws UnsupportedError for an executor that takes no part in handoffs.
ServingResult serve_handed_over(Executor& prefill, Executor& decode, handoff::TransportEnds transport, const HandoffLimits& limits, const ServingLoad& load,
                                const EffectiveConfig& config, const ServingOptions& options, ServingClock& clock);

}  // namespace loopgauge::harness
