// SPDX-License-Identifier: Apache-2.0
#include "reference/run/run.hpp"

#include <algorithm>
#include <set>

#include "models/error.hpp"
#include "reference/ops/token_selection.hpp"
#include "reference/run/actions.hpp"
#include "reference/run/delivery.hpp"
#include "reference/run/observation.hpp"
#include "reference/run/request_life.hpp"
#include "reference/run/speculation.hpp"

namespace loopgauge::reference {
template <class P>
Run<P>::Run(const ModelConfig& model, const std::string& model_sha256, const Weights<Real>& weights, const Trace& trace,
            const EffectiveConfig& config, const RunOptions& options)
    : context_{.model = model,
               .model_sha256 = model_sha256,
               .weights = weights,
               .trace = trace,
               .config = config,
               .options = options,
               .rope_table = RopeTable<P>(longest_sequence(trace), model.head_dim, model.rope_theta,
                                          options.fault == Fault::rope_frequency_in_bfloat16),
               .scale = attention_scale<P>(model.head_dim),
               .references = AttentionReferencePool<Real>(model.layers * model.heads, model.head_dim),
               .prefixes = {},
               .ticket = {},
               .counters = {},
               .pooled_selection = {}} {
  for (const TraceRequest& request : trace.requests) {
    RequestState<P>& s = requests_.emplace_back();
    s.request = &request;
    s.index = static_cast<int>(requests_.size()) - 1;
    s.prompt_length = request.prompt_length();
    s.capacity = s.prompt_length + fed_tokens(request);
    open_record(context_, s);
  }
}

// Results of requests that were handed in since the last submission are read with that one's.
template <class P>
void Run<P>::take_in_activations() {
  if (context_.ticket.results.empty()) return;
  const int last = static_cast<int>(context_.counters.submissions) - 1;
  if (unread_.empty() || unread_.back().submission != last) unread_.push_back({last, {}});
  for (auto& result : context_.ticket.results) unread_.back().results.push_back(std::move(result));
  context_.ticket = {};
}

template <class P>
void Run<P>::submit(const Submission& submission) {
  take_in_activations();
  context_.submission = static_cast<int>(context_.counters.submissions++);
  read_results(context_.submission - context_.options.submissions_in_flight);
  for (const Action& action : submission.actions) act(context_, request(action.request), action);
  context_.ticket = {context_.submission, {}};
  run_items(submission);
  unread_.push_back(std::move(context_.ticket));
  context_.ticket = {};
  context_.counters.most_in_flight = std::max<std::int64_t>(context_.counters.most_in_flight, static_cast<std::int64_t>(unread_.size()));
}

template <class P>
void Run<P>::read_results(int last) {
  while (!unread_.empty() && unread_.front().submission <= last) {
    const Ticket<Real> ticket = std::move(unread_.front());
    unread_.pop_front();
    for (const RowResult<Real>& result : ticket.results) deliver(context_, request(result.request), result);
  }
}

template <class P>
void Run<P>::run_items(const Submission& submission) {
  using Phase = typename RequestState<P>::Phase;
  std::vector<const WorkItem*> work;
  const Stage stage = context_.options.stage;
  for (const WorkItem& item : submission.items) {
    RequestState<P>& s = request(item.request);
    if (stage != Stage::whole && (stage == Stage::prefill) != (item.kind == RowKind::prefill)) {
      throw InternalError(name(s) + ": an item of the other side of the handoff");
    }
    if (stage == Stage::decode && s.phase == Phase::waiting) throw InternalError(name(s) + ": an item of a request that was not handed in");
    if (s.phase == Phase::cancelled || s.phase == Phase::preempted || s.dirty) {
      throw InternalError(name(s) + ": an item of a request that is cancelled, preempted or to be rewound");
    }
    if (s.phase == Phase::waiting) begin_request(context_, s);
    if (is_work(s, item)) work.push_back(&item);
  }
  if (submission.failure != PlannedFailure::none && !work.empty()) {
    ++context_.counters.failures;
    for (const WorkItem* item : work) {
      RequestState<P>& s = request(item->request);
      if (submission.failure == PlannedFailure::launch) break_off(context_, s, *item);
      s.dirty = true;
    }
    return;
  }
  if (context_.planted(Fault::scores_across_requests)) pool_selections(work);
  std::set<int> pipelines;
  for (const WorkItem* item : work) {
    advance(context_, request(item->request), *item);
    if (item->kind == RowKind::stage) pipelines.insert(item->request);
  }
  for (const int index : pipelines) settle_pipeline(context_, request(index));
}

// Fault::scores_across_requests: the windows that begin a loop in this submission share one ranking and one budget, whoever they belong to.
template <class P>
void Run<P>::pool_selections(const std::vector<const WorkItem*>& items) {
  struct Candidate {
    int request, window, position;
    Real score;
  };
  context_.pooled_selection.clear();
  const EffectiveConfig& config = context_.config;
  for (int loop = 3; loop <= config.loops() && config.selects_tokens(); ++loop) {
    std::vector<Candidate> candidates;
    int total = 0;
    for (const WorkItem* item : items) {
      RequestState<P>& s = request(item->request);
      if (item->kind != RowKind::prefill || item->loop_first != loop || item->begin % config.window() != 0) continue;
      const int window = item->begin / config.window();
      const auto scores = score_window(context_, s, window, loop);
      total += budget(config.t().retention_bp[static_cast<std::size_t>(loop - 1)], static_cast<int>(scores.size()));
      context_.pooled_selection[{s.index, window}] = {};
      for (std::size_t i = 0; i < scores.size(); ++i) {
        if (scores[i] == scores[i]) candidates.push_back({s.index, window, item->begin + static_cast<int>(i), scores[i]});
      }
    }
    std::stable_sort(candidates.begin(), candidates.end(), [](const Candidate& a, const Candidate& b) { return a.score > b.score; });
    candidates.resize(std::min(candidates.size(), static_cast<std::size_t>(total)));
    for (const Candidate& c : candidates) context_.pooled_selection[{c.request, c.window}].push_back(c.position);
  }
  for (auto& [_, positions] : context_.pooled_selection) std::sort(positions.begin(), positions.end());
}

template <class P>
HeldResources Run<P>::held() {
  using Phase = typename RequestState<P>::Phase;
  HeldResources held;
  held.references = context_.references.in_use();
  held.tickets = static_cast<std::int64_t>(unread_.size());
  held.transfers = source_.regions_held() + target_.regions_held();
  for (const RequestState<P>& s : requests_) {
    held.snapshots += s.phase == Phase::preempted || !s.snapshot.empty();
    if (s.held == nullptr) continue;
    ++held.requests;
    held.pages += (s.capacity + kGroupSize - 1) / kGroupSize;
    held.blocks += static_cast<std::int64_t>(s.held->blocks.size());
    held.hidden_windows += static_cast<std::int64_t>(s.held->windows.size());
    held.published_windows += static_cast<std::int64_t>(s.held->held_windows.size());
  }
  return held;
}

template <class P>
RunRecord Run<P>::finish() {
  take_in_activations();
  read_results(context_.submission);
  context_.prefixes.clear();
  RunRecord result;
  result.executor = "reference";
  result.profile = std::string(to_string(context_.options.profile));
  result.model_sha256 = context_.model_sha256;
  result.trace = context_.trace.name;
  result.config_json = context_.config.canonical_json();
  result.held_at_drain = held();
  for (RequestState<P>& s : requests_) {
    if (!s.over()) {  // of a plan that is not complete: what it holds is counted above
      if (s.record.encoded_frontier.empty() && context_.options.stage == Stage::whole) {
        throw InternalError(name(s) + ": the plan ended before the prompt was complete");
      }
      close_record(context_, s);
    }
    if (!context_.options.record.logits) s.record.logits = {};
    if (!context_.options.record.keys) s.record.keys.clear();
    result.requests.push_back(std::move(s.record));
  }
  result.counters = context_.counters;
  return result;
}

#define LOOPGAUGE_INSTANTIATE(P) template class Run<P>;
LOOPGAUGE_FOR_EACH_PROFILE(LOOPGAUGE_INSTANTIATE)
#undef LOOPGAUGE_INSTANTIATE

}  // namespace loopgauge::reference
