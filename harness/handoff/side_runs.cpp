// SPDX-License-Identifier: Apache-2.0
#include "harness/handoff/side_runs.hpp"

#include <algorithm>
#include <functional>
#include <string>

#include "harness/handoff/pump.hpp"
#include "harness/interrupt.hpp"
#include "models/error.hpp"

namespace loopgauge::harness {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::microseconds kPause{50};
constexpr std::chrono::milliseconds kFarewell{2000};

// Why the other side does not take part any more; empty while it does.
std::string absence(const SocketConnection& connection, handoff::Channel& channel, const char* side) {
  if (!channel.peer_lost()) return {};
  if (!goodbye_came(connection)) return std::string(": the process of the ") + side + " side has ended without a word";
  const std::string reason = goodbye_reason(connection);
  return std::string(": the ") + side + " side has ended" + (reason.empty() ? "" : ": " + reason);
}

// Ends every request, and the run: what this side held goes with them, or is named.
FileError not_handed_over(Executor& executor, int request, const Trace& trace, handoff::Outcome outcome, const std::string& reason,
                         const std::string& absence) {
  Submission end;
  for (std::size_t i = 0; i < trace.requests.size(); ++i) end.actions.push_back({ActionKind::cancel, static_cast<int>(i)});
  executor.submit(end);
  const std::string held = describe(executor.finish().held_at_drain);
  return FileError("request " + std::to_string(request) + " of trace " + trace.name + " was not handed over (" + std::string(to_string(outcome)) + ")" +
                   (reason.empty() ? "" : ": " + reason) + absence + "; held here afterwards: " + (held.empty() ? "nothing" : held));
}

// Runs one side once both know that they run the same, and whatever ends it tells the other.
template <class Body>
RunRecord with_greetings(SocketConnection& connection, const SideOptions& side, Body body) {
  std::string reason = "it was interrupted";
  try {
    say_hello(connection, side.place, side.identity);
    hear_hello(connection, side.place, side.identity, side.limits.lease);
    RunRecord record = body();
    say_goodbye(connection, {}, kFarewell);
    return record;
  } catch (const std::exception& error) {
    reason = error.what();
    say_goodbye(connection, reason, kFarewell);
    throw;
  } catch (...) {
    say_goodbye(connection, reason, kFarewell);
    throw;
  }
}

// The end of this process at work.
template <class Endpoint>
class Side {
 public:
  // `after_step`: called when the end has moved on as far as it goes.
  Side(Endpoint& endpoint, const SideOptions& options, std::function<void()> after_step = [] {})
      : endpoint_(endpoint), lease_(options.limits.lease), after_step_(std::move(after_step)) {}
  bool move_on() {
    const bool any = pump(endpoint_);
    after_step_();
    return any;
  }
  // False when nothing has moved for a lease.
  bool wait_for(const std::function<bool()>& done) {
    return pump_until([this] { return move_on(); }, done, lease_, kPause);
  }
  // Until the transfer of the request is over here, or is given up.
  void settle(int request, const std::function<bool()>& done) {
    if (!wait_for(done)) endpoint_.lease_expired(request);
  }

 private:
  Endpoint& endpoint_;
  const std::chrono::milliseconds lease_;
  const std::function<void()> after_step_;
};

}  // namespace

SplitSubmission split_submission(const Submission& submission, const std::set<int>& handed) {
  SplitSubmission split;
  for (const Action& action : submission.actions) {
    const int request = action.request;
    switch (action.kind) {
      case ActionKind::hand_off:
        split.handed.push_back(request);
        break;
      case ActionKind::publish:
      case ActionKind::evict:
        split.prompts.actions.push_back(action);
        break;
      case ActionKind::reuse:
        split.prompts.actions.push_back(action);
        split.offers.push_back(request);
        break;
      case ActionKind::cancel:
        // The request ends on both sides; of one that has been handed over P holds nothing.
        if (!handed.contains(request)) {
          split.prompts.actions.push_back(action);
          split.cancels.push_back(request);
        }
        split.rest.actions.push_back(action);
        break;
      default:
        (handed.contains(request) ? split.rest : split.prompts).actions.push_back(action);
    }
  }
  for (const WorkItem& item : submission.items) (item.kind == RowKind::prefill ? split.prompts : split.rest).items.push_back(item);
  split.prompts.failure = split.rest.failure = submission.failure;
  for (const WorkItem& item : split.prompts.items) split.offers.push_back(item.request);
  return split;
}

bool completes_prompt(const WorkItem& item, const Trace& trace, int loops) {
  return item.end == trace.requests.at(static_cast<std::size_t>(item.request)).prompt_length() && item.loop_last == loops;
}

RunOptions prefill_options(const RunOptions& options, handoff::MemoryPlace place) {
  RunOptions prefill = options;
  prefill.handoff = false;
  prefill.stage = Stage::prefill;
  prefill.region_memory = place;
  prefill.graph_replay = false;  // captured are decode steps
  prefill.speculation = {};      // speculated is on what decode rows say
  return prefill;
}

