// SPDX-License-Identifier: Apache-2.0
// Decisions for a decision-forced run (RunOptions::decisions), read from a dump or from an expected file of data/cases.
#pragma once

#include <filesystem>

#include "models/algorithm_config.hpp"
#include "models/model_config.hpp"
#include "models/run_record.hpp"
#include "models/trace.hpp"

namespace loopgauge::harness {

struct FileDecisions {
  RunRecord record;            // per request of the trace: active, keys and exit_depths, nothing else
  int token_sets = 0;          // (request, loop) pairs whose selected tokens are forced
  int key_steps = 0;           // decode steps whose selected keys are forced
  int steps_without_keys = 0;  // decode steps with S on that the file holds no, or not every layer's, keys for: they decide for themselves
  int exit_steps = 0;          // decode steps whose exit depth is forced
};

// Reads what this configuration decides: `active/loop3` and `loop4` of every request where T selects (both are required), `keys/step<j>`
// where S is on and all layers are there, `exit_depths` where an exit rule decides. Everything else in the file is left alone, so that a
// file restricted to some rows of its other tensors will do. Throws FileError naming the object when the file is unreadable, of a version
// that no dump has, belongs to another trace, lacks a request or its token sets, or holds a set that this configuration cannot have
// decided: not ascending, outside the window or the context, a token of loop 4 that is not one of loop 3, or another number of members
// than the budget.
// Throws ConfigError when the configuration decides nothing that could be forced.
FileDecisions read_decisions(const std::filesystem::path& path, const Trace& trace, const EffectiveConfig& config,
                             const ModelConfig& model);

}  // namespace loopgauge::harness
