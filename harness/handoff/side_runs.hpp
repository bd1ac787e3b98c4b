// SPDX-License-Identifier: Apache-2.0
// One side of a plan of handoffs (S-PD) by itself: what it does of every submission, and a run of it in a process of its own.
#pragma once

#include <chrono>
#include <memory>
#include <set>
#include <vector>

#include "harness/handoff/endpoint.hpp"
#include "harness/handoff/socket_transport.hpp"
#include "models/executor.hpp"

namespace loopgauge::harness {

// A submission of a plan of handoffs, as the two sides see it (S-ACT-7).
struct SplitSubmission {
  Submission prompts, rest;
  std::vector<int> offers;    // requests that begin or go on with their prompt
  std::vector<int> cancels;   // requests that end before they were handed over
  std::vector<int> handed;    // requests whose handoff has to be complete before `rest` runs
};
// `handed`: requests that were handed over by earlier submissions.
SplitSubmission split_submission(const Submission& submission, const std::set<int>& handed);

// The item completes its request's prompt.
bool completes_prompt(const WorkItem& item, const Trace& trace, int loops);

// Options of a run of either side, from those of the whole.
RunOptions prefill_options(const RunOptions& options, handoff::MemoryPlace place);
RunOptions decode_options(const RunOptions& options, handoff::MemoryPlace place);

struct SideOptions {
  handoff::MemoryPlace place = handoff::MemoryPlace::host;
  HandoffLimits limits;
  RunIdentity identity;      // of what the plan, the trace and the model are
};

// Computes the prompts of the plan and hands every request over to the process at the other end; the record holds what was observed of the prompts, and the
// handoffs. Goes on with the next prompt while requests are decoded there.
// Both throw FileError naming the request when a handoff does not come to pass, and tell the other side why they end.
RunRecord run_prefill_side(Executor& executor, const Plan& plan, const Trace& trace, const EffectiveConfig& config, const RunOptions& options,
                           const std::shared_ptr<SocketConnection>& connection, const SideOptions& side);
// Decodes what comes; of the prompt's rows the record holds nothing but what travels.
RunRecord run_decode_side(Executor& executor, const Plan& plan, const Trace& trace, const EffectiveConfig& config, const RunOptions& options,
                          const std::shared_ptr<SocketConnection>& connection, const SideOptions& side);

}  // namespace loopgauge::harness
