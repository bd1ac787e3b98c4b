// SPDX-License-Identifier: Apache-2.0
// The interface that both executors implement and the harness drives: begin(), one submit() per submission of a plan, finish().
#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "models/algorithm_config.hpp"
#include "models/fault.hpp"
#include "models/handoff/transfer.hpp"
#include "models/plan.hpp"
#include "models/profile.hpp"
#include "models/run_record.hpp"
#include "models/trace.hpp"

namespace loopgauge {

// Where a tensor row is observed. The same list of operations on both sides (models/spec/op_list.hpp names them).
struct TapPoint {
  int submission = 0;              // index within the run
  int request = 0;                 // index into Trace::requests
  int position = 0;                // absolute token position of the row
  int loop = 0;                    // 1..4; 0 before the first loop (embedding)
  int layer = -1;                  // -1: not inside a layer
  std::string_view operation;      // e.g. "rms_norm.input_layernorm", "linear.q_proj", "rope.q", "attention.output"
};

// Observes a run. Attaching a tap never changes a result (SPEC.md, invariants). Values are one row, [heads * head_dim], [hidden], ...
class Tap {
 public:
  virtual ~Tap() = default;
  virtual void record(const TapPoint& point, std::span<const float> values) = 0;
};

// Which part of a request's life a run has (S-PD-1).
enum class Stage {
  whole,    // all of it
  prefill,  // prompts only: no logits are formed, what the prompt leaves goes through handoff_source()
  decode,   // what comes after: requests begin through handoff_target(), no prompt row runs
};

struct RunOptions {
  Stage stage = Stage::whole;
  handoff::MemoryPlace region_memory = handoff::MemoryPlace::host;  // of regions that are exported and reserved: what the transport moves
  Profile profile = Profile::declared;
  RecordGroups record;
  Fault fault = Fault::none;
  Tap* tap = nullptr;                        // not owned
  // Decision-forced replay (harness level 3): take selected tokens, keys and exits from this record of the same trace and configuration
  // instead of deciding. A step whose keys or exit depth the record does not hold decides for itself. Not owned.
  const RunRecord* decisions = nullptr;
  // Of the plan to be run; replay() sets them.
  int submissions_in_flight = 1;
  bool graph_replay = false;
  Speculation speculation = {};
  bool handoff = false;
};

class Executor {
 public:
  virtual ~Executor() = default;
  virtual std::string name() const = 0;      // "reference", "optimized"

  // Prepares state for a run. Throws UnsupportedError when the model, configuration or options are outside what this executor can do.
  // `trace` must stay alive until finish().
  virtual void begin(const Trace& trace, const EffectiveConfig& config, const RunOptions& options) = 0;
  // May return before the work is done. Errors of the work may surface here or in a later call.
  virtual void submit(const Submission& submission) = 0;
  // Ends of handoffs, during a run with Stage::prefill and Stage::decode. Null where the executor has none.
  virtual handoff::Source* handoff_source() { return nullptr; }
  virtual handoff::Target* handoff_target() { return nullptr; }
  // Waits for all work and hands over the record. The executor can begin() again afterwards.
  virtual RunRecord finish() = 0;
};

// `options` for running `plan`: what the plan says of execution is taken from it.
RunOptions options_for(const Plan& plan, RunOptions options);

// begin, every submission, finish.
RunRecord replay(Executor& executor, const Plan& plan, const Trace& trace, const EffectiveConfig& config, const RunOptions& options);

}  // namespace loopgauge
