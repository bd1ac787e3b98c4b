// SPDX-License-Identifier: Apache-2.0
// An executor that runs plans of handoffs (S-PD) with two others, one that computes prompts and one that goes on from what arrives, and
// any other plan with the first of them alone. The second has the trace and nothing else of the first but the bytes that the transport carried.
#pragma once

#include <functional>
#include <memory>

#include "harness/handoff/endpoint.hpp"
#include "models/executor.hpp"

namespace loopgauge::harness {

using ExecutorFactory = std::function<std::unique_ptr<Executor>()>;
using TransportFactory = std::function<handoff::TransportEnds()>;

// The second executor is made when the first plan of handoffs begins; a transport serves one run. What `make` throws, this throws at once. A request that
// is not handed over, or whose transfer does not move for `limits.lease`, ends the run: submit() throws FileError naming it.
std::unique_ptr<Executor> make_handoff_executor(ExecutorFactory make, TransportFactory transport, HandoffLimits limits = {});
// The same with two of different kinds; plans without handoffs are run by the first.
std::unique_ptr<Executor> make_handoff_executor(ExecutorFactory prefill, ExecutorFactory decode, TransportFactory transport, HandoffLimits limits = {});

}  // namespace loopgauge::harness
