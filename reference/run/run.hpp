// SPDX-License-Identifier: Apache-2.0
// One run of the reference: submissions one after the other, actions and then items, and results read as late as the plan says. A row's
// result depends on the rows it reads and on nothing else, so every legal plan gives the same bits; nothing here looks at the mode.
//
// With Stage::prefill a run ends with the prompts, with Stage::decode it begins with what `handoff` takes in.
//
// Reading order: submit() here; request_life is what items do, speculation those that guess, recurrent_model the arithmetic, encoding the
// cache's codec; delivery is how results become the record, actions what happens between items, snapshot how a request is moved; observation
// fills the record.
#pragma once

#include <deque>
#include <string>
#include <vector>

#include "models/executor.hpp"
#include "reference/run/handoff.hpp"
#include "reference/run/run_context.hpp"

namespace loopgauge::reference {

template <class P>
class Run {
 public:
  using Real = typename P::Real;

  // References are kept until finish().
  Run(const ModelConfig& model, const std::string& model_sha256, const Weights<Real>& weights, const Trace& trace,
      const EffectiveConfig& config, const RunOptions& options);

  void submit(const Submission& submission);
  RunRecord finish();
  handoff::Source* handoff_source() { return context_.options.stage == Stage::prefill ? &source_ : nullptr; }
  handoff::Target* handoff_target() { return context_.options.stage == Stage::decode ? &target_ : nullptr; }

 private:
  RequestState<P>& request(int index) { return requests_.at(static_cast<std::size_t>(index)); }
  // Reads the results of every submission up to `last`.
  void read_results(int last);
  void run_items(const Submission& submission);
  void pool_selections(const std::vector<const WorkItem*>& items);
  HeldResources held();
  void take_in_activations();

  RunContext<P> context_;
  std::vector<RequestState<P>> requests_;
  HandoffSource<P> source_{context_, requests_};
  HandoffTarget<P> target_{context_, requests_};
  std::deque<Ticket<Real>> unread_;
};

}  // namespace loopgauge::reference
