// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string_view>

#include "models/checkpoint.hpp"
#include "models/executor.hpp"

namespace loopgauge::harness {

// Throws ConfigError for a word that is neither "reference" nor "optimized".
void require_executor_name(std::string_view name);

// "reference" or "optimized". Throws ConfigError for another word, UnsupportedError when the optimized runtime cannot be used.
// `checkpoint` must outlive the executor. Plans of handoffs run on two of them, with `transport` between: "host", "device" (one GPU), "peer"
// (prompts on device 0, decoding on device 1); empty: host for the reference, device for the optimized runtime. Throws ConfigError for another
// word and for device memory of the reference; a device that is not there is refused when the first plan of handoffs begins.
std::unique_ptr<Executor> make_executor(std::string_view name, const Checkpoint& checkpoint, std::string_view transport = {});

// Throws ConfigError for a word that is none of the above, and for one that the executor of that name cannot use; empty is for every executor.
void require_handoff_transport(std::string_view transport, std::string_view executor);

}  // namespace loopgauge::harness