RunOptions decode_options(const RunOptions& options, handoff::MemoryPlace place) {
  RunOptions decode = options;
  decode.handoff = false;
  decode.stage = Stage::decode;
  decode.region_memory = place;
  return decode;
}

RunRecord run_prefill_side(Executor& executor, const Plan& plan, const Trace& trace, const EffectiveConfig& config, const RunOptions& options,
                           const std::shared_ptr<SocketConnection>& connection, const SideOptions& side) {
  return with_greetings(*connection, side, [&] {
    executor.begin(trace, config, prefill_options(options_for(plan, options), side.place));
    handoff::Source* source = executor.handoff_source();
    if (source == nullptr) throw UnsupportedError("the " + executor.name() + " executor takes no part in handoffs");
    const auto transport = make_socket_sender(connection, side.place);
    HandoffLimits limits = side.limits;
    limits.partition_bytes = std::min(limits.partition_bytes, kMostPartitionBytes);
    // Lives of a sender are told apart by the time at which they begin.
    SenderEndpoint sender(*source, *transport, static_cast<std::uint64_t>(Clock::now().time_since_epoch().count()), limits);
    HandoffClocks clocks(sender);
    Side here(sender, side, [&] { clocks.note_closed(); });
    std::set<int> handed, cancelled;
    for (const Submission& submission : plan.submissions) {
      throw_if_interrupted();
      const SplitSubmission split = split_submission(submission, handed);
      executor.submit(split.prompts);
      for (const int request : split.cancels) {
        cancelled.insert(request);
        if (!sender.knows(request)) continue;
        sender.cancel(request);
        here.settle(request, [&] { return sender.closed(request); });
      }
      for (const int request : split.offers) {
        if (!sender.knows(request)) sender.offer(request);
      }
      for (const WorkItem& item : split.prompts.items) {
        if (completes_prompt(item, trace, config.loops()) && submission.failure == PlannedFailure::none) clocks.prompt_complete(item.request);
      }
      here.move_on();
      for (const int request : split.handed) {
        here.settle(request, [&] { return sender.closed(request); });
        if (sender.outcome(request) != handoff::Outcome::handed_over) {
          throw not_handed_over(executor, request, trace, sender.outcome(request), sender.reason(request), absence(*connection, transport->channel(), "decode"));
        }
        handed.insert(request);
      }
    }
    RunRecord record = executor.finish();
    for (std::size_t i = 0; i < trace.requests.size(); ++i) {
      if (!sender.knows(static_cast<int>(i))) continue;
      record.handoffs.push_back(sender.record(static_cast<int>(i)));
      record.handoffs.back().transport = std::string(transport->name());
      // The decode side cancels it too, and refuses what comes of it when it is the sooner.
      if (cancelled.contains(static_cast<int>(i)) && sender.outcome(static_cast<int>(i)) != handoff::Outcome::handed_over) {
        record.handoffs.back().outcome = std::string(to_string(handoff::Outcome::cancelled));
      }
    }
    return record;
  });
}

RunRecord run_decode_side(Executor& executor, const Plan& plan, const Trace& trace, const EffectiveConfig& config, const RunOptions& options,
                          const std::shared_ptr<SocketConnection>& connection, const SideOptions& side) {
  return with_greetings(*connection, side, [&] {
    executor.begin(trace, config, decode_options(options_for(plan, options), side.place));
    handoff::Target* target = executor.handoff_target();
    if (target == nullptr) throw UnsupportedError("the " + executor.name() + " executor takes no part in handoffs");
    const auto transport = make_socket_receiver(connection, side.place);
    ReceiverEndpoint receiver(*target, *transport);
    Side here(receiver, side);
    const auto lost = [&] { return transport->channel().peer_lost(); };
    std::set<int> handed;
    for (const Submission& submission : plan.submissions) {
      throw_if_interrupted();
      const SplitSubmission split = split_submission(submission, handed);
      for (const int request : split.cancels) receiver.cancel(request);
      here.move_on();
      for (const int request : split.handed) {
        const auto ended = [&] { return receiver.knows(request) && (receiver.closed(request) || receiver.state(request) == handoff::Receiver::State::active); };
        here.settle(request, [&] { return ended() || lost(); });
        here.move_on();  // what the loss of the other side ends
        if (!receiver.knows(request) || receiver.state(request) != handoff::Receiver::State::active) {
          const auto outcome = receiver.knows(request) ? receiver.outcome(request) : lost() ? handoff::Outcome::peer_lost : handoff::Outcome::expired;
          const std::string reason = receiver.knows(request) ? receiver.reason(request) : "nothing has come of it";
          throw not_handed_over(executor, request, trace, outcome, reason, absence(*connection, transport->channel(), "prefill"));
        }
        handed.insert(request);
      }
      executor.submit(split.rest);
    }
    // The other side may be waiting for an answer: until it has gone too. Whatever becomes of it then, everything has been decoded.
    static_cast<void>(here.wait_for([&] { return goodbye_came(*connection) || lost(); }));
    RunRecord record = executor.finish();
    for (RequestRecord& request : record.requests) request.scores = {}, request.active = {};
    return record;
  });
}

}  // namespace loopgauge::harness
