// SPDX-License-Identifier: Apache-2.0
#include "harness/handoff/handoff_executor.hpp"

#include <algorithm>
#include <chrono>
#include <optional>
#include <set>

#include "harness/handoff/pump.hpp"
#include "harness/handoff/side_runs.hpp"
#include "models/error.hpp"

namespace loopgauge::harness {
namespace {

template <class T>
void copy_rows(const Tensor<T>& from, Tensor<T>& to, int rows) {
  if (from.empty() || to.empty()) return;
  const auto count = std::min<std::int64_t>({rows, from.extent(0), to.extent(0)});
  for (std::int64_t i = 0; i < count; ++i) std::copy(from.row(i).begin(), from.row(i).end(), to.row(i).begin());
}

// What was observed of the prompt on the side that computed it goes into the record of the side that went on.
void add_prompt(const RequestRecord& prompt, RequestRecord& record) {
  const int length = record.prompt_length;
  for (std::size_t r = 0; r < kLoops; ++r) copy_rows(prompt.hidden[r], record.hidden[r], length);
  copy_rows(prompt.gate, record.gate, length);
  record.scores = prompt.scores;
  record.active = prompt.active;
  for (std::size_t i = 0; i < std::min(prompt.executions.size(), record.executions.size()); ++i) {
    record.executions[i] = static_cast<std::uint8_t>(record.executions[i] + prompt.executions[i]);
  }
}

class HandoffExecutor final : public Executor {
 public:
  HandoffExecutor(const ExecutorFactory& prefill, ExecutorFactory decode, TransportFactory transport, HandoffLimits limits)
      : make_decode_(std::move(decode)), make_transport_(std::move(transport)), limits_(limits), prefill_(prefill()) {}

  std::string name() const override { return prefill_->name(); }

  void begin(const Trace& trace, const EffectiveConfig& config, const RunOptions& options) override {
    run_.reset();
    if (!options.handoff) {
      prefill_->begin(trace, config, options);
      return;
    }
    if (!decode_) decode_ = make_decode_();
    handoff::TransportEnds transport = make_transport_();
    prefill_->begin(trace, config, prefill_options(options, transport.place));
    decode_->begin(trace, config, decode_options(options, transport.place));
    handoff::Source* source = prefill_->handoff_source();
    handoff::Target* target = decode_->handoff_target();
    if (source == nullptr || target == nullptr) throw UnsupportedError("the " + name() + " executor takes no part in handoffs");
    run_.emplace(*source, *target, std::move(transport), limits_, trace, config.loops());
  }

  void submit(const Submission& submission) override {
    if (!run_) {
      prefill_->submit(submission);
      return;
    }
    const SplitSubmission split = split_submission(submission, run_->handed);
    const auto& [prompts, rest, offers, cancels, handed] = split;
    run_->failing_submissions += submission.failure == PlannedFailure::none ? 0 : 1;

    prefill_->submit(prompts);
    for (const int request : cancels) cancel(request);
    for (const int request : offers) {
      if (!run_->sender.knows(request) && run_->source.holds(request)) run_->sender.offer(request);
    }
    for (const WorkItem& item : prompts.items) {
      if (completes_prompt(item, run_->trace, run_->loops) && submission.failure == PlannedFailure::none && run_->sender.knows(item.request))
        run_->clocks.prompt_complete(item.request);
    }
    move_on();
    for (const int request : handed) hand_off(request);
    decode_->submit(rest);
  }

  // Of a run with a stage, which the first executor has alone.
  handoff::Source* handoff_source() override { return run_ ? nullptr : prefill_->handoff_source(); }
  handoff::Target* handoff_target() override { return run_ ? nullptr : prefill_->handoff_target(); }

