// SPDX-License-Identifier: Apache-2.0
// What the reference runs for the comparison with a candidate (levels 3 to 5): the case itself, and the reordered and the double profile,
// each with its own and, where anything is decided, with the reference's decisions. One baseline serves every candidate and every mode that
// promises the serial plan's bits. Baselines are made only where a candidate column runs.
#pragma once

#include <condition_variable>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "harness/case.hpp"
#include "harness/compare/conformance.hpp"
#include "models/checkpoint.hpp"
#include "models/executor.hpp"

namespace loopgauge::harness {

// A run with all record groups.
struct ObservedRun {
  RunRecord record;
  std::unique_ptr<KeyLogitTap> keys;  // where the case selects keys
};

struct ConformanceBaseline {
  Trace forced;           // the case's trace, every request forced to the reference's tokens
  ObservedRun reference;  // of the case as it is
  Yardstick decision_forced, teacher_forced;
  Decisions reordered;  // flips of the reordered reference
  Decisions exact;      // and of double precision
  FlipLimits limits;
};

// Something is selected or decided that one run can take over from another: tokens, keys, exits.
bool has_decisions(const EffectiveConfig& config);

// The case whose baseline `value` is compared with: its serial plan where that promises the same bits, else `value` itself.
Case baseline_case(const Case& value, const EffectiveConfig& config);

// Runs `value` with all record groups, and with a KeyLogitTap where it selects keys. `tap` observes too, unless null.
ObservedRun run_observed(Executor& executor, const Case& value, const Trace& trace, const Checkpoint& checkpoint, Profile profile,
                         const RunRecord* decisions, Tap* tap = nullptr);

// `value` is a baseline_case. `known`: the reference's own run of it, if somebody made it already (with its KeyLogitTap where keys are
// selected).
ConformanceBaseline make_conformance_baseline(Executor& reference, const Checkpoint& checkpoint, const Case& value, const Trace& trace,
                                              std::optional<ObservedRun> known);

// Every request of the record has K/V planes: key logits are made of them.
bool keeps_planes(const RunRecord& record);

// pooled_distances, and "key_logits" where both runs carry a KeyLogitTap and the run its planes.
std::vector<PooledDistance> observed_distances(const ObservedRun& reference, const ObservedRun& run, const ModelConfig& model);

// Hands baselines from the threads that make them to the one that compares.
class ConformanceBaselines {
 public:
  struct Entry {
    std::shared_ptr<const ConformanceBaseline> baseline;
    std::exception_ptr failure;  // why there is no baseline
  };

  void put(const std::string& id, Entry entry);
  // Waits for the entry. Empty after cancel().
  std::optional<Entry> wait(const std::string& id);
  void forget(const std::string& id);
  void cancel();

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, Entry> entries_;
  bool cancelled_ = false;
};

}  // namespace loopgauge::harness