  RunRecord finish() override {
    if (!run_) return prefill_->finish();
    const auto most_reserved_bytes = static_cast<std::int64_t>(run_->target.most_transfer_bytes());
    const RunRecord prompts = prefill_->finish();
    RunRecord record = decode_->finish();
    for (std::size_t i = 0; i < record.requests.size(); ++i) add_prompt(prompts.requests.at(i), record.requests[i]);
    add_counters(prompts.counters, record.counters);
    HeldResources& held = record.held_at_drain;
    const HeldResources& other = prompts.held_at_drain;
    held.requests += other.requests, held.pages += other.pages, held.blocks += other.blocks, held.references += other.references;
    held.hidden_windows += other.hidden_windows, held.snapshots += other.snapshots, held.published_windows += other.published_windows,
        held.tickets += other.tickets;
    held.transfers += other.transfers;
    for (std::size_t i = 0; i < record.requests.size(); ++i) {
      const int request = static_cast<int>(i);
      if (!run_->sender.knows(request)) continue;
      record.handoffs.push_back(run_->sender.record(request));
      record.handoffs.back().transport = std::string(run_->transport.sender->name());
      record.handoffs.back().most_reserved_bytes = most_reserved_bytes;
    }
    run_.reset();
    return record;
  }

 private:
  struct Run {
    Run(handoff::Source& from, handoff::Target& to, handoff::TransportEnds ends, HandoffLimits limits, const Trace& of, int loop_count)
        : transport(std::move(ends)),
          source(from),
          target(to),
          sender(from, *transport.sender, 1, limits),
          receiver(to, *transport.receiver),
          clocks(sender),
          trace(of),
          loops(loop_count) {}

    handoff::TransportEnds transport;
    handoff::Source& source;
    handoff::Target& target;
    SenderEndpoint sender;
    ReceiverEndpoint receiver;
    HandoffClocks clocks;
    const Trace& trace;
    const int loops;
    std::set<int> handed;
    std::int64_t failing_submissions = 0;
  };

  bool move_on() {
    const bool any = pump(run_->sender, run_->receiver);
    run_->clocks.note_closed();
    return any;
  }

  // Until the transfer is over. One that does not move for a lease, as a transport that works asynchronously may not, is given up.
  void close(int request) {
    const auto closed = [&] { return run_->sender.closed(request); };
    if (pump_until([&] { return move_on(); }, closed, limits_.lease, std::chrono::microseconds{0})) return;
    run_->sender.lease_expired(request);
    run_->receiver.lease_expired(request);
    move_on();
  }

  void hand_off(int request) {
    if (!run_->sender.knows(request)) run_->sender.offer(request);  // it was not held, and the source says so
    close(request);
    if (run_->sender.outcome(request) != handoff::Outcome::handed_over) {
      const std::string& reason = run_->sender.reason(request);
      throw FileError(name_in_trace(request) + " was not handed over (" + std::string(handoff::to_string(run_->sender.outcome(request))) + ")" +
                      (reason.empty() ? "" : ": " + reason));
    }
    run_->handed.insert(request);
  }

  void cancel(int request) {
    if (!run_->sender.knows(request)) return;
    run_->sender.cancel(request);
    run_->receiver.cancel(request);
    close(request);
    // What it holds on either side is not free before its writes have ended: nothing can go on as if it were.
    if (!run_->sender.closed(request)) throw FileError(name_in_trace(request) + " was cancelled, and its handoff has not ended within the lease");
  }

  std::string name_in_trace(int request) const { return "request " + std::to_string(request) + " of trace " + run_->trace.name; }

  void add_counters(const RunCounters& prompts, RunCounters& counters) const {
    const RunCounters rest = counters;
    for (const RunCounterField& field : run_counter_fields()) counters.*field.member += prompts.*field.member;
    counters.submissions = rest.submissions;  // every submission goes to both sides
    counters.most_in_flight = std::max(prompts.most_in_flight, rest.most_in_flight);
    counters.failures = std::min(counters.failures, run_->failing_submissions);
  }

  ExecutorFactory make_decode_;
  TransportFactory make_transport_;
  HandoffLimits limits_;
  std::unique_ptr<Executor> prefill_, decode_;
  std::optional<Run> run_;
};

}  // namespace

std::unique_ptr<Executor> make_handoff_executor(ExecutorFactory make, TransportFactory transport, HandoffLimits limits) {
  return std::make_unique<HandoffExecutor>(make, make, std::move(transport), limits);
}

std::unique_ptr<Executor> make_handoff_executor(ExecutorFactory prefill, ExecutorFactory decode, TransportFactory transport,
                                                HandoffLimits limits) {
  return std::make_unique<HandoffExecutor>(prefill, std::move(decode), std::move(transport), limits);
}

}  // namespace loopgauge::harness
